import type { Instance } from '../../gen/baton/v1/instance_pb.ts';
import {
  LegEnding,
  type LegReport,
  type Plan,
  PlanMode,
  type PrefillHandle,
  type ReportOutcomeRequest,
  type RequestFacts,
  ReuseOutcome,
} from '../../gen/baton/v1/router_pb.ts';
import type { PromptTokens } from '../../gen/baton/v1/tokens_pb.ts';
import type { Decision } from '../core/plan.ts';
import { CONVERTIBLE_VERSIONS } from '../core/whole-stream.ts';
import type { BidirectionalTrials, HungVerdict } from './bidirectional-trials.ts';
import { adapterOf } from './conversation-keys.ts';
import type { ConversationMemory } from './conversation-memory.ts';
import type { HandleClaims } from './handle-claims.ts';
import type { HandleHabits } from './handle-habits.ts';
import { isSameLife } from './instance-record.ts';
import type { InstanceView } from './instance-view.ts';
import type { GuardMode, ReusePlanner, ReuseStep } from './reuse-planner.ts';
import type { HandleFate, TurnRecorder } from './turn-recorder.ts';

type PlanDecision = Extract<Decision, { readonly kind: 'plan' }>;
type Hit = Extract<ReuseStep, { readonly kind: 'hit' }>;

/** Told what reuse does, for counters and alarms. */
export interface ReuseObserver {
  readonly handleFate: (fate: HandleFate) => void;
  /** A prefill instance hung on a handle, or used other tokens than those that were compared. */
  readonly alarm: (instanceId: string, what: HungVerdict | 'guard_breach') => void;
}

/** Settings of {@link Reuse}. */
export interface ReuseOptions {
  /** Named conversations come with their own instances in front and stay there (`CLIENT_BOUND`). */
  readonly clientBound: boolean;
  /** Decode instances give handles; else an instance that served a conversation before is not preferred. */
  readonly hasHandles: boolean;
  readonly guard: GuardMode;
  /** Streamed turns run as whole ones on engines that give handles in whole replies alone. */
  readonly convertsStreams: () => boolean;
  readonly observe: ReuseObserver;
}

/** The parts that {@link Reuse} joins. */
export interface ReuseParts {
  readonly view: InstanceView;
  readonly planner: ReusePlanner;
  readonly claims: HandleClaims;
  readonly recorder: TurnRecorder;
  readonly trials: BidirectionalTrials;
  readonly memory: ConversationMemory;
  readonly habits: HandleHabits;
}

/** What is needed to prepare a plan. */
export interface PrepareRequest {
  readonly facts: RequestFacts;
  readonly decision: PlanDecision;
  readonly prompt: PromptTokens | undefined;
  /** Legs that an instance has at this moment, this request's not counted. */
  readonly inFlight: (instanceId: string) => number;
  /** The decision with this decode instance in front, where it can be chosen; for one that the decision does not rank. */
  readonly withDecode: (instanceId: string) => PlanDecision;
  /** Whether the two are kept apart for the moment, because KV did not get from the one to the other. */
  readonly isPairAvoided: (prefillId: string, decodeId: string) => boolean;
  readonly signal: AbortSignal;
}

/** What a dry run sees of earlier turns. */
export interface LookedAt {
  readonly decision: PlanDecision;
  readonly outcome: ReuseOutcome;
  /** Prefill instances that would get a handle, the first one first, if the prompt's tokens are proven equal. */
  readonly readers: readonly Instance[];
}

/** Result of a turn, for {@link PreparedReuse.finish}. */
export interface TurnResult {
  readonly planId: string;
  readonly facts: RequestFacts;
  readonly connector: string;
  readonly prefillId: string | undefined;
  readonly decodeId: string | undefined;
  readonly report: ReportOutcomeRequest;
}

/** A prepared plan's reuse: what goes into the plan, and what follows from its reports. */
export interface PreparedReuse {
  readonly kind: 'prepared';
  readonly decision: PlanDecision;
  readonly outcome: ReuseOutcome;
  readonly handle: PrefillHandle | undefined;
  /** Decode instance that holds what the handle names; empty without one. */
  readonly ownerId: string;
  /** Root of the adapter that the model is; empty for a base model. */
  readonly adapter: string;
  readonly captureTokens: boolean;
  /** The decode leg runs without streaming, for the handle that only whole replies carry. */
  readonly wholeDecode: boolean;
  readonly noteLegs: (legs: readonly LegReport[], guardBreach: boolean) => void;
  readonly finish: (result: TurnResult) => Promise<void>;
  /** The plan is not given to anybody. */
  readonly discard: () => void;
  /** The caller never reported: what it may have used counts as used. */
  readonly abandon: () => void;
}

