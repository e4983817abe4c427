import { randomUUID } from 'node:crypto';
import { create } from '@bufbuild/protobuf';
import {
  type ExplainRouteRequest,
  type ExplainRouteResponse,
  ExplainRouteResponseSchema,
  Leg,
  LegEnding,
  type LegReport,
  type Plan,
  PlanMode,
  type PlanRouteRequest,
  type PlanRouteResponse,
  PlanRouteResponseSchema,
  PrefillHandleSchema,
  type ReportOutcomeRequest,
  type ReportOutcomeResponse,
  ReportOutcomeResponseSchema,
  type RequestFacts,
} from '../../gen/baton/v1/router_pb.ts';
import { BatonError } from '../core/errors.ts';
import type { Decision } from '../core/plan.ts';
import type { Verdict } from '../core/pools.ts';
import { type BreakerSettings, Breakers, type ObserveBreaker } from './breakers.ts';
import { Decider, type DeciderOptions, FULL, type PlanDecision } from './decider.ts';
import { toDuration, toMs } from './durations.ts';
import type { InstanceView } from './instance-view.ts';
import type { LateReads } from './late-reads.ts';
import { modeName, toPlan } from './plan-message.ts';
import { type QueueLimits, RequestQueue } from './request-queue.ts';
import { type FinishedPlan, policyRequest, Reservations } from './reservations.ts';
import type { PreparedReuse, PrepareRequest, Reuse } from './reuse.ts';
import { type SeatLimits, type SeatStart, Seats } from './seats.ts';

/** Settings of {@link RouterService}, read when they are used; times in milliseconds. */
export interface RouterOptions extends SeatStart, DeciderOptions {
  /** Requests that may wait at once. */
  readonly queue: QueueLimits;
  /** Requests of the router, and legs of an instance, at a time; 0: any number. */
  readonly limits: SeatLimits & { readonly requests: number };
  readonly breaker: BreakerSettings;
  /** Told of every leg that is reported. */
  readonly lateReads?: Pick<LateReads, 'note'>;
  /** Decode-to-prefill reuse; without it every plan is cold. */
  readonly reuse?: Reuse;
  /** Told for every plan and every wait. */
  readonly observe?: RouterObserver;
}

/** What the router counts. */
export interface RouterObserver {
  readonly planned: (mode: string, reason: string) => void;
  /** A request left the queue: `routed`, `timeout`, `client_gone` or `shutting_down`. */
  readonly queueLeft: (outcome: string, milliseconds: number) => void;
  /** The call that is being served has waited in the queue from one time to the other. */
  readonly queued: (since: number, until: number) => void;
  readonly breaker: ObserveBreaker;
}

/** What the rpc layer hands to a method; any of its parts may be missing in a direct call. */
export interface RouterCall {
  readonly signal: AbortSignal;
}

/** Suggested wait when there is no routable pair. */
const RETRY_AFTER_MS = 1000;

/** A decision with the places that were taken for it. */
interface Place {
  readonly decision: PlanDecision;
  readonly held: readonly string[];
}

interface Placed extends Place {
  /** In the queue, milliseconds; 0 where it did not wait. */
  readonly queuedMs: number;
}

/** Plannings that wait for the prompt's tokens are forgotten after this time. */
const PENDING_TTL_MS = 60_000;

/** Plans requests over the pools: the Router service. */
export class RouterService {
  readonly #view: InstanceView;
  readonly #options: RouterOptions;
  readonly #now: () => number;
  readonly #seats: Seats;
  readonly #decider: Decider;
  readonly #reservations: Reservations;
  /** Decisions that wait for the prompt's tokens, by plan key, oldest first. */
  readonly #pending = new Map<string, { readonly placed: Placed; readonly expiresAt: number }>();
  readonly #queue: RequestQueue;
  /** Requests that have a place and no plan yet. */
  #unplanned = 0;
  /** What was learnt of instances and pairs that fail. */
  readonly breakers: Breakers;

