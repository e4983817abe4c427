import { Leg, LegEnding, type Plan, ReuseOutcome, type Target } from '../../gen/baton/v1/router_pb.ts';
import type { CheckedHandle, HandleConnector, PrefillReading, WarmHandle } from '../connectors/connector.ts';
import { BatonError } from '../core/errors.ts';
import { findMember } from '../core/json-scan.ts';
import { type Lease, mayReadLate, readableUntil } from '../core/lease.ts';
import { goesAsTokenIds, isRenderedByEach, PROVEN_VERSIONS } from '../core/prompt-members.ts';
import { readReply } from '../core/reply.ts';
import { beginsWithIds, isSameIds } from '../core/token-ids.ts';
import type { ClientSink } from './client-sink.ts';
import { toMs } from './durations.ts';
import type { GenerateRequest, HandOverDeps } from './hand-over.ts';
import {
  classifyStatus,
  type FailedLeg,
  HEALTH_LOOK_MS,
  type Refusal,
  refusalOf,
  runWholeLeg,
  type WholeReply,
} from './leg.ts';
import { type LegBook, toLegTarget } from './leg-book.ts';
import { type KnownPrompt, UNKNOWN_PROMPT } from './plan-request.ts';
import { awakeFirst } from './silence-watch.ts';

/** P's offer to D, with the time after which it must not be used any more. */
export interface Prefilled {
  readonly kind: 'handle';
  /** Raw `kv_transfer_params` of P's reply; what D gets is read from it for each D. */
  readonly raw: Uint8Array | undefined;
  /** What was read of it for the D that P was asked for. */
  readonly read: { readonly decode: Target; readonly handle: CheckedHandle };
  readonly target: Target;
  readonly usableUntil: number;
  /** For how long P keeps the blocks. */
  readonly lease: Lease;
  /** The prompt's token ids, where P was given them or reported them. */
  readonly promptTokenIds: readonly number[];
  /** D renders the prompt for itself, whatever ids it is given: what it comes to is compared with those of P. */
  readonly isRendered: boolean;
}

/** What the prefill legs of a request came to. */
export type PrefillOutcome =
  | Prefilled
  | { readonly kind: 'no-handle'; readonly reason: string }
  | { readonly kind: 'stop'; readonly ending: 'refused' | 'failed'; readonly refusal: Refusal }
  | { readonly kind: 'gone' };

/** An earlier turn's handle that a prefill leg may carry once. */
export interface Warm {
  readonly handle: WarmHandle;
  readonly instanceIds: ReadonlySet<string>;
  /** Leading tokens of the prompt that the handle was proven for. */
  readonly provenTokens: number;
  /** Milliseconds, 0 = none. */
  readonly deadlineMs: number;
}

/** Limit of vLLM's `kv_lease_duration` unless the instance says otherwise. */
const DEFAULT_LEASE_MS = 30_000;

/** No prefill instance took the request. */
export const NO_PREFILL = new BatonError({
  reason: 'ENGINE_UNREACHABLE',
  message: 'No prefill engine could be reached for this request.',
  retryAfterMs: 1000,
});

/** Asks prefill instances in turn until one has computed the prompt; a stored handle goes along at most once. */
export class PrefillPhase {
  readonly #deps: HandOverDeps;
  readonly #request: GenerateRequest;
  readonly #sink: ClientSink;
  readonly #book: LegBook;
  readonly #connector: HandleConnector;
  /** The legs carry the prompt's token ids. */
  readonly #forwards: boolean;
  /** Both engines render the prompt, and are asked what they made of it. */
  readonly #compares: boolean;
  #warm: Warm | undefined;
  #prompt: KnownPrompt;

  constructor(
    deps: HandOverDeps,
    request: GenerateRequest,
    sink: ClientSink,
    book: LegBook,
    connector: HandleConnector,
    warm: Warm | undefined,
    prompt: KnownPrompt,
  ) {
    this.#deps = deps;
    this.#request = request;
    this.#sink = sink;
    this.#book = book;
    this.#connector = connector;
    this.#warm = warm;
    this.#prompt = prompt;
    const { api, body, scan, unprovenMembers } = request;
    this.#forwards = deps.forwardTokenIds && goesAsTokenIds(api, body, scan, unprovenMembers);
    this.#compares = !this.#forwards && isRenderedByEach(api, body, scan, unprovenMembers);
  }

