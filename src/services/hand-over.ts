import { create } from '@bufbuild/protobuf';
import type { Client } from '@connectrpc/connect';
import {
  Leg,
  LegEnding,
  type LegReport,
  LegReportSchema,
  type Plan,
  PlanMode,
  PlanRouteRequestSchema,
  ReportOutcomeRequestSchema,
  RequestFactsSchema,
  type Router,
  type Target,
} from '../../gen/baton/v1/router_pb.ts';
import type { CheckedHandle, Connector, LegTarget, RemoteHostRule } from '../connectors/connector.ts';
import { BatonError } from '../core/errors.ts';
import { type Api, type BodyFacts, CONSUMED_MEMBERS, REFUSED_MEMBERS } from '../core/facts.ts';
import { type Edits, findMember, type ObjectScan, spliceObject } from '../core/json-scan.ts';
import { readReply } from '../core/reply.ts';
import type { EngineClient, LegRequest } from '../engine/client.ts';
import type { ClientSink } from './client-sink.ts';
import { type DecodeResult, type ReplyFacts, runDecodeLeg } from './decode-leg.ts';
import { classifyStatus, type FailedLeg, type LegAuth, type Refusal, refusalOf, runWholeLeg } from './leg.ts';
import type { RetryBudget } from './retry-budget.ts';
import { modeName, toDuration, toMs } from './router.ts';

/** A scanned client request, ready to be handed over. */
export interface GenerateRequest {
  readonly requestId: string;
  readonly api: Api;
  /** Path on the engines, e.g. `/v1/chat/completions`, with the client's query string. */
  readonly path: string;
  readonly body: Uint8Array;
  readonly scan: Extract<ObjectScan, { readonly kind: 'object' }>;
  readonly facts: BodyFacts;
  readonly tenant: string;
  /** Headers for both legs, request id and credentials not included. */
  readonly headers: Readonly<Record<string, string>>;
  readonly authorization: string | undefined;
  /** The client asked to be told the plan (`x-baton-debug: 1`). */
  readonly debug: boolean;
}

/** Time limits of the legs in milliseconds, 0 = none; see the configuration's `timeouts`. */
export interface HandOverLimits {
  readonly queueMs: number;
  readonly prefillColdMs: number;
  readonly firstContentMs: number;
  readonly wholeReplyMs: number;
  readonly idleMs: number;
  readonly leaseMarginMs: number;
  readonly holdBytes: number;
  readonly streamBufferBytes: number;
}

/** What a hand-over works with. */
export interface HandOverDeps {
  readonly router: Client<typeof Router>;
  readonly engines: EngineClient;
  readonly connectors: Readonly<Record<string, Connector>>;
  readonly remoteHost: RemoteHostRule;
  /** Headers with the credential for an instance, and whose it is. */
  readonly engineHeaders: (instanceId: string, authorization: string | undefined) => EngineHeaders;
  /** For how long an instance has failed its health checks, milliseconds; 0 while it passes them. */
  readonly unhealthyForMs: (instanceId: string) => number;
  readonly toBatonError: (error: unknown) => BatonError;
  readonly retryBudget: RetryBudget;
  readonly limits: HandOverLimits;
  readonly now: () => number;
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
  readonly retries: readonly string[];
  readonly legs: readonly LegReport[];
}

/** Members of replies that the client did not ask for; the value null is what a plain engine writes. */
const MUTE = { top: ['kv_transfer_params', 'ec_transfer_params'], choice: [] };

/** Serves one request: plan, prefill leg, decode leg, relay; DESIGN's failure ladder decides what follows a failure. */
export async function handOver(deps: HandOverDeps, request: GenerateRequest, sink: ClientSink): Promise<HandOverReport> {
  return new HandOver(deps, request, sink).run();
}

/** P's offer to D, with the time after which it must not be used any more. */
interface Prefilled {
  readonly kind: 'handle';
  readonly handle: CheckedHandle;
  readonly target: Target;
  readonly usableUntil: number;
}

type PrefillOutcome =
  | Prefilled
  | { readonly kind: 'no-handle'; readonly reason: string }
  | { readonly kind: 'stop'; readonly ending: 'refused' | 'failed'; readonly refusal: Refusal }
  | { readonly kind: 'gone' };