  constructor(view: InstanceView, options: RouterOptions) {
    this.#view = view;
    this.#options = options;
    this.#now = options.now ?? (() => performance.now());
    this.#seats = new Seats(this.#now, options.limits, options);
    const observe: ObserveBreaker = (owner, to) => options.observe?.breaker(owner, to);
    this.breakers = new Breakers(view, options.breaker, observe, this.#now);
    this.#decider = new Decider(view, this.#seats, this.breakers, options);
    this.#queue = new RequestQueue({
      limits: options.queue,
      now: this.#now,
      onChange: view.onChange,
      observe: (outcome, ms) => options.observe?.queueLeft(outcome, ms),
    });
    this.#reservations = new Reservations({
      seats: this.#seats,
      breakers: this.breakers,
      rules: options.rules,
      onRoom: () => this.#queue.pump(),
      now: this.#now,
    });
  }

  /** Legs reserved or running on an instance. */
  inFlight(instanceId: string): number {
    return this.#seats.inFlight(instanceId);
  }

  /** Instances with legs, for metrics. */
  busy(): ReturnType<Seats['busy']> {
    return this.#seats.busy();
  }

  /** Requests that wait for a routable pair, or for room on one. */
  get queueDepth(): number {
    return this.#queue.depth;
  }

  /** Other settings are in force: who waits may have room by them. */
  tryWaiting(): void {
    this.#queue.pump();
  }

  /** Nobody waits here any more: another router, or the next one, has all the time that is left to a request. */
  stopWaiting(): void {
    this.#queue.stop();
  }

  async planRoute(request: PlanRouteRequest, call: RouterCall): Promise<PlanRouteResponse> {
    const facts = requireFacts(request.facts);
    const known = this.#reservations.answerTo(request.planKey);
    if (known !== undefined) return known;
    const placed = this.#takePending(request.planKey) ?? (await this.#place(request, facts, call.signal));
    const { decision } = placed;
    const step = await this.#prepare(request, facts, placed, call.signal);
    if (call.signal.aborted) {
      // Nobody would report a plan that nobody gets, and a repeat of the call must not get what a search that was cut short found.
      if (step?.kind === 'prepared') step.discard();
      this.#leave(placed);
      call.signal.throwIfAborted();
    }
    if (step?.kind === 'need-tokens') {
      this.#remember(request.planKey, placed);
      const [first, ...fallbacks] = step.instances.map(({ id: instanceId, url }) => ({ instanceId, url }));
      return create(PlanRouteResponseSchema, {
        result: { case: 'needPromptTokens', value: { ...first, fallbacks } },
      });
    }
    // A repeat of the call may have been faster; two plans for one key would reserve twice and be reported once.
    const raced = this.#reservations.answerTo(request.planKey);
    if (raced !== undefined) {
      step?.discard();
      this.#leave(placed);
      return raced;
    }
    const plan = this.#toPlan(facts, this.#decider.avoidPairs(step?.decision ?? decision), randomUUID());
    if (placed.queuedMs > 0) plan.queued = toDuration(placed.queuedMs);
    if (step !== undefined) {
      plan.reuseOutcome = step.outcome;
      plan.captureTokens = step.captureTokens;
      plan.wholeDecode = step.wholeDecode;
      plan.adapter = step.adapter;
      if (step.handle !== undefined) {
        plan.prefillHandle = step.handle;
        plan.mode = PlanMode.PREFILL_DECODE_REUSE;
      }
    }
    const response = create(PlanRouteResponseSchema, { result: { case: 'plan', value: plan } });
    this.#giveUpSeats(placed);
    this.#reservations.add({ plan, key: request.planKey, response, facts, reuse: step });
    this.#options.observe?.planned(modeName(plan.mode), plan.reason);
    return response;
  }

  #toPlan(facts: RequestFacts, decision: PlanDecision, planId: string): Plan {
    const { session } = policyRequest(facts);
    return toPlan(decision, this.#options.connector, planId, (instance) => this.#seats.rankFor(instance, session));
  }

  /** What earlier turns left, while the place is held: requests that come meanwhile must not all get the same pair. */
  async #prepare(
    { prompt, excludedInstanceIds }: PlanRouteRequest,
    facts: RequestFacts,
    placed: Placed,
    signal: AbortSignal,
  ): Promise<Awaited<ReturnType<Reuse['prepare']>> | undefined> {
    const { reuse } = this.#options;
    if (reuse === undefined) return undefined;
    const around = this.#aroundOf(facts, placed, new Set(excludedInstanceIds));
    try {
      return await reuse.prepare({ ...around, prompt, signal });
    } catch (error) {
      this.#leave(placed);
      throw error;
    }
  }

  /** What reuse may ask about a decision. */
  #aroundOf(
    facts: RequestFacts,
    { decision, held }: Place,
    excluded: ReadonlySet<string>,
  ): Omit<PrepareRequest, 'prompt' | 'signal'> {
    return {
      facts,
      decision,
      inFlight: (id) => this.inFlight(id) - (held.includes(id) ? 1 : 0),
      isPairAvoided: (prefillId, decodeId) => this.breakers.isPairAvoided(prefillId, decodeId),
      withDecode: (decode) => {
        const other = this.#decider.decide(facts, excluded, { decode });
        return other.kind === 'plan' && other.decode[0]?.id === decode ? other : decision;
      },
    };
  }

  /** Finds a pair with room for the request, at once or when it is its turn, and takes the places. */
  async #place(request: PlanRouteRequest, facts: RequestFacts, signal: AbortSignal): Promise<Placed> {
    this.#forgetPending();
    const excluded = new Set(request.excludedInstanceIds);
    const { limits } = this.#options;
    const hasRoom = () => limits.requests === 0 || this.#reservations.size + this.#unplanned < limits.requests;
    let isPlaced = false;
    const attempt = (): Place | undefined => {
      if (!hasRoom()) return undefined;
      const decision = this.#decider.decideInTurn(facts, excluded);
      if (decision.kind === 'unknown-model') throw noRoute(facts, decision);
      if (decision.kind !== 'plan') return undefined;
      const held = [decision.prefill[0], decision.decode[0]].flatMap((instance) => instance?.id ?? []);
      for (const id of held) this.#seats.take(id);
      this.#unplanned += 1;
      isPlaced = true;
      return { decision, held };
    };
    const { tenant, priority, model, localReasons } = facts;
    const kind = JSON.stringify([model, localReasons.length > 0, [...excluded].toSorted()]);
    const maxWaitMs = toMs(request.maxWait);
    const since = this.#now();
    const placing = this.#queue.place({ tenant, priority, kind, maxWaitMs, signal, attempt });
    const hasToWait = !isPlaced;
    const place = await placing;
    const until = this.#now();
    if (hasToWait) this.#options.observe?.queued(since, until);
    if (place !== undefined) return { ...place, queuedMs: hasToWait ? until - since : 0 };
    // Who waited behind others of its kind was never tried itself: what stands in the way is looked at now.
    const decision = this.#decider.decide(facts, excluded);
    const isFull = decision.kind === 'no-route' && decision.verdicts.some(({ reason }) => reason === FULL);
    if (!hasRoom() || isFull || decision.kind === 'plan') {
      const message = 'All engines that could take this request are busy.';
      throw new BatonError({ reason: 'OVERLOADED', message, retryAfterMs: this.#queue.retryAfterMs });
    }
    throw noRoute(facts, decision);
  }

  #giveUpSeats({ held }: Placed): void {
    for (const id of held) this.#seats.free(id);
    this.#unplanned -= 1;
  }

  /** The request does not use its place. */
  #leave(placed: Placed): void {
    this.#giveUpSeats(placed);
    this.#queue.pump();
  }

  #remember(planKey: string, placed: Placed): void {
    // Nobody can come back to it.
    if (planKey === '') this.#leave(placed);
    else this.#pending.set(planKey, { placed, expiresAt: this.#now() + PENDING_TTL_MS });
  }

  #forgetPending(): void {
    const now = this.#now();
    for (const [key, { placed, expiresAt }] of this.#pending) {
      if (expiresAt > now) break;
      this.#pending.delete(key);
      this.#leave(placed);
    }
  }

  #takePending(planKey: string): Placed | undefined {
    const pending = this.#pending.get(planKey);
    this.#pending.delete(planKey);
    return pending?.placed;
  }

  async reportOutcome(request: ReportOutcomeRequest): Promise<ReportOutcomeResponse> {
    for (const leg of request.legs) {
      this.#options.lateReads?.note(leg);
      if (leg.ending === LegEnding.NOT_SENT) {
        this.#decider.noteRefused(leg.instanceId);
        this.#view.notePassive(leg.instanceId, 'refused');
      } else if (ANSWERED.has(leg.ending)) {
        this.#decider.noteAnswered(leg.instanceId);
        this.#view.notePassive(leg.instanceId, 'ok');
      }
    }
    const reservation = this.#reservations.get(request.planId);
    if (reservation === undefined) return this.#reportForeign(request);
    this.#noteBreakers(request.legs, reservation.reuse);
    reservation.legs.push(...request.legs);
    this.#reservations.moveSlots(reservation, request.legs);
    reservation.reuse?.noteLegs(request.legs, request.guardBreach);
    if (request.final) {
      this.#reservations.free(request.planId);
      await this.#finish(reservation, request);
    }
    return create(ReportOutcomeResponseSchema);
  }

  #noteBreakers(legs: readonly LegReport[], reuse: PreparedReuse | undefined): void {
    for (const leg of legs) this.breakers.note(leg, leg.warm ? (reuse?.ownerId ?? '') : leg.peerInstanceId);
  }

  /** Of a plan that another router made, or that was forgotten: with its context it ends as well as an own one. */
  async #reportForeign(request: ReportOutcomeRequest): Promise<ReportOutcomeResponse> {
    const { facts, plan } = request.context ?? {};
    if (!request.final) return create(ReportOutcomeResponseSchema);
    if (facts === undefined || plan === undefined) return create(ReportOutcomeResponseSchema, { planUnknown: true });
    const reuse = this.#options.reuse?.adopt(facts, plan);
    this.#noteBreakers(request.legs, reuse);
    reuse?.noteLegs(request.legs, request.guardBreach);
    await this.#finish({ facts, plan, legs: request.legs, reuse }, request);
    return create(ReportOutcomeResponseSchema);
  }

  async explainRoute(request: ExplainRouteRequest, { signal }: RouterCall): Promise<ExplainRouteResponse> {
    const facts = requireFacts(request.facts);
    const excluded = new Set(request.excludedInstanceIds);
    const decided = this.#decider.decideBound(facts, excluded);
    const around =
      decided.kind === 'plan' ? this.#aroundOf(facts, { decision: decided, held: [] }, excluded) : undefined;
    const looked = around && (await this.#options.reuse?.look({ ...around, signal }));
    const chosen = looked?.decision ?? decided;
    const decision = chosen.kind === 'plan' ? this.#decider.avoidPairs(chosen) : chosen;
    const losers = this.#decider.explainLosers(facts, excluded, decision);
    if (decision.kind === 'unknown-model') throw noRoute(facts, decision);
    const told = new Set(decision.verdicts.map(({ instanceId }) => instanceId));
    const verdicts = [...decision.verdicts, ...losers.filter(({ instanceId }) => !told.has(instanceId))];
    if (decision.kind === 'no-route') throw noRoute(facts, decision, verdicts);
    const plan = this.#toPlan(facts, { ...decision, verdicts }, '');
    if (looked !== undefined) plan.reuseOutcome = looked.outcome;
    if (looked !== undefined && looked.readers.length > 0) {
      plan.mode = PlanMode.PREFILL_DECODE_REUSE;
      plan.prefillHandle = create(PrefillHandleSchema, { instanceIds: looked.readers.map(({ id }) => id) });
    }
    return create(ExplainRouteResponseSchema, { plan });
  }

  /** Ends the claim, and stores what the turn left for the next one. */
  async #finish(reservation: FinishedPlan, report: ReportOutcomeRequest): Promise<void> {
    const { facts, plan, legs, reuse } = reservation;
    const served = (which: Leg) =>
      legs.findLast(({ leg, ending }) => leg === which && ending === LegEnding.OK)?.instanceId;
    const [prefillId, decodeId] = [served(Leg.PREFILL), served(Leg.DECODE)];
    const planned = { prefill: plan.prefill?.instanceId, decode: plan.decode?.instanceId };
    this.#options.bindings?.served(facts, planned, { prefill: prefillId, decode: decodeId });
    await reuse?.finish({ planId: plan.planId, facts, connector: plan.connector, prefillId, decodeId, report });
  }
}

