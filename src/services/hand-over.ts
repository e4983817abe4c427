import type { Client } from '@connectrpc/connect';
import { Leg, type LegReport, type Plan, PlanMode, type Router, type Target } from '../../gen/baton/v1/router_pb.ts';
import type { TokenChain } from '../../gen/baton/v1/tokens_pb.ts';
import type { CheckedHandle, Connector, HandleConnector } from '../connectors/connector.ts';
import { BatonError } from '../core/errors.ts';
import { type Api, type BodyFacts, CONSUMED_MEMBERS, type LocalReason, REFUSED_MEMBERS } from '../core/facts.ts';
import type { Edits, ScannedObject } from '../core/json-scan.ts';
import type { MediaLink, TurnLink } from '../core/link.ts';
import type { PrefixMark } from '../core/policy.ts';
import { goesAsTokenIds, mayAskForTokenIds } from '../core/prompt-members.ts';
import type { RemoteHostRule } from '../core/remote-host.ts';
import type { MuteSpec } from '../core/reply.ts';
import { tokenIdsJson } from '../core/token-ids.ts';
import { streamOf, wantsUsage } from '../core/whole-stream.ts';
import type { EngineClient, LegRequest } from '../engine/client.ts';
import type { DurationCounter } from '../obs/duration-histogram.ts';
import type { ClientSink } from './client-sink.ts';
import { type DecodeResult, runDecodeLeg } from './decode-leg.ts';
import type { FirstTokenDeps } from './first-token-deps.ts';
import { handOverFirstToken } from './first-token-hand-over.ts';
import { type LegAuth, type Refusal, refusalOf } from './leg.ts';
import { LegBook, MUTE } from './leg-book.ts';
import { type KnownPrompt, requestPlan, UNKNOWN_PROMPT } from './plan-request.ts';
import {
  isHopeless,
  mayHaveReadLate,
  type Prefilled,
  PrefillPhase,
  readFor,
  takesTokenIds,
  warmOf,
} from './prefill-phase.ts';
import type { ReplyFacts } from './reply-facts.ts';
import type { ReportSender } from './report-sender.ts';
import type { RetryBudget } from './retry-budget.ts';
import type { RouterCheck } from './router-check.ts';
import { awakeFirst, type SilenceWatch } from './silence-watch.ts';
import type { Timeline } from './timeline.ts';

/** A scanned client request, ready to be handed over. */
export interface GenerateRequest {
  readonly requestId: string;
  readonly api: Api;
  /** Path on the engines, e.g. `/v1/chat/completions`, with the client's query string. */
  readonly path: string;
  readonly body: Uint8Array;
  readonly scan: ScannedObject;
  readonly facts: BodyFacts;
  readonly tenant: string;
  /** Where this turn's handle is kept, and earlier ones are looked for. */
  readonly link: TurnLink;
  /** The same where the request has media, all of them within it. */
  readonly media?: MediaLink;
  /** Members that keep a handle from being used, see `core/prompt-members.ts`. */
  readonly unprovenMembers: readonly string[];
  /** Beginnings of the prompt, where a policy compares them. */
  readonly prefix?: readonly PrefixMark[];
  /** Headers for both legs, request id and credentials not included. */
  readonly headers: Readonly<Record<string, string>>;
  readonly authorization: string | undefined;
  /** The client asked to be told the plan (`x-baton-debug: 1`). */
  readonly debug: boolean;
  readonly timeline: Timeline;
}

/** Time limits of the legs in milliseconds, 0 = none; see the configuration's `timeouts`. */
export interface HandOverLimits {
  readonly queueMs: number;
  /** A router that is away. */
  readonly routerMs: number;
  readonly prefillColdMs: number;
  readonly firstContentMs: number;
  readonly wholeReplyMs: number;
  readonly idleMs: number;
  readonly tokenizeMs: number;
  readonly leaseMarginMs: number;
  readonly holdBytes: number;
  readonly streamBufferBytes: number;
}