  /** @param startFresh true after a reset: every leg then has a connection of its own. */
  async run(candidates: readonly Target[], decode: Target, startFresh: boolean): Promise<PrefillOutcome> {
    let last: Refusal | undefined;
    let queue = [...candidates];
    let fresh = startFresh;
    for (let target = queue.shift(); target !== undefined; target = queue.shift()) {
      const warm = this.#warm?.instanceIds.has(target.instanceId) === true ? this.#warm : undefined;
      const startedAt = this.#deps.now();
      const result = await this.#send(target, decode, warm, fresh, startedAt);
      if (result.kind === 'gone' || result.kind === 'stop') return result;
      if (result.kind === 'reply') {
        const { reply } = result;
        this.#book.notePrefilled(startedAt);
        const prefilled = this.#read(target, decode, warm, reply, startedAt);
        if (prefilled !== 'other-prompt') return prefilled;
        // P used other tokens than those that were compared: what it computed must not be used by anyone.
        if (queue.length === 0 || !this.#book.mayRetry('guard')) return { kind: 'no-handle', reason: 'other_prompt' };
        continue;
      }
      last = result.refusal;
      queue = awakeFirst(queue, this.#deps.silences);
      if (result.cause === 'not_sent') continue;
      const again = (result.cause === 'stale' && !fresh) || (warm !== undefined && queue.length === 0);
      if (!again && queue.length === 0) break;
      if (!this.#book.mayRetry(warm === undefined ? result.cause : 'warm')) break;
      if (result.cause !== 'status') fresh = true;
      // A warm leg that failed is repeated without the handle, elsewhere if there is an elsewhere.
      if (again) queue = [target, ...queue];
    }
    return { kind: 'stop', ending: 'failed', refusal: last ?? refusalOf(NO_PREFILL) };
  }

  async #send(
    target: Target,
    decode: Target,
    warm: Warm | undefined,
    fresh: boolean,
    startedAt: number,
  ): Promise<
    | { readonly kind: 'reply'; readonly reply: WholeReply }
    | FailedLeg
    | Extract<PrefillOutcome, { readonly kind: 'stop' | 'gone' }>
  > {
    const { engines, limits, now } = this.#deps;
    const { api, facts, scan } = this.#request;
    const isWarm = warm !== undefined;
    const forwards = this.#forwards && takesTokenIds(target);
    const edits = this.#connector.prefill({
      api,
      facts,
      target: toLegTarget(target),
      promptTokenIds: forwards && this.#prompt.instanceIds.has(target.instanceId) ? this.#prompt.tokenIds : [],
      reportTokenIds: (forwards || (this.#compares && takesTokenIds(target))) && takesTokenIds(decode),
      hasMaxCompletionTokens: findMember(scan, 'max_completion_tokens') !== undefined,
      ...(warm === undefined ? {} : { warm: warm.handle }),
    });
    this.#request.timeline.enter('prefill');
    const { request, auth } = this.#book.makeRequest(Leg.PREFILL, target, edits, fresh);
    const result = await runWholeLeg(engines, request, {
      timeoutMs: warm?.deadlineMs ?? limits.prefillColdMs,
      signal: this.#sink.signal,
      isHopeless: () => isHopeless(this.#deps, target.instanceId, target),
      now,
    });
    if (result.kind === 'gone') {
      this.#book.note(Leg.PREFILL, target, LegEnding.ABORTED, startedAt, { warm: isWarm });
      return result;
    }
    const problem =
      result.kind === 'failed' ? result : classifyStatus(result.status, result.headers, result.body, auth);
    if (problem?.kind === 'refused') {
      const httpStatus = result.kind === 'reply' ? result.status : 0;
      this.#book.note(Leg.PREFILL, target, LegEnding.CLIENT_ERROR, startedAt, { httpStatus, warm: isWarm });
      return { kind: 'stop', ending: 'refused', refusal: problem.refusal };
    }
    if (problem !== undefined) {
      this.#book.noteFailure(Leg.PREFILL, target, problem, startedAt, { warm: isWarm });
      // Only a leg that was never sent leaves the handle unspent.
      if (isWarm && problem.cause !== 'not_sent') this.#spend(ReuseOutcome.WARM_FAILED_COLD_RETRY);
      if (isWarm && problem.cause === 'timeout') this.#deps.noteRead?.(target.instanceId, 'off');
      return problem;
    }
    return result.kind === 'reply' ? { kind: 'reply', reply: result } : result;
  }

  #read(
    target: Target,
    decode: Target,
    warm: Warm | undefined,
    reply: WholeReply,
    startedAt: number,
  ): PrefillOutcome | 'other-prompt' {
    const facts = readReply(reply.body);
    const raw = facts.kind === 'ok' ? facts.kvTransferParams : undefined;
    const compared = warm?.handle.promptTokenIds ?? [];
    if (warm !== undefined && compared.length > 0) {
      const used = facts.kind === 'ok' ? facts.promptTokenIds : undefined;
      // What P renders itself need not be what was compared; the tokens that it did not compute have to be.
      const isProven = warm.handle.isRendered
        ? beginsWithIds(used, compared, warm.provenTokens)
        : isSameIds(used, compared);
      if (!isProven) {
        this.#book.note(Leg.PREFILL, target, LegEnding.SERVER_ERROR, startedAt, {
          httpStatus: reply.status,
          warm: true,
        });
        this.#book.reportBreach();
        this.#spend(ReuseOutcome.WARM_FAILED_COLD_RETRY);
        this.#prompt = UNKNOWN_PROMPT;
        return 'other-prompt';
      }
    }
    if (warm !== undefined) this.#deps.noteRead?.(target.instanceId, 'on');
    const details = { httpStatus: reply.status, warm: warm !== undefined };
    const reading = readFor(this.#connector, this.#deps, raw, target, decode);
    if (reading.kind === 'none') {
      this.#book.note(Leg.PREFILL, target, LegEnding.NO_HANDLE, startedAt, details);
      this.#warm = undefined;
      return { kind: 'no-handle', reason: reading.reason };
    }
    this.#book.note(Leg.PREFILL, target, LegEnding.OK, startedAt, details);
    // P is free for others while D generates.
    this.#book.report(false, 0, undefined);
    if (warm !== undefined) this.#warm = undefined;
    const usableUntil = reply.startedAt + usableMs(this.#deps, target);
    const ms = leaseMsOf(target);
    const lease = { endsAt: reply.startedAt + ms, ms };
    const isGiven = compared.length > 0 && warm?.handle.isRendered !== true;
    const promptTokenIds = isGiven ? compared : this.#reported(facts);
    const isRendered = this.#compares && !isGiven;
    const read = { decode, handle: reading.handle };
    return { kind: 'handle', raw, read, target, usableUntil, lease, promptTokenIds, isRendered };
  }

  /** The ids by which D need not render the prompt again, or with which its own are compared; none where they are not all of it. */
  #reported(facts: ReturnType<typeof readReply>): readonly number[] {
    if ((!this.#forwards && !this.#compares) || facts.kind !== 'ok') return [];
    const { promptTokenIds = [], usage } = facts;
    return usage === undefined || usage.promptTokens === promptTokenIds.length ? promptTokenIds : [];
  }

  #spend(outcome: ReuseOutcome): void {
    this.#warm = undefined;
    this.#book.outcome = outcome;
  }
}

/** Part of the lease of a prefill instance in which its handle may be used. */
function usableMs({ limits }: HandOverDeps, target: Target): number {
  const leaseMs = leaseMsOf(target);
  return leaseMs - Math.min(limits.leaseMarginMs, leaseMs / 3);
}

function leaseMsOf({ kv }: Target): number {
  return toMs(kv?.lease) || DEFAULT_LEASE_MS;
}

/**
 * An instance that is silent is not waited for any more when the lender's blocks are about to go, or when it has been silent
 * for as long as they can be used.
 */
export function isHopeless(deps: HandOverDeps, instanceId: string, lender: Target, lease?: Lease): boolean {
  const silence = deps.silences.of(instanceId);
  if (silence === undefined || silence.until !== undefined) return false;
  if (deps.silences.silentForMs(instanceId) >= usableMs(deps, lender)) return true;
  return lease !== undefined && deps.now() + HEALTH_LOOK_MS >= readableUntil(lease, silence.from);
}

/** What a decode engine generates from blocks that it read too late is wrong, however well it looks. */
export function mayHaveReadLate({ silences, now }: HandOverDeps, instanceId: string, lease?: Lease): boolean {
  return lease !== undefined && mayReadLate(lease, silences.of(instanceId), now());
}

/** The stored handle that the plan gives to a prefill leg. */
export function warmOf(
  { prefillHandle, reuseOutcome }: Plan,
  { tokenIds }: KnownPrompt,
  { media }: GenerateRequest,
): Warm | undefined {
  const params = prefillHandle?.params;
  const isHit = reuseOutcome === ReuseOutcome.HIT || reuseOutcome === ReuseOutcome.HIT_CUT;
  if (prefillHandle === undefined || params === undefined || !isHit) return undefined;
  return {
    handle: { params, promptTokenIds: tokenIds, isRendered: media !== undefined },
    instanceIds: new Set(prefillHandle.instanceIds),
    provenTokens: prefillHandle.matchedTokens,
    deadlineMs: toMs(prefillHandle.deadline),
  };
}

/** Whether the instance's engine is of a version that was seen to take a prompt as token ids, with a handle beside it. */
export function takesTokenIds({ engine }: Target): boolean {
  return PROVEN_VERSIONS.test(engine?.version ?? '');
}

/** P's handle as one D is to get it, or why that D must not. */
export function readFor(
  connector: HandleConnector,
  deps: HandOverDeps,
  raw: Uint8Array | undefined,
  prefill: Target,
  decode: Target,
): PrefillReading {
  const context = { prefill: toLegTarget(prefill), decode: toLegTarget(decode), remoteHost: deps.remoteHost };
  return connector.readPrefillReply(raw, context);
}
