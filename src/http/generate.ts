import { isUtf8 } from 'node:buffer';
import { randomUUID } from 'node:crypto';
import type { FastifyReply, FastifyRequest } from 'fastify';
import { LegEnding, Leg } from '../../gen/baton/v1/router_pb.ts';
import { BatonError, isErrorReason } from '../core/errors.ts';
import { type Api, type BodyFacts, readFacts } from '../core/facts.ts';
import { type ObjectScan, scanObject } from '../core/json-scan.ts';
import { acceptedRequestId, forwardedHeaders } from '../core/request-headers.ts';
import { buildAccessRecord } from '../obs/access-log.ts';
import { errorFields, type Logger } from '../obs/log.ts';
import type { Metrics } from '../obs/metrics.ts';
import { type GenerateRequest, type HandOverDeps, type HandOverReport, handOver } from '../services/hand-over.ts';
import { refusalOf } from '../services/leg.ts';
import { modeName } from '../services/router.ts';
import { renderRefusal, toRefusal } from './errors.ts';
import { ClientLeft, ReplySink } from './reply-sink.ts';

/** What the two generating routes work with. */
export interface GenerateDeps {
  readonly handOver: HandOverDeps;
  readonly metrics: Metrics;
  readonly log: Logger;
  readonly clientKvTransferParams: 'refuse' | 'drop';
  readonly identityHeaders: readonly string[];
  readonly clientStallMs: number;
  /** Extra headers on every reply, e.g. `x-baton-sim`. */
  readonly replyHeaders: Readonly<Record<string, string>>;
}

type Scan = Extract<ObjectScan, { readonly kind: 'object' }>;

/** Path of each API, the same on the facade and on engines. */
export const GENERATE_ROUTES: Readonly<Record<string, Api>> = {
  '/v1/chat/completions': 'chat.completions',
  '/v1/completions': 'completions',
};

/** Serves one generating request to its end; never throws. */
export async function serveGenerate(
  deps: GenerateDeps,
  api: Api,
  request: FastifyRequest,
  reply: FastifyReply,
): Promise<void> {
  const { metrics, log } = deps;
  const startedAt = performance.now();
  const requestId = acceptedRequestId(request.headers['x-request-id']) ?? randomUUID();
  metrics.requestStarted(api);
  reply.hijack();
  const sink = new ReplySink(reply.raw, {
    stallMs: deps.clientStallMs,
    onBytes: (bytes) => metrics.streamed(bytes),
  });
  for (const [name, value] of Object.entries(reply.getHeaders())) reply.raw.setHeader(name, value ?? '');
  for (const [name, value] of Object.entries(deps.replyHeaders)) reply.raw.setHeader(name, value);
  let facts: BodyFacts | undefined;
  let report: HandOverReport | undefined;
  let refusal = undefined as HandOverReport['refusal'];
  try {
    const parsed = readBody(deps, api, request);
    facts = parsed.facts;
    report = await handOver(deps.handOver, toGenerateRequest(deps, api, request, requestId, parsed), sink);
    refusal = report.refusal;
  } catch (error) {
    refusal = toRefusal(error);
    if (!(error instanceof BatonError)) log.error({ request_id: requestId, ...errorFields(error) }, 'request failed');
    else if (error.httpStatus >= 500) log.error({ request_id: requestId, reason: error.reason }, 'request failed');
  }
  if (refusal !== undefined && !sink.signal.aborted && sink.status === 0) {
    const { headers, body } = renderRefusal(refusal);
    sink.start(refusal.status, { ...headers, 'content-length': String(Buffer.byteLength(body)), 'x-request-id': requestId });
    sink.write(body);
    sink.end();
  }
  record(deps, { api, requestId, startedAt, facts, report, refusal, sink });
}

interface ParsedBody {
  readonly body: Uint8Array;
  readonly scan: Scan;
  readonly facts: BodyFacts;
}

function readBody(deps: GenerateDeps, api: Api, request: FastifyRequest): ParsedBody {
  const encoding = request.headers['content-encoding'];
  if (encoding !== undefined && encoding.toLowerCase() !== 'identity') {
    throw new BatonError({
      reason: 'CONTENT_ENCODING_UNSUPPORTED',
      message: 'Send the body without content-encoding.',
    });
  }
  const body = request.body instanceof Uint8Array ? request.body : new Uint8Array();
  if (body.byteLength === 0) throw new BatonError({ reason: 'BODY_EMPTY', message: 'The body is empty; send a JSON object.' });
  const scan = scanObject(body);
  if (scan.kind === 'invalid' || !isUtf8(body)) {
    const where = scan.kind === 'invalid' ? `${scan.message} at byte ${scan.offset}` : 'not UTF-8';
    throw new BatonError({ reason: 'BODY_INVALID_JSON', message: `The body is no valid JSON: ${where}.` });
  }
  if (scan.kind === 'not-object') {
    throw new BatonError({ reason: 'BODY_NOT_OBJECT', message: `The body must be a JSON object, not ${scan.type}.` });
  }
  const facts = readFacts(api, body, scan);
  const [refused] = facts.refused;
  if (refused !== undefined && deps.clientKvTransferParams === 'refuse') {
    throw new BatonError({
      reason: 'KV_TRANSFER_PARAMS_REFUSED',
      message: `\`${refused}\` is set by baton alone; leave it out.`,
      param: refused,
    });
  }
  return { body, scan, facts };
}