/** What a hand-over works with. */
export interface HandOverDeps {
  readonly router: Client<typeof Router>;
  /** Whether a router in another process answers, on this clock; absent where it is in this one. */
  readonly routerCheck?: Pick<RouterCheck, 'answeredAt' | 'askNow'>;
  /** Not owned; tells the same router how plans went. */
  readonly reports: ReportSender;
  readonly engines: EngineClient;
  readonly connectors: Readonly<Record<string, Connector>>;
  /** What a connector that hands the first token over needs besides; undefined where none is used. */
  readonly firstToken?: FirstTokenDeps;
  readonly remoteHost: RemoteHostRule;
  /** The decode leg is to carry the token ids that P reports, where both engines are known to take them. */
  readonly forwardTokenIds: boolean;
  /** Models whose replies have parts that only an engine's own stream shows as they come; added to as they are seen. */
  readonly streamsOnly: Set<string>;
  /** Headers with the credential for an instance, and whose it is. */
  readonly engineHeaders: (instanceId: string, authorization: string | undefined) => EngineHeaders;
  readonly silences: Pick<SilenceWatch, 'of' | 'silentForMs'>;
  /** Whether the process that a plan names still has its place, as far as this facade knows. */
  readonly isAsPlanned: (target: Target) => boolean;
  /** Told whether an instance answered a leg with a stored handle, or hung on it; absent where the router in this process is. */
  readonly noteRead?: (instanceId: string, state: 'on' | 'off') => void;
  /** Told whenever an instance has sent something. */
  readonly noteAlive: (instanceId: string) => void;
  /** The proof of a turn's tokens, chain `c1`. */
  readonly chainOf: (tokenIds: readonly number[], seed: ChainSeed) => TokenChain;
  readonly toBatonError: (error: unknown) => BatonError;
  readonly retryBudget: RetryBudget;
  /** Where the times between the pieces of a reply of this model are counted. */
  readonly gapsOf: (model: string) => DurationCounter;
  readonly limits: HandOverLimits;
  readonly now: () => number;
}

/** What separates the chains of equal tokens. */
export interface ChainSeed {
  readonly model: string;
  readonly adapter: string;
  readonly cacheSalt: string;
}

/** Credential headers of a leg. */
export interface EngineHeaders {
  readonly headers: Readonly<Record<string, string>>;
  readonly auth: LegAuth;
}

/** How a request went, for log and metrics: ids and numbers only. */
export interface HandOverReport {
  readonly plan: Plan | undefined;
  readonly prefillId: string | undefined;
  readonly decodeId: string | undefined;
  readonly ending: 'ok' | 'refused' | 'failed' | 'broken' | 'gone';
  /** What the client is still to be told; undefined once its reply has started. */
  readonly refusal: Refusal | undefined;
  readonly reply: ReplyFacts | undefined;
  readonly prefillMs: number | undefined;
  /** Reason why D ran without P's handle although the plan wanted one. */
  readonly noHandle: string | undefined;
  /** What became of the KV of earlier turns; `none` where there was nothing to reuse. */
  readonly outcome: string;
  readonly retries: readonly string[];
  readonly legs: readonly LegReport[];
}

/** What the client did not ask for, where baton asked for the token ids. */
const MUTE_TOKENS: MuteSpec = {
  top: [...MUTE.top, 'prompt_token_ids'],
  choice: ['prompt_token_ids', 'token_ids'],
};

/** Requests whose reply has more than one choice. */
const SEVERAL_CHOICES: ReadonlySet<string> = new Set(['n', 'multi_prompt', 'beam_search'] satisfies LocalReason[]);

/** The client's body without what only baton understands. */
const ALONE: Edits = { set: new Map(), drop: new Set([...CONSUMED_MEMBERS, ...REFUSED_MEMBERS]) };