/** A decode instance keeps its conversations unless it has this many legs, or twice as many as the idlest. */
const LOAD_CAP = 8;

/** Decode-to-prefill reuse, as the Router plans it: joins planning, trials, memory and recording. */
export class Reuse {
  readonly #parts: ReuseParts;
  readonly #options: ReuseOptions;

  constructor(parts: ReuseParts, options: ReuseOptions) {
    this.#parts = parts;
    this.#options = options;
  }

  async prepare(request: PrepareRequest): Promise<PreparedReuse | Extract<ReuseStep, { kind: 'need-tokens' }>> {
    const { facts, decision } = request;
    if (decision.mode !== PlanMode.PREFILL_DECODE) return this.#local(request);
    const { near, prefillFor } = this.#around(request);
    const step = await this.#parts.planner.plan({ ...request, prefillFor });
    if (step.kind === 'need-tokens') return step;
    if (step.kind === 'local') return this.#shortTail(request, step.ownerId, near);
    const hit = step.kind === 'hit' ? step : undefined;
    const preferred = this.#prefer(request, step, near);
    return this.#prepared(facts, preferred, step.outcome, hit);
  }

  /** What a plan begins with, for a dry run: nothing is claimed, and no tokens are compared. */
  async look(request: Omit<PrepareRequest, 'prompt'>): Promise<LookedAt> {
    const { decision } = request;
    const unproven = { ...request, prompt: undefined };
    if (decision.mode !== PlanMode.PREFILL_DECODE || this.#options.guard !== 'exact') {
      return { decision, outcome: this.#local(unproven).outcome, readers: [] };
    }
    const { near, prefillFor } = this.#around(unproven);
    const step = await this.#parts.planner.plan({ ...unproven, prefillFor });
    if (step.kind === 'cold') {
      return { decision: this.#prefer(unproven, step, near), outcome: step.outcome, readers: [] };
    }
    if (step.kind !== 'need-tokens') throw new TypeError('a plan without tokens has claimed something');
    const readers = prefillFor(step.ownerId).filter(({ id }) => step.instances.some((one) => one.id === id));
    const found = { kind: 'cold', outcome: ReuseOutcome.UNSPECIFIED, ownerId: step.ownerId } as const;
    const preferred = this.#prefer(unproven, found, near);
    return {
      decision: { ...preferred, prefill: first(preferred.prefill, readers.slice(0, 1)) },
      outcome: found.outcome,
      readers,
    };
  }

  /** The decision around a decode instance, and who could read from it. */
  #around(request: PrepareRequest) {
    const { facts, decision } = request;
    let around = decision;
    const near = (decodeId: string): PlanDecision => {
      // A large pool is not ranked whole, and instances of several kinds are not ranked together.
      if (!this.#isBound(facts) && !around.decode.some(({ id }) => id === decodeId))
        around = request.withDecode(decodeId);
      return around;
    };
    const prefillFor = (ownerId: string) =>
      this.#readers(facts, near(ownerId)).filter(({ id }) => !request.isPairAvoided(id, ownerId));
    return { near, prefillFor };
  }

  /**
   * The reuse of a plan that this router has not made, as far as its reports need it. A decode instance that restarted
   * since then is left out: what its reply told of is gone. Nothing is learnt of who reads well.
   */
  adopt(facts: RequestFacts, plan: Plan): PreparedReuse {
    const planned = [plan.decode, ...plan.decodeFallbacks];
    const decode = this.#parts.view.snapshot().filter(({ id, incarnation }) => {
      const target = planned.find((candidate) => candidate?.instanceId === id);
      return (
        target !== undefined && (!target.incarnation || !incarnation || isSameLife(target.incarnation, incarnation))
      );
    });
    const { mode, reason, prefillHandle: handle, reuseOutcome: outcome } = plan;
    const decision = { kind: 'plan', mode, reason, prefill: [], decode, verdicts: [] } as const;
    const hit: Hit | undefined = handle && { kind: 'hit', outcome, handle, prefill: [], ownerId: '', admission: 'go' };
    return this.#prepared(facts, decision, outcome, hit, plan.wholeDecode);
  }