class HandOver {
  readonly #deps: HandOverDeps;
  readonly #request: GenerateRequest;
  readonly #sink: ClientSink;
  #plan: Plan | undefined;
  #prefillId: string | undefined;
  #decodeId: string | undefined;
  #prefillMs: number | undefined;
  #noHandle: string | undefined;
  /** Legs whose request may have reached an engine: each gets an id of its own. */
  #attempt = 0;
  readonly #retries: string[] = [];
  readonly #legs: LegReport[] = [];
  #unreported = 0;

  constructor(deps: HandOverDeps, request: GenerateRequest, sink: ClientSink) {
    this.#deps = deps;
    this.#request = request;
    this.#sink = sink;
  }

  async run(): Promise<HandOverReport> {
    this.#deps.retryBudget.earn();
    const planned = await this.#planRoute();
    if (planned !== undefined) return planned;
    let report: HandOverReport;
    try {
      report = await this.#runPlan();
    } catch (error) {
      this.#report(true, 0, undefined);
      throw error;
    }
    this.#report(true, report.reply?.status ?? report.refusal?.status ?? 0, report.reply);
    return report;
  }

  async #planRoute(): Promise<HandOverReport | undefined> {
    const { router, limits, toBatonError } = this.#deps;
    const { requestId, api, facts, body, tenant } = this.#request;
    const message = create(PlanRouteRequestSchema, {
      facts: create(RequestFactsSchema, {
        requestId,
        tenant,
        api,
        model: facts.model,
        cacheSalt: facts.cacheSalt,
        conversationId: facts.conversationId,
        stream: facts.stream,
        bodyBytes: body.byteLength,
        localReasons: [...facts.localReasons],
      }),
      maxWait: toDuration(limits.queueMs),
    });
    try {
      const { result } = await router.planRoute(message, { signal: this.#sink.signal });
      if (result.case === 'plan') {
        this.#plan = result.value;
        return undefined;
      }
      throw new BatonError({ reason: 'INTERNAL', message: 'The router gave no plan.' });
    } catch (error) {
      if (this.#sink.signal.aborted) return this.#end('gone', undefined, undefined);
      const known = toBatonError(error);
      return this.#end(known.httpStatus < 500 ? 'refused' : 'failed', refusalOf(known), undefined);
    }
  }

  async #runPlan(): Promise<HandOverReport> {
    const plan = this.#plan;
    const [first] = plan === undefined ? [] : targets(plan.decode, plan.decodeFallbacks);
    if (plan === undefined || first === undefined) {
      throw new BatonError({ reason: 'INTERNAL', message: 'The router gave a plan without a decode instance.' });
    }
    const connector = this.#deps.connectors[plan.connector];
    const split = plan.mode === PlanMode.PREFILL_DECODE || plan.mode === PlanMode.PREFILL_DECODE_REUSE;
    if (split && connector === undefined) {
      throw new BatonError({ reason: 'INTERNAL', message: `The plan names an unknown connector "${plan.connector}".` });
    }
    let decodes = targets(plan.decode, plan.decodeFallbacks);
    let prefills = targets(plan.prefill, plan.prefillFallbacks);
    let prefilled: Prefilled | undefined;
    let withHandle = split && connector !== undefined;
    let fresh = false;
    for (;;) {
      const [decode] = decodes;
      if (decode === undefined) throw new BatonError({ reason: 'INTERNAL', message: 'No decode instance is left.' });
      if (withHandle && connector !== undefined && prefilled === undefined) {
        const outcome = await this.#prefill(connector, prefills, decode, fresh);
        if (outcome.kind === 'gone') return this.#end('gone', undefined, undefined);
        if (outcome.kind === 'stop') return this.#end(outcome.ending, outcome.refusal, undefined);
        if (outcome.kind === 'no-handle') {
          this.#noHandle = outcome.reason;
          withHandle = false;
        } else {
          prefilled = outcome;
          // What P has computed is in its prefix cache: it is the one to ask again.
          prefills = [outcome.target, ...prefills.filter((target) => target !== outcome.target)];
        }
      }
      // The lease ends on P's clock: a leg that starts too late would read blocks that hold something else.
      if (prefilled !== undefined && this.#deps.now() > prefilled.usableUntil) {
        prefilled = undefined;
        if (!this.#mayRetry('lease')) return this.#end('failed', refusalOf(LEASE_RAN_OUT), undefined);
        continue;
      }
      const result = await this.#decode(decode, connector, prefilled, fresh);
      if (result.kind === 'gone') return this.#end('gone', undefined, undefined);
      if (result.kind === 'relayed') return this.#end('ok', undefined, result.facts);
      if (result.kind === 'broken') return this.#end('broken', undefined, result.facts);
      if (result.kind === 'refused') return this.#end('refused', result.refusal, undefined);
      const others = decodes.slice(1);
      if (result.cause === 'not_sent') {
        if (others.length === 0) return this.#end('failed', result.refusal, undefined);
        decodes = others;
        continue;
      }
      // From here on D may have read the blocks: the handle is spent whatever follows.
      prefilled = undefined;
      const onSame = result.cause === 'stale' && !fresh;
      if (result.cause === 'started' || (others.length === 0 && !onSame)) {
        return this.#end('failed', result.refusal, undefined);
      }
      if (!this.#mayRetry(result.cause)) return this.#end('failed', result.refusal, undefined);
      this.#attempt += 1;
      fresh = true;
      // Another engine once: what fails twice fails for a reason that a third engine would share.
      decodes = onSame ? decodes : others.slice(0, 1);
    }
  }

  /** Asks the P instances in turn for a handle that `decode` can use. */
  async #prefill(
    connector: Connector,
    candidates: readonly Target[],
    decode: Target,
    startFresh: boolean,
  ): Promise<PrefillOutcome> {
    const { engines, limits, now } = this.#deps;
    const { facts, scan } = this.#request;
    let last: Refusal | undefined;
    let queue = [...candidates];
    let fresh = startFresh;
    for (let target = queue.shift(); target !== undefined; target = queue.shift()) {
      this.#prefillId = target.instanceId;
      const leg = toLegTarget(target);
      const hasMaxCompletionTokens = findMember(scan, 'max_completion_tokens') !== undefined;
      const edits = connector.prefill({ facts, target: leg, hasMaxCompletionTokens });
      const { request, auth } = this.#legRequest(target, edits, fresh);
      const startedAt = now();
      const result = await runWholeLeg(engines, request, {
        timeoutMs: limits.prefillColdMs,
        signal: this.#sink.signal,
        now,
      });
      if (result.kind === 'gone') {
        this.#note(Leg.PREFILL, target, LegEnding.ABORTED, 0, startedAt);
        return result;
      }
      if (result.kind === 'failed') {
        this.#noteFailure(Leg.PREFILL, target, result, startedAt);
        last = result.refusal;
        const again = result.cause === 'stale' && !fresh;
        if (result.cause === 'not_sent') continue;
        if (!again && queue.length === 0) break;
        if (!this.#mayRetry(result.cause)) break;
        this.#attempt += 1;
        fresh = true;
        if (again) queue = [target, ...queue];
        continue;
      }
      const problem = classifyStatus(result.status, result.headers, result.body, auth);
      if (problem?.kind === 'refused') {
        this.#note(Leg.PREFILL, target, LegEnding.CLIENT_ERROR, result.status, startedAt);
        return { kind: 'stop', ending: 'refused', refusal: problem.refusal };
      }
      if (problem !== undefined) {
        this.#noteFailure(Leg.PREFILL, target, problem, startedAt);
        last = problem.refusal;
        if (queue.length === 0 || !this.#mayRetry('status')) break;
        this.#attempt += 1;
        continue;
      }
      this.#prefillMs = (this.#prefillMs ?? 0) + (now() - startedAt);
      return this.#readHandle(connector, target, decode, result.body, result.startedAt, startedAt);
    }
    return { kind: 'stop', ending: 'failed', refusal: last ?? refusalOf(NO_PREFILL) };
  }

  #readHandle(
    connector: Connector,
    target: Target,
    decode: Target,
    body: Uint8Array,
    repliedAt: number,
    startedAt: number,
  ): PrefillOutcome {
    const reply = readReply(body);
    const raw = reply.kind === 'ok' ? reply.kvTransferParams : undefined;
    const context = {
      prefill: toLegTarget(target),
      decode: toLegTarget(decode),
      remoteHost: this.#deps.remoteHost,
    };
    const reading = connector.readPrefillReply(raw, context);
    if (reading.kind === 'none') {
      this.#note(Leg.PREFILL, target, LegEnding.NO_HANDLE, 200, startedAt);
      return { kind: 'no-handle', reason: reading.reason };
    }
    this.#note(Leg.PREFILL, target, LegEnding.OK, 200, startedAt);
    const leaseMs = toMs(target.kv?.lease) || DEFAULT_LEASE_MS;
    const marginMs = Math.min(this.#deps.limits.leaseMarginMs, leaseMs / 3);
    return { kind: 'handle', handle: reading.handle, target, usableUntil: repliedAt + leaseMs - marginMs };
  }

  async #decode(
    target: Target,
    connector: Connector | undefined,
    prefilled: Prefilled | undefined,
    fresh: boolean,
  ): Promise<DecodeResult> {
    const { engines, limits, now, unhealthyForMs } = this.#deps;
    this.#decodeId = target.instanceId;
    const edits = prefilled === undefined || connector === undefined ? ALONE : connector.decode(prefilled.handle);
    const { request, auth } = this.#legRequest(target, edits, fresh);
    const startedAt = now();
    const leaseMs = toMs(prefilled?.target.kv?.lease) || DEFAULT_LEASE_MS;
    const hopelessMs = leaseMs - Math.min(limits.leaseMarginMs, leaseMs / 3);
    const result = await runDecodeLeg(engines, request, this.#sink, {
      auth,
      mute: MUTE,
      headers: this.#replyHeaders(),
      streamed: this.#request.facts.stream,
      firstContentMs: limits.firstContentMs,
      wholeReplyMs: limits.wholeReplyMs,
      idleMs: limits.idleMs,
      holdBytes: limits.holdBytes,
      bufferBytes: limits.streamBufferBytes,
      isHopeless: () => unhealthyForMs(target.instanceId) >= hopelessMs,
      now,
    });
    switch (result.kind) {
      case 'relayed':
        this.#note(Leg.DECODE, target, LegEnding.OK, result.facts.status, startedAt, true);
        break;
      case 'broken':
        this.#note(Leg.DECODE, target, BROKEN_ENDINGS[result.reason], result.facts.status, startedAt, true);
        break;
      case 'refused':
        this.#note(Leg.DECODE, target, LegEnding.CLIENT_ERROR, result.refusal.status, startedAt);
        break;
      case 'gone':
        this.#note(Leg.DECODE, target, LegEnding.ABORTED, 0, startedAt);
        break;
      case 'failed':
        this.#noteFailure(Leg.DECODE, target, result, startedAt);
        break;
    }
    return result;
  }

  #replyHeaders(): Record<string, string> {
    const { requestId, debug } = this.#request;
    return { 'x-request-id': requestId, ...(debug ? { 'x-baton-plan': describePlan(this.#plan, this.#noHandle) } : {}) };
  }

  #legRequest(target: Target, edits: Edits, fresh: boolean): { request: LegRequest; auth: LegAuth } {
    const { body, scan, path, requestId, authorization, headers } = this.#request;
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
        'x-request-id': this.#attempt === 0 ? requestId : `${requestId}-r${this.#attempt}`,
      },
      body: spliceObject(body, scan, edits),
      ...(fresh ? { fresh } : {}),
    };
    return { request, auth: credential.auth };
  }

  #mayRetry(reason: string): boolean {
    if (this.#retries.length >= MAX_RETRIES || !this.#deps.retryBudget.take()) return false;
    this.#retries.push(reason);
    return true;
  }

  #noteFailure(leg: Leg, target: Target, result: FailedLeg, startedAt: number): void {
    const { status } = result.refusal;
    const said = result.cause === 'status' ? status : 0;
    const busy = said === 429 || said === 503;
    this.#note(leg, target, busy ? LegEnding.BUSY : FAILED_ENDINGS[result.cause], said, startedAt);
    // Other requests should not have to find out by themselves.
    if (result.cause === 'not_sent') this.#report(false, 0, undefined);
  }

  #note(leg: Leg, target: Target, ending: LegEnding, httpStatus: number, startedAt: number, contentShown = false): void {
    const duration = toDuration(this.#deps.now() - startedAt);
    const { instanceId } = target;
    this.#legs.push(create(LegReportSchema, { leg, instanceId, ending, httpStatus, duration, contentShown }));
  }

  /** Off the client's path: nobody waits for it, and a router that is away costs nothing but the news. */
  #report(final: boolean, status: number, reply: ReplyFacts | undefined): void {
    if (this.#plan === undefined) return;
    const legs = this.#legs.slice(this.#unreported);
    this.#unreported = this.#legs.length;
    const message = create(ReportOutcomeRequestSchema, {
      planId: this.#plan.planId,
      legs,
      final,
      status,
      promptTokens: reply?.usage?.promptTokens ?? 0,
      completionTokens: reply?.usage?.completionTokens ?? 0,
    });
    this.#deps.router.reportOutcome(message, { timeoutMs: REPORT_MS }).catch(() => undefined);
  }

  #end(
    ending: HandOverReport['ending'],
    refusal: Refusal | undefined,
    reply: ReplyFacts | undefined,
  ): HandOverReport {
    return {
      plan: this.#plan,
      prefillId: this.#prefillId,
      decodeId: this.#decodeId,
      ending,
      refusal,
      reply,
      prefillMs: this.#prefillMs,
      noHandle: this.#noHandle,
      retries: this.#retries,
      legs: this.#legs,
    };
  }
}