const LEASE_RAN_OUT = new BatonError({
  reason: 'ENGINE_TIMEOUT',
  message: 'The decode engine could not be reached before the hand-over ran out.',
});

const NO_DECODE = new BatonError({
  reason: 'ENGINE_UNREACHABLE',
  message: 'The decode engine of this request was replaced before it could be asked.',
  retryAfterMs: 1000,
});

/** Serves one request: plan, prefill leg, decode leg, relay; DESIGN's failure ladder decides what follows a failure. */
export async function handOver(
  deps: HandOverDeps,
  request: GenerateRequest,
  sink: ClientSink,
): Promise<HandOverReport> {
  deps.retryBudget.earn();
  const planned = await requestPlan(deps, request, sink.signal);
  if (planned.kind === 'ended') return { ...NOTHING_DONE, ending: planned.ending, refusal: planned.refusal };
  const { plan, prompt } = planned;
  if (deps.firstToken === undefined || plan.mode === PlanMode.AGGREGATED) {
    return new HandOver(deps, request, sink, plan, prompt).run();
  }
  const runAlone = (changed: Plan) => new HandOver(deps, request, sink, changed, UNKNOWN_PROMPT).run();
  return handOverFirstToken(deps, deps.firstToken, request, sink, plan, runAlone);
}

const NOTHING_DONE: Omit<HandOverReport, 'ending' | 'refusal'> = {
  plan: undefined,
  prefillId: undefined,
  decodeId: undefined,
  reply: undefined,
  prefillMs: undefined,
  noHandle: undefined,
  outcome: 'none',
  retries: [],
  legs: [],
};

type DecodeInput = { readonly handle: CheckedHandle; readonly prefilled: Prefilled } | undefined;

class HandOver {
  readonly #deps: HandOverDeps;
  readonly #request: GenerateRequest;
  readonly #sink: ClientSink;
  readonly #plan: Plan;
  readonly #prompt: KnownPrompt;
  readonly #book: LegBook;
  /** Undefined for modes with one leg. */
  readonly #connector: HandleConnector | undefined;
  readonly #prefill: PrefillPhase | undefined;

  constructor(deps: HandOverDeps, request: GenerateRequest, sink: ClientSink, plan: Plan, prompt: KnownPrompt) {
    this.#deps = deps;
    this.#request = request;
    this.#sink = sink;
    this.#plan = plan;
    this.#prompt = prompt;
    this.#book = new LegBook(deps, request, plan);
    if (plan.mode !== PlanMode.PREFILL_DECODE && plan.mode !== PlanMode.PREFILL_DECODE_REUSE) return;
    const connector = deps.connectors[plan.connector];
    if (connector?.runner !== 'handles') {
      throw new BatonError({ reason: 'INTERNAL', message: `This facade is not set up for "${plan.connector}".` });
    }
    this.#connector = connector;
    this.#prefill = new PrefillPhase(deps, request, sink, this.#book, connector, warmOf(plan, prompt, request), prompt);
  }

  run(): Promise<HandOverReport> {
    return this.#book.close(() => this.#runPlan());
  }

