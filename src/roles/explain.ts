import { createHash } from 'node:crypto';
import { create } from '@bufbuild/protobuf';
import { AsyncDisposableStack } from '@whatwg-node/disposablestack';
import { type ExplainRouteResponse, RequestFactsSchema } from '../../gen/baton/v1/router_pb.ts';
import type { Config } from '../config/config.ts';
import { findBodyFault, scanBody } from '../core/body-limits.ts';
import { BatonError } from '../core/errors.ts';
import { type Api, readFacts } from '../core/facts.ts';
import { readIdentity } from '../core/identity.ts';
import { findMember, type ScannedObject } from '../core/json-scan.ts';
import { LinkedRequest, type LinkRules, linkRequest } from '../core/link.ts';
import { prefixMarks } from '../core/prefix-marks.ts';
import { toldMembers, unprovenMembers } from '../core/prompt-members.ts';
import type { Logger } from '../obs/log.ts';
import { whyNoConnection } from '../rpc/connection-words.ts';
import { batonErrorFrom } from '../rpc/errors.ts';
import { mediaHistory } from '../services/route-facts.ts';
import { createPeers } from './peers.ts';

/** A request to be explained: the body as a client would send it, and what else the router is told. */
export interface ExplainedRequest {
  readonly body: Uint8Array;
  readonly tenant: string;
  /** Names the conversation where the body does not. */
  readonly conversation: string;
}

/** What was asked, or why it cannot be: `bad` for the request, `failed` for the router's answer. */
export type Explained =
  | { readonly kind: 'ok'; readonly answer: ExplainRouteResponse }
  | { readonly kind: 'bad' | 'failed'; readonly message: string };

const TIMEOUT_MS = 5000;

/** Asks a live router what it would do with a request; nothing is reserved and no text leaves this process. */
export async function explainRequest(config: Config, request: ExplainedRequest, log: Logger): Promise<Explained> {
  const read = readRequest(config, request);
  if (read.kind === 'bad') return read;
  await using stack = new AsyncDisposableStack();
  const url = config.routerUrl ?? '';
  try {
    const { router } = createPeers(config.rpcClient, { log, stack })(url);
    return { kind: 'ok', answer: await router.explainRoute({ facts: read.facts }, { timeoutMs: TIMEOUT_MS }) };
  } catch (error) {
    const known = error instanceof BatonError ? error : batonErrorFrom(error, 'ROUTER_UNAVAILABLE');
    if (known.reason !== 'ROUTER_UNAVAILABLE') return { kind: 'failed', message: known.message };
    const why = whyNoConnection(error);
    const cause = why === undefined ? '' : `: ${why}`;
    return { kind: 'failed', message: `no router answers at ${url}${cause}; name its RPC port with --router-url` };
  }
}

type Read =
  | { readonly kind: 'ok'; readonly facts: ReturnType<typeof factsOf> }
  | { readonly kind: 'bad'; readonly message: string };

function readRequest(config: Config, request: ExplainedRequest): Read {
  const { body, conversation } = request;
  const scan = scanBody(body);
  if (scan.kind === 'invalid') return { kind: 'bad', message: `is no valid JSON: ${scan.message}` };
  if (scan.kind === 'over-limit') return { kind: 'bad', message: `has ${scan.message}` };
  if (scan.kind === 'not-object') return { kind: 'bad', message: `must hold a JSON object, not ${scan.type}` };
  const api = apiOf(scan);
  if (api === undefined) {
    return { kind: 'bad', message: 'has neither "messages" (a chat) nor "prompt" (a completion)' };
  }
  const fault = findBodyFault(body, scan);
  if (fault !== undefined) return { kind: 'bad', message: `cannot be planned: ${fault.message}` };
  const identity = readIdentity(config.identity.headers, {}, body, scan);
  if (identity.kind === 'invalid') return { kind: 'bad', message: identity.message };
  const named = identity.kind === 'named' ? identity.conversationId : '';
  return { kind: 'ok', facts: factsOf(config.reuse, request, scan, api, conversation === '' ? named : conversation) };
}

function apiOf(scan: ScannedObject): Api | undefined {
  if (findMember(scan, 'messages') !== undefined) return 'chat.completions';
  return findMember(scan, 'prompt') === undefined ? undefined : 'completions';
}

function factsOf(rules: LinkRules, { body, tenant }: ExplainedRequest, scan: ScannedObject, api: Api, named: string) {
  const { model, cacheSalt, stream, localReasons, continues } = readFacts(api, body, scan, named);
  const newHash = () => createHash('sha256');
  const unproven = unprovenMembers(api, body, scan);
  const { link, media } = linkRequest(rules, named, new LinkedRequest(api, body, scan, newHash), unproven);
  return create(RequestFactsSchema, {
    requestId: 'explain',
    tenant,
    api,
    model,
    cacheSalt,
    conversationId: link.conversationId,
    derivedConversation: link.derived,
    lookupConversationIds: [...link.lookups],
    stream,
    bodyBytes: body.byteLength,
    localReasons: [...localReasons],
    continues,
    unprovenMembers: toldMembers(unproven),
    ...(media === undefined ? {} : { media: mediaHistory(media) }),
    prefix: [...prefixMarks(api, body, scan, newHash)],
  });
}