  /** Only its own prefill instance reads for a bound conversation: one that may not read is no reason to leave it. */
  #readers(facts: RequestFacts, decision: PlanDecision): readonly Instance[] {
    return this.#isBound(facts) ? decision.prefill.slice(0, 1) : decision.prefill;
  }

  #isBound(facts: RequestFacts): boolean {
    return this.#options.clientBound && facts.conversationId !== '' && !facts.derivedConversation;
  }

  /** The instance that decoded the last turn computes the rest itself, unless it is busy or cannot be chosen. */
  #shortTail(request: PrepareRequest, ownerId: string, near: (decodeId: string) => PlanDecision): PreparedReuse {
    const decision = near(ownerId);
    const decode = ordered(decision.decode, ownerId, request.inFlight);
    if (decode[0]?.id !== ownerId)
      return this.#prepared(request.facts, decision, ReuseOutcome.MISS_TOO_SMALL, undefined);
    const local = { ...decision, mode: PlanMode.DECODE_LOCAL, reason: 'short_tail', prefill: [], decode } as const;
    return this.#prepared(request.facts, local, ReuseOutcome.DECODE_LOCAL, undefined);
  }

  /** One leg: nothing is taken, the stored handle stays good for a later turn. */
  #local({ facts, decision }: PrepareRequest): PreparedReuse {
    const known = this.#parts.memory.get(facts) !== undefined;
    const continues = facts.continues || (facts.conversationId !== '' && known);
    const local = decision.mode === PlanMode.DECODE_LOCAL && continues;
    return this.#prepared(facts, decision, local ? ReuseOutcome.DECODE_LOCAL : ReuseOutcome.UNSPECIFIED, undefined);
  }

  /** Whether a streamed reply is made from a whole one: worth it only where that brings a handle. */
  #isConverted({ stream, convertible }: RequestFacts, decode: Instance | undefined): boolean {
    const { convertsStreams, hasHandles } = this.#options;
    if (decode === undefined || !stream || !convertible || !hasHandles || !convertsStreams()) return false;
    return !this.#parts.habits.streams(decode) && CONVERTIBLE_VERSIONS.test(decode.engine?.version ?? '');
  }

  #prepared(
    facts: RequestFacts,
    decision: PlanDecision,
    outcome: ReuseOutcome,
    hit: Hit | undefined,
    planned?: boolean,
  ): PreparedReuse {
    const claim = hit === undefined ? undefined : new WarmClaim(hit, this.#parts, this.#options.observe);
    const [decode] = decision.decode;
    const stored = decision.mode === PlanMode.PREFILL_DECODE && facts.conversationId !== '';
    const wanted = stored && this.#isConverted(facts, decode);
    const captureTokens = stored && decode !== undefined && this.#parts.habits.mayGive(decode, facts.stream && !wanted);
    const wholeDecode = planned ?? (captureTokens && wanted);
    return {
      kind: 'prepared',
      decision,
      outcome,
      handle: hit?.handle,
      ownerId: hit?.ownerId ?? '',
      adapter: adapterOf(this.#parts.view.snapshot(), facts),
      captureTokens,
      wholeDecode,
      noteLegs: (legs, guardBreach) => {
        claim?.noteLegs(legs);
        const last = legs.at(-1);
        if (guardBreach && last !== undefined) {
          this.#options.observe.alarm(last.instanceId, 'guard_breach');
          this.#parts.view.drain(last.instanceId, 'guard_breach');
        }
      },
      discard: () => claim?.finish(),
      abandon: () => claim?.abandon(),
      finish: async (result) => {
        claim?.finish();
        const instance = decision.decode.find(({ id }) => id === result.decodeId);
        if (instance === undefined) return;
        const handedOver = result.prefillId !== undefined;
        const prefill = this.#parts.view.snapshot().find(({ id }) => id === result.prefillId);
        const fate = await this.#parts.recorder.record({
          ...result,
          prefill,
          decode: instance,
          handedOver,
          streamed: facts.stream && !wholeDecode,
          afterHit: hit !== undefined,
        });
        this.#options.observe.handleFate(fate);
      },
    };
  }

  /** The previous D holds the history in its prefix cache, and after a turn without a handle so does the previous P. */
  #prefer(
    { facts, decision: planned, inFlight }: PrepareRequest,
    step: Exclude<ReuseStep, { kind: 'need-tokens' | 'local' }>,
    near: (decodeId: string) => PlanDecision,
  ): PlanDecision {
    if (this.#isBound(facts) || !this.#options.hasHandles) return planned;
    const remembered = this.#parts.memory.get(facts);
    const decodeId = step.ownerId ?? remembered?.decodeId;
    const decision = decodeId === undefined ? planned : near(decodeId);
    const prefillFirst = step.kind === 'hit' ? step.prefill : [];
    const keepPrefill = prefillFirst.length === 0 && remembered?.noHandle !== undefined;
    const keptPrefill = keepPrefill ? decision.prefill.filter(({ id }) => id === remembered.prefillId) : prefillFirst;
    return {
      ...decision,
      prefill: first(decision.prefill, keptPrefill),
      decode: ordered(decision.decode, decodeId, inFlight),
    };
  }
}