  async #runPlan(): Promise<HandOverReport> {
    let decodes = targets(this.#plan.decode, this.#plan.decodeFallbacks);
    let prefills = targets(this.#plan.prefill, this.#plan.prefillFallbacks);
    let prefilled: Prefilled | undefined;
    let alone = this.#prefill === undefined;
    let fresh = false;
    let moved = false;
    for (;;) {
      const [decode] = decodes;
      if (decode === undefined) throw new BatonError({ reason: 'INTERNAL', message: 'No decode instance is left.' });
      if (!alone && this.#prefill !== undefined && prefilled === undefined) {
        const outcome = await this.#prefill.run(prefills, decode, fresh);
        if (outcome.kind === 'gone') return this.#book.end('gone');
        if (outcome.kind === 'stop') return this.#book.end(outcome.ending, outcome.refusal);
        if (outcome.kind === 'no-handle') {
          this.#book.noHandle = outcome.reason;
          alone = true;
        } else {
          prefilled = outcome;
          // What P has computed is in its prefix cache: it is the one to ask again.
          const { target } = outcome;
          prefills = [target, ...prefills.filter((candidate) => candidate !== target)];
        }
      }
      // The lease ends on P's clock: a leg that starts too late would read blocks that hold something else.
      if (prefilled !== undefined && this.#deps.now() > prefilled.usableUntil) {
        prefilled = undefined;
        if (!this.#book.mayRetry('lease')) return this.#book.end('failed', refusalOf(LEASE_RAN_OUT));
        continue;
      }
      if (prefilled?.isRendered === true) {
        // Another process may render the prompt by another template, and read KV that is not that of its own prompt.
        const { target } = prefilled;
        if (!this.#deps.isAsPlanned(target)) {
          prefilled = undefined;
          prefills = prefills.filter((candidate) => candidate !== target);
          continue;
        }
        if (!this.#deps.isAsPlanned(decode)) {
          decodes = decodes.slice(1);
          if (decodes.length === 0) return this.#book.end('failed', refusalOf(NO_DECODE));
          continue;
        }
      }
      const result = await this.#decode(decode, this.#inputFor(decode, prefilled), fresh);
      if (result.kind === 'gone') return this.#book.end('gone');
      if (result.kind === 'relayed') return this.#book.end('ok', undefined, result.facts);
      if (result.kind === 'broken') return this.#book.end('broken', undefined, result.facts);
      if (result.kind === 'refused') return this.#book.end('refused', result.refusal);
      const others = awakeFirst(decodes.slice(1), this.#deps.silences);
      if (result.cause === 'late') {
        // Slow to connect to: another one may be quicker, and P runs again in any case.
        if (others.length > 0) decodes = others;
        continue;
      }
      if (result.cause === 'not_sent') {
        if (others.length === 0) return this.#book.end('failed', result.refusal);
        decodes = others;
        continue;
      }
      // From here on D may have read the blocks: the handle is spent whatever follows.
      prefilled = undefined;
      const onSame = result.cause === 'stale' && !fresh;
      // Another engine once: what fails twice fails for a reason that a third engine would share.
      if (result.cause === 'started' || (!onSame && (moved || others.length === 0))) {
        return this.#book.end('failed', result.refusal);
      }
      if (!this.#book.mayRetry(result.cause)) return this.#book.end('failed', result.refusal);
      fresh = true;
      if (onSame) continue;
      decodes = others;
      moved = true;
    }
  }

  /** P's handle for this very D: it is checked before every leg that carries it. */
  #inputFor(decode: Target, prefilled: Prefilled | undefined): DecodeInput {
    if (prefilled === undefined || this.#connector === undefined) return undefined;
    if (prefilled.read.decode === decode) return { handle: prefilled.read.handle, prefilled };
    const reading = readFor(this.#connector, this.#deps, prefilled.raw, prefilled.target, decode);
    if (reading.kind === 'handle') return { handle: reading.handle, prefilled };
    this.#book.noHandle = reading.reason;
    return undefined;
  }

  async #decode(target: Target, input: DecodeInput, fresh: boolean): Promise<DecodeResult> {
    const { engines, now } = this.#deps;
    const { api, facts, timeline, unprovenMembers } = this.#request;
    timeline.enter('hand_over');
    const captureTokens =
      input !== undefined &&
      this.#plan.captureTokens &&
      mayAskForTokenIds(api, unprovenMembers) &&
      this.#isProvable(input.prefilled);
    const isWhole = captureTokens && this.#plan.wholeDecode && facts.stream;
    const asksForTokens = captureTokens || isCompared(target, input);
    const edits = this.#editsFor(target, input, asksForTokens);
    const { request, auth } = this.#book.makeRequest(Leg.DECODE, target, isWhole ? unstreamed(edits) : edits, fresh);
    // Connecting takes time, too.
    const usableUntil = input?.prefilled.usableUntil ?? Number.POSITIVE_INFINITY;
    const timely: LegRequest = {
      ...request,
      isTooLate: () => now() > usableUntil,
      onConnected: () => timeline.enter('decode_wait'),
    };
    const startedAt = now();
    const lender = input?.prefilled.target ?? target;
    const lease = input?.prefilled.lease;
    const result = await runDecodeLeg(engines, timely, this.#sink, {
      ...this.#book.decodeOptions(target),
      auth,
      ...(asksForTokens && !facts.returnTokenIds ? { mute: MUTE_TOKENS } : {}),
      captureTokens: asksForTokens,
      streamed: facts.stream && !isWhole,
      ...(isWhole ? { toStream: (reply: Uint8Array) => this.#toStream(reply) } : {}),
      severalChoices: facts.localReasons.some((reason) => SEVERAL_CHOICES.has(reason)),
      isHopeless: () => isHopeless(this.#deps, target.instanceId, lender, lease),
      ...(input === undefined ? {} : { promptTokenIds: input.prefilled.promptTokenIds }),
      isDoubtful: () => mayHaveReadLate(this.#deps, target.instanceId, lease),
    });
    this.#book.noteDecode(target, result, startedAt, input?.prefilled.target.instanceId ?? '', lease);
    return result;
  }

  /** What D made of media is proven by what P made of them. */
  #isProvable({ promptTokenIds }: Prefilled): boolean {
    return this.#request.media === undefined || promptTokenIds.length > 0;
  }

  #editsFor(target: Target, input: DecodeInput, asksForTokens: boolean): Edits {
    if (input === undefined || this.#connector === undefined) return this.#aloneEdits(target);
    const { handle, prefilled } = input;
    const { api } = this.#request;
    const promptTokenIds = !prefilled.isRendered && takesTokenIds(target) ? prefilled.promptTokenIds : [];
    return this.#connector.decode({ api, handle, promptTokenIds, captureTokens: asksForTokens });
  }

  /**
   * The token ids that were asked for go along where they need no `kv_transfer_params`: what has no flag true pins blocks for
   * ever, so that a chat is rendered again.
   */
  #aloneEdits(target: Target): Edits {
    const { api, body, scan, unprovenMembers } = this.#request;
    const { tokenIds, instanceIds } = this.#prompt;
    const isKnown = tokenIds.length > 0 && instanceIds.has(target.instanceId) && takesTokenIds(target);
    const isText = api === 'completions' && goesAsTokenIds(api, body, scan, unprovenMembers);
    if (!isKnown || !isText || !this.#deps.forwardTokenIds) return ALONE;
    return { ...ALONE, set: new Map([['prompt', tokenIdsJson(tokenIds)]]) };
  }

  #toStream(reply: Uint8Array): Uint8Array | undefined {
    const { api, body, facts, scan } = this.#request;
    const stream = streamOf(api, reply, wantsUsage(body, scan));
    if (stream?.hasMore === true) this.#deps.streamsOnly.add(facts.model);
    return stream?.events;
  }
}

/**
 * Whether D tells what it made of a prompt that it rendered itself. It may be another process than the one that was planned
 * for, with another template: its pull of P's blocks would give fluent text for the wrong prompt.
 */
function isCompared(target: Target, input: DecodeInput): boolean {
  if (input === undefined) return false;
  const { isRendered, promptTokenIds } = input.prefilled;
  return isRendered && promptTokenIds.length > 0 && takesTokenIds(target);
}

/** The same leg without streaming. */
function unstreamed({ set, drop }: Edits): Edits {
  return { set: new Map([...set, ['stream', 'false']]), drop: new Set([...drop, 'stream_options']) };
}

function targets(first: Target | undefined, fallbacks: readonly Target[]): readonly Target[] {
  return first === undefined ? [] : [first, ...fallbacks];
}