function toGenerateRequest(
  deps: GenerateDeps,
  api: Api,
  request: FastifyRequest,
  requestId: string,
  { body, scan, facts }: ParsedBody,
): GenerateRequest {
  return {
    requestId,
    api,
    path: request.raw.url ?? '',
    body,
    scan,
    facts: { ...facts, conversationId: headerConversation(deps, request) ?? facts.conversationId },
    tenant: 'anonymous',
    headers: forwardedHeaders(request.headers),
    authorization: request.headers.authorization,
    debug: request.headers['x-baton-debug'] === '1',
  };
}

function headerConversation(deps: GenerateDeps, request: FastifyRequest): string | undefined {
  for (const name of deps.identityHeaders) {
    const value = request.headers[name];
    if (typeof value === 'string' && value !== '') return value.slice(0, MAX_CONVERSATION_ID);
  }
  return undefined;
}

/** Limit of the Router contract, bytes. */
const MAX_CONVERSATION_ID = 512;

interface Finished {
  readonly api: Api;
  readonly requestId: string;
  readonly startedAt: number;
  readonly facts: BodyFacts | undefined;
  readonly report: HandOverReport | undefined;
  readonly refusal: HandOverReport['refusal'];
  readonly sink: ReplySink;
}

/** One access-log line and the counters of a request: ids and numbers, never text. */
function record(deps: GenerateDeps, finished: Finished): void {
  const { metrics, log } = deps;
  const { api, requestId, startedAt, facts, report, refusal, sink } = finished;
  const durationMs = performance.now() - startedAt;
  const gone = sink.signal.aborted;
  const status = sink.status === 0 ? 499 : sink.status;
  const model = facts?.model ?? '';
  const mode = report?.plan === undefined ? undefined : modeName(report.plan.mode);
  const usage = report?.reply?.usage;
  const contentAt = report?.reply?.contentAt ?? 0;
  const ttftMs = contentAt > 0 ? contentAt - startedAt : undefined;
  const tokens = {
    promptTokens: usage?.promptTokens,
    completionTokens: usage?.completionTokens,
    cachedTokens: usage?.cachedTokens,
  };
  metrics.requestFinished({ api, model, mode, status, durationMs, ...tokens });
  if (ttftMs !== undefined) metrics.firstContent(model, 'total', ttftMs);
  if (report?.prefillMs !== undefined) metrics.prefillFinished(model, report.prefillMs);
  if (report?.noHandle !== undefined) metrics.handleRejected('prefill', report.noHandle);
  for (const reason of report?.retries ?? []) metrics.retried(reason);
  for (const leg of report?.legs ?? []) {
    metrics.legEnded(leg.leg === Leg.PREFILL ? 'prefill' : 'decode', ENDING_NAMES[leg.ending] ?? 'unknown');
  }
  if (gone) metrics.clientAborted(phaseOf(sink));
  else if (typeof refusal?.error.code === 'string' && isErrorReason(refusal.error.code.toUpperCase())) {
    metrics.failed(refusal.error.code);
  }
  const line = buildAccessRecord({
    requestId,
    api,
    model: metrics.modelLabel(model),
    stream: facts?.stream ?? false,
    mode,
    planReason: report?.plan?.reason,
    prefillInstance: report?.prefillId,
    decodeInstance: report?.decodeId,
    status,
    prefillMs: report?.prefillMs,
    ttftMs,
    durationMs,
    ...tokens,
    retries: report?.retries.length ?? 0,
    ending: gone ? `client_${phaseOf(sink)}` : (report?.ending ?? 'refused'),
  });
  log.info(line, 'request');
}

function phaseOf(sink: ReplySink): string {
  const reason: unknown = sink.signal.reason;
  return reason instanceof ClientLeft ? reason.phase : 'closed';
}

const ENDING_NAMES: Readonly<Record<number, string>> = {
  [LegEnding.OK]: 'ok',
  [LegEnding.CLIENT_ERROR]: 'client_error',
  [LegEnding.BUSY]: 'busy',
  [LegEnding.SERVER_ERROR]: 'server_error',
  [LegEnding.NOT_SENT]: 'not_sent',
  [LegEnding.RESET]: 'reset',
  [LegEnding.TIMEOUT]: 'timeout',
  [LegEnding.ABORTED]: 'aborted',
  [LegEnding.NO_HANDLE]: 'no_handle',
};

/** For requests that fail before their route runs. */
export function refuseEarly(error: BatonError, reply: FastifyReply): FastifyReply {
  const refusal = refusalOf(error);
  const { headers, body } = renderRefusal(refusal);
  return reply.code(refusal.status).headers(headers).send(body);
}
