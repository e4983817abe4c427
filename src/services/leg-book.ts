import { create } from '@bufbuild/protobuf';
import {
  Leg,
  LegEnding,
  type LegReport,
  LegReportSchema,
  type Plan,
  ReportOutcomeRequestSchema,
  type ReuseOutcome,
  type Target,
} from '../../gen/baton/v1/router_pb.ts';
import type { LegTarget } from '../connectors/connector.ts';
import { type Edits, spliceObject } from '../core/json-scan.ts';
import { decodeKvTransferParams } from '../core/kv-transfer.ts';
import type { Lease } from '../core/lease.ts';
import type { MuteSpec } from '../core/reply.ts';
import type { LegRequest } from '../engine/client.ts';
import type { Span } from '../obs/tracer.ts';
import { keyModel } from './conversation-keys.ts';
import type { DecodeLegOptions, DecodeResult } from './decode-leg.ts';
import { toDuration } from './durations.ts';
import type { GenerateRequest, HandOverDeps, HandOverReport } from './hand-over.ts';
import type { FailedLeg, LegAuth, Refusal } from './leg.ts';
import { endingName, modeName, outcomeName } from './plan-message.ts';
import type { ReplyFacts } from './reply-facts.ts';
import { routeFacts } from './route-facts.ts';

/** Repeats of one request after which its failure is taken for final. */
const MAX_RETRIES = 4;

const FAILED_ENDINGS: Readonly<Record<FailedLeg['cause'], LegEnding>> = {
  not_sent: LegEnding.NOT_SENT,
  late: LegEnding.TIMEOUT,
  stale: LegEnding.RESET,
  reset: LegEnding.RESET,
  started: LegEnding.RESET,
  timeout: LegEnding.TIMEOUT,
  // Not a deadline of the leg: a handle that it carried did not hang.
  unhealthy: LegEnding.RESET,
  status: LegEnding.SERVER_ERROR,
  route_missing: LegEnding.SERVER_ERROR,
  other_prompt: LegEnding.SERVER_ERROR,
};

/** Failures that leave open whether the engine still comes to read what its request named. */
const UNANSWERED: ReadonlySet<FailedLeg['cause']> = new Set(['stale', 'reset', 'timeout', 'unhealthy']);

const BROKEN_ENDINGS = {
  reset: LegEnding.RESET,
  cut: LegEnding.RESET,
  idle: LegEnding.TIMEOUT,
  engine_error: LegEnding.SERVER_ERROR,
} as const;

/** Members of replies that the client did not ask for; the value null is what a plain engine writes. */
export const MUTE: MuteSpec = { top: ['kv_transfer_params', 'ec_transfer_params'], choice: [] };

/** The legs of one request: makes them, counts repeats, keeps what is told of them and tells the router. */
export class LegBook {
  readonly plan: Plan;
  readonly legs: LegReport[] = [];
  readonly retries: string[] = [];
  outcome: ReuseOutcome;
  /** Why D runs without P's handle although the plan wanted one. */
  noHandle: string | undefined;
  /** The prefill instance that was asked last. */
  prefillId: string | undefined;
  #decodeId: string | undefined;
  /** What prefill legs took; undefined before the first that ended well. */
  #prefillMs: number | undefined;
  readonly #deps: HandOverDeps;
  readonly #request: GenerateRequest;
  /** Legs whose request may have reached an engine: each further one gets an id of its own. */
  #attempt = 0;
  #unreported = 0;
  /** Of the leg that goes on, where traces are wanted. */
  #legSpan: Span | undefined;
  #handedOn = false;

  constructor(deps: HandOverDeps, request: GenerateRequest, plan: Plan) {
    this.#deps = deps;
    this.#request = request;
    this.plan = plan;
    this.outcome = plan.reuseOutcome;
  }

  /** A leg to `target`: the client's bytes with the connector's edits, to `path` where the connector changes the API. */
  makeRequest(
    leg: Leg,
    target: Target,
    edits: Edits,
    fresh: boolean,
    path = this.#request.path,
  ): { request: LegRequest; auth: LegAuth } {
    const { body, scan, requestId, authorization, headers, timeline } = this.#request;
    if (leg === Leg.PREFILL) this.prefillId = target.instanceId;
    else this.#decodeId = target.instanceId;
    const details = { 'baton.instance': target.instanceId };
    this.#legSpan = timeline.span?.child(`${legName(leg)} leg`, 'client', this.#deps.now(), details);
    const credential = this.#deps.engineHeaders(target.instanceId, authorization);
    const request: LegRequest = {
      url: target.url,
      method: 'POST',
      path,
      headers: {
        ...headers,
        ...credential.headers,
        'content-type': 'application/json',
        'accept-encoding': 'identity',
        ...this.#legSpan?.headers,
        ...(target.dataParallelRank === undefined ? {} : { 'x-data-parallel-rank': String(target.dataParallelRank) }),
        'x-request-id': this.#attempt === 0 ? requestId : `${requestId}-r${this.#attempt}`,
      },
      body: spliceObject(body, scan, edits),
      ...(fresh ? { fresh } : {}),
    };
    return { request, auth: credential.auth };
  }