/** Repeats of one request after which its failure is taken for final. */
const MAX_RETRIES = 4;
/** vLLM's default `kv_lease_duration`. */
const DEFAULT_LEASE_MS = 30_000;
/** Limit for a report; nobody waits for it. */
const REPORT_MS = 5000;

/** The client's body without what only baton understands. */
const ALONE: Edits = { set: new Map(), drop: new Set([...CONSUMED_MEMBERS, ...REFUSED_MEMBERS]) };

const FAILED_ENDINGS: Readonly<Record<FailedLeg['cause'], LegEnding>> = {
  not_sent: LegEnding.NOT_SENT,
  stale: LegEnding.RESET,
  reset: LegEnding.RESET,
  started: LegEnding.RESET,
  timeout: LegEnding.TIMEOUT,
  unhealthy: LegEnding.TIMEOUT,
  status: LegEnding.SERVER_ERROR,
};

const BROKEN_ENDINGS = {
  reset: LegEnding.RESET,
  cut: LegEnding.RESET,
  idle: LegEnding.TIMEOUT,
  engine_error: LegEnding.SERVER_ERROR,
} as const;

const LEASE_RAN_OUT = new BatonError({
  reason: 'ENGINE_TIMEOUT',
  message: 'The decode engine could not be reached before the hand-over ran out.',
});
const NO_PREFILL = new BatonError({
  reason: 'ENGINE_UNREACHABLE',
  message: 'No prefill engine could be reached for this request.',
  retryAfterMs: 1000,
});

/** What `x-baton-plan` says: mode, why, reuse outcome and matched tokens; no ids or addresses. */
function describePlan(plan: Plan | undefined, noHandle: string | undefined): string {
  const mode = modeName(plan?.mode ?? PlanMode.UNSPECIFIED);
  const matched = plan?.prefillHandle?.matchedTokens ?? 0;
  const parts = [`mode=${mode}`, `reason=${plan?.reason ?? ''}`, 'outcome=none', `matched=${matched}`];
  if (noHandle !== undefined) parts.push(`no_handle=${noHandle}`);
  return parts.join('; ');
}

function targets(first: Target | undefined, fallbacks: readonly Target[]): readonly Target[] {
  return first === undefined ? [] : [first, ...fallbacks];
}

function toLegTarget(target: Target): LegTarget {
  return { instanceId: target.instanceId, url: target.url, blockSize: target.engine?.blockSize ?? 0 };
}