/** Endings of a leg that show that the engine lives; a deadline or an abort of the client shows nothing. */
const ANSWERED: ReadonlySet<LegEnding> = new Set([
  LegEnding.OK,
  LegEnding.CLIENT_ERROR,
  LegEnding.BUSY,
  LegEnding.NO_HANDLE,
]);

function requireFacts(facts: RequestFacts | undefined): RequestFacts {
  if (facts !== undefined) return facts;
  throw new BatonError({ reason: 'INVALID_ARGUMENT', message: 'facts is required', metadata: { field: 'facts' } });
}

/** Instances of which a refused dry run says why. */
const MAX_TOLD = 32;

function noRoute(
  facts: RequestFacts,
  decision: Exclude<Decision, { kind: 'plan' }>,
  told: readonly Verdict[] = [],
): BatonError {
  if (decision.kind === 'unknown-model') {
    return new BatonError({
      reason: 'MODEL_NOT_FOUND',
      message: `The model \`${facts.model.slice(0, 200)}\` does not exist.`,
      param: 'model',
    });
  }
  const why = told.slice(0, MAX_TOLD).map(({ instanceId, reason, detail }) => {
    return `${instanceId} ${reason}${detail === '' ? '' : ` (${detail})`}`;
  });
  return new BatonError({
    reason: 'NO_ROUTABLE_PAIR',
    message: `No engine can take this request at the moment${why.length === 0 ? '' : `: ${why.join('; ')}`}.`,
    retryAfterMs: RETRY_AFTER_MS,
  });
}