  /** What every decode leg of the request is run with. */
  decodeOptions(target: Target) {
    const { gapsOf, limits, noteAlive, now } = this.#deps;
    const { facts, timeline } = this.#request;
    return {
      mute: MUTE,
      headers: this.replyHeaders(),
      firstContentMs: limits.firstContentMs,
      wholeReplyMs: limits.wholeReplyMs,
      idleMs: limits.idleMs,
      holdBytes: limits.holdBytes,
      bufferBytes: limits.streamBufferBytes,
      onProgress: () => noteAlive(target.instanceId),
      onHead: () => timeline.enter('first_byte'),
      gaps: gapsOf(facts.model),
      now,
    } satisfies Partial<DecodeLegOptions>;
  }

  /** Headers that baton adds to the reply. */
  replyHeaders(): Record<string, string> {
    const { requestId, debug } = this.#request;
    return { 'x-request-id': requestId, ...(debug ? { 'x-baton-plan': this.#describePlan() } : {}) };
  }

  /** Asks for one more leg; the next one then has an id of its own. */
  mayRetry(reason: string): boolean {
    if (this.retries.length >= MAX_RETRIES || !this.#deps.retryBudget.take()) return false;
    this.retries.push(reason);
    this.#attempt += 1;
    return true;
  }

  note(leg: Leg, target: Target, ending: LegEnding, startedAt: number, more: NoteDetails = {}): void {
    const at = this.#deps.now();
    const duration = toDuration(at - startedAt);
    this.#endLegSpan(at, ending, more);
    this.legs.push(create(LegReportSchema, { leg, instanceId: target.instanceId, ending, duration, ...more }));
  }

  #endLegSpan(at: number, ending: LegEnding, { httpStatus }: NoteDetails): void {
    const word = endingName(ending);
    const attributes = {
      'baton.ending': word,
      ...(httpStatus === undefined || httpStatus === 0 ? {} : { 'http.response.status_code': httpStatus }),
    };
    this.#legSpan?.end(at, { attributes, ...(ending === LegEnding.OK ? {} : { failure: word }) });
    this.#legSpan = undefined;
  }

  noteFailure(leg: Leg, target: Target, result: FailedLeg, startedAt: number, more: NoteDetails = {}): void {
    const httpStatus = result.cause === 'status' ? result.refusal.status : 0;
    const busy = httpStatus === 429 || httpStatus === 503;
    this.note(leg, target, busy ? LegEnding.BUSY : FAILED_ENDINGS[result.cause], startedAt, { ...more, httpStatus });
    // Other requests should not have to find out by themselves, and what follows may take minutes.
    if (result.cause === 'other_prompt') this.reportBreach();
    else this.report(false, 0, undefined);
  }

  /** Tells that the engine of the last leg used another prompt than the one that was compared. */
  reportBreach(): void {
    this.report(false, 0, undefined, true);
  }

  /**
   * @param peerInstanceId the prefill instance whose handle the leg carried; empty if it carried none
   * @param lease for how long that one keeps the blocks
   */
  noteDecode(target: Target, result: DecodeResult, startedAt: number, peerInstanceId: string, lease?: Lease): void {
    const unread = lease === undefined ? {} : { unreadLease: toDuration(lease.endsAt - this.#deps.now()) };
    switch (result.kind) {
      case 'relayed':
        return this.note(Leg.DECODE, target, LegEnding.OK, startedAt, {
          httpStatus: result.facts.status,
          contentShown: true,
          peerInstanceId,
        });
      case 'broken':
        return this.note(Leg.DECODE, target, BROKEN_ENDINGS[result.reason], startedAt, {
          httpStatus: result.facts.status,
          contentShown: true,
          peerInstanceId,
        });
      case 'refused':
        return this.note(Leg.DECODE, target, LegEnding.CLIENT_ERROR, startedAt, {
          httpStatus: result.refusal.status,
          peerInstanceId,
        });
      case 'gone':
        return this.note(Leg.DECODE, target, LegEnding.ABORTED, startedAt, { peerInstanceId, ...unread });
      case 'failed':
        return this.noteFailure(Leg.DECODE, target, result, startedAt, {
          peerInstanceId,
          ...(UNANSWERED.has(result.cause) ? unread : {}),
        });
    }
  }

  /** A prefill leg that began then has ended well. */
  notePrefilled(startedAt: number): void {
    this.#prefillMs = (this.#prefillMs ?? 0) + (this.#deps.now() - startedAt);
  }

  /** What the request came to. */
  end(ending: HandOverReport['ending'], refusal?: Refusal, reply?: ReplyFacts): HandOverReport {
    return {
      plan: this.plan,
      prefillId: this.prefillId,
      decodeId: this.#decodeId,
      ending,
      refusal,
      reply,
      prefillMs: this.#prefillMs,
      noHandle: this.noHandle,
      outcome: outcomeName(this.outcome),
      retries: this.retries,
      legs: this.legs,
    };
  }

  /** Does the work of the plan and tells the router how it ended, also when it throws. */
  async close(work: () => Promise<HandOverReport>): Promise<HandOverReport> {
    let status = 0;
    let reply: ReplyFacts | undefined;
    try {
      const report = await work();
      reply = report.reply;
      status = reply?.status ?? report.refusal?.status ?? 0;
      return report;
    } finally {
      this.#legSpan?.end(this.#deps.now(), { failure: 'internal' });
      if (!this.#handedOn) this.report(true, status, reply);
    }
  }

  /** Another run goes on with the plan and tells its end. */
  handOn(): void {
    this.#handedOn = true;
  }

  /** Off the client's path: nobody waits for it, and a router that is away costs nothing but the news. */
  report(final: boolean, status: number, reply: ReplyFacts | undefined, guardBreach = false): void {
    const legs = this.legs.slice(this.#unreported);
    this.#unreported = this.legs.length;
    const raw = final ? reply?.kvTransferParams : undefined;
    const handle = raw === undefined ? undefined : decodeKvTransferParams(raw);
    const isProven = handle !== undefined && reply !== undefined && this.plan.captureTokens;
    const chain = isProven ? this.#chainOf(reply) : undefined;
    const message = create(ReportOutcomeRequestSchema, {
      planId: this.plan.planId,
      legs,
      final,
      status,
      promptTokens: reply?.usage?.promptTokens ?? reply?.promptTokenIds?.length ?? 0,
      completionTokens: reply?.usage?.completionTokens ?? 0,
      reuseOutcome: this.outcome,
      guardBreach,
      paused: toDuration(reply?.pausedMs ?? 0),
      ...(handle === undefined ? {} : { handle }),
      ...(chain === undefined ? {} : { chain }),
    });
    const headers = this.#request.timeline.span?.headers ?? {};
    this.#deps.reports.send(message, headers, () => ({
      plan: this.plan,
      facts: routeFacts(this.#request, this.#deps.streamsOnly),
      legs: this.legs,
    }));
  }

  /** What `x-baton-plan` says: mode, why, reuse outcome and matched tokens; no ids or addresses. */
  #describePlan(): string {
    const { mode, reason, prefillHandle } = this.plan;
    const parts = [
      `mode=${modeName(mode)}`,
      `reason=${reason}`,
      `outcome=${outcomeName(this.outcome)}`,
      `matched=${prefillHandle?.matchedTokens ?? 0}`,
    ];
    if (this.noHandle !== undefined) parts.push(`no_handle=${this.noHandle}`);
    return parts.join('; ');
  }

  /** The proof of what D holds: every token of prompt and reply, or nothing. */
  #chainOf({ promptTokenIds, tokenIds, usage }: ReplyFacts) {
    if (promptTokenIds === undefined || promptTokenIds.length === 0) return undefined;
    const miscounted =
      usage !== undefined &&
      (usage.promptTokens !== promptTokenIds.length || usage.completionTokens !== tokenIds.length);
    if (miscounted) return undefined;
    const { facts } = this.#request;
    const seed = { model: keyModel(facts.model), adapter: this.plan.adapter, cacheSalt: facts.cacheSalt };
    return this.#deps.chainOf(promptTokenIds.concat(tokenIds), seed);
  }
}

/** Name of a leg as logs, metrics and traces write it. */
export function legName(leg: Leg): 'prefill' | 'decode' {
  return leg === Leg.PREFILL ? 'prefill' : 'decode';
}

/** What else is told of a leg. */
export interface NoteDetails {
  readonly httpStatus?: number;
  readonly contentShown?: boolean;
  readonly warm?: boolean;
  readonly peerInstanceId?: string;
  readonly unreadLease?: LegReport['unreadLease'];
}

/** What a connector may know of a target. */
export function toLegTarget(target: Target): LegTarget {
  const { instanceId, url, engine } = target;
  const { blockSize = 0, templateFingerprint = '' } = engine ?? {};
  return { instanceId, url, blockSize, templateFingerprint };
}