/**
 * The previous instance first, unless it has so much to do that another one serves the turn sooner even without the
 * history; then it is the last.
 */
function ordered(
  instances: readonly Instance[],
  id: string | undefined,
  inFlight: (instanceId: string) => number,
): readonly Instance[] {
  const previous = instances.find((instance) => instance.id === id);
  if (previous === undefined) return instances;
  const idlest = Math.min(...instances.map((instance) => inFlight(instance.id)));
  const others = instances.filter((instance) => instance !== previous);
  return inFlight(previous.id) < Math.max(LOAD_CAP, 2 * idlest) ? [previous, ...others] : [...others, previous];
}

/** The chosen instances in front of the others. */
function first(instances: readonly Instance[], chosen: readonly Instance[]): readonly Instance[] {
  return chosen.length === 0
    ? instances
    : [...chosen, ...instances.filter(({ id }) => !chosen.some((c) => c.id === id))];
}

const HUNG = new Set<LegEnding>([LegEnding.TIMEOUT]);

/** A claim from its take to its end, driven by what is reported of the legs that carried the handle. */
class WarmClaim {
  readonly #hit: Hit;
  readonly #parts: ReuseParts;
  readonly #observe: ReuseObserver;
  #open = true;
  #settled = false;

  constructor(hit: Hit, parts: ReuseParts, observe: ReuseObserver) {
    this.#hit = hit;
    this.#parts = parts;
    this.#observe = observe;
  }

  noteLegs(legs: readonly LegReport[]): void {
    for (const leg of legs) {
      if (!leg.warm || leg.ending === LegEnding.NOT_SENT) continue;
      this.#settle(leg);
      if (!this.#open) continue;
      this.#open = false;
      const { claimId } = this.#hit.handle;
      // A refusal by the engine's API is before its core; every other ending may have read the blocks.
      if (leg.ending === LegEnding.CLIENT_ERROR) this.#parts.claims.release(claimId, 'client_error');
      else this.#parts.claims.commit(claimId);
    }
  }

  finish(): void {
    this.#endTrial();
    if (!this.#open) return;
    this.#open = false;
    this.#parts.claims.release(this.#hit.handle.claimId, 'not_sent');
  }

  abandon(): void {
    this.#endTrial();
    if (!this.#open) return;
    this.#open = false;
    this.#parts.claims.commit(this.#hit.handle.claimId);
  }

  /** A leg that was never sent has tried nothing. */
  #endTrial(): void {
    const [reader] = this.#hit.prefill;
    if (this.#settled || reader === undefined) return;
    this.#settled = true;
    this.#parts.trials.settle(reader, this.#hit.ownerId, 'other');
  }

  #settle({ instanceId, ending }: LegReport): void {
    const reader = this.#hit.prefill.find(({ id }) => id === instanceId);
    if (this.#settled || reader === undefined) return;
    this.#settled = true;
    const { trials, view } = this.#parts;
    const before = trials.known(reader);
    const verdict = trials.settle(
      reader,
      this.#hit.ownerId,
      ending === LegEnding.OK ? 'ok' : HUNG.has(ending) ? 'hung' : 'other',
    );
    const known = trials.known(reader);
    if (known !== undefined && known !== before) view.noteBidirectional(reader.id, known);
    if (verdict === undefined) return;
    this.#observe.alarm(reader.id, verdict);
    if (verdict === 'drain') view.drain(reader.id, 'hung_pulls');
  }
}
