import type { Instance } from '../../gen/baton/v1/instance_pb.ts';
import type { RequestFacts } from '../../gen/baton/v1/router_pb.ts';
import { avoidPairs } from '../core/pair-order.ts';
import { type Decision, decide, explainLosers, type PlanRules, type Preference } from '../core/plan.ts';
import type { Verdict } from '../core/pools.ts';
import type { Bindings } from './bindings.ts';
import type { Breakers } from './breakers.ts';
import type { InstanceView } from './instance-view.ts';
import { PoolCache } from './pool-cache.ts';
import { PLACES, policyRequest } from './reservations.ts';
import type { Seats } from './seats.ts';

/** Settings of a {@link Decider}, read when they are used. */
export interface DeciderOptions {
  readonly rules: PlanRules;
  /** Connector of the instances that are planned with. */
  readonly connector: string;
  /** Set where conversations keep their instances. */
  readonly bindings?: Bindings;
  /** Monotonic, milliseconds. Default the clock of the process. */
  readonly now?: () => number;
  /** Uniform in [0, 1). Default Math.random. */
  readonly random?: () => number;
}

/** A decision that found instances. */
export type PlanDecision = Extract<Decision, { readonly kind: 'plan' }>;

/** Verdict of an instance with as many legs as it may have. */
export const FULL = 'full';

/** How long an instance that refused a connection is tried last. */
const COOLING_MS = 1000;

/** Decides over the pools of this moment: what is full is left out, and what fails or has just refused comes last. */
export class Decider {
  readonly #options: DeciderOptions;
  readonly #seats: Seats;
  readonly #breakers: Breakers;
  readonly #pools: PoolCache;
  readonly #now: () => number;
  readonly #random: () => number;
  readonly #cooling = new Map<string, number>();

  constructor(view: InstanceView, seats: Seats, breakers: Breakers, options: DeciderOptions) {
    this.#options = options;
    this.#seats = seats;
    this.#breakers = breakers;
    this.#pools = new PoolCache(view.snapshot, seats, options.connector);
    this.#now = options.now ?? (() => performance.now());
    this.#random = options.random ?? Math.random;
  }

  /** An instance has refused a connection. */
  noteRefused(instanceId: string): void {
    this.#cooling.set(instanceId, this.#now() + COOLING_MS);
  }

  /** It has answered again. */
  noteAnswered(instanceId: string): void {
    this.#cooling.delete(instanceId);
  }

  /** What would be planned: nothing is counted. */
  decide(facts: RequestFacts, excluded: ReadonlySet<string>, prefer?: Preference): Decision {
    const { model, bodyBytes, localReasons } = facts;
    const open = this.#breakers.avoided();
    const view = {
      pools: this.#pools.of(model, this.#barred(excluded)),
      cooling: open.size === 0 ? this.#coolingNow() : new Set([...this.#coolingNow(), ...open]),
      random: this.#random,
      now: this.#now(),
    };
    const request = policyRequest(facts);
    const decision = decide({ model, bodyBytes, localReasons, request }, view, this.#options.rules, prefer);
    return decision.kind === 'plan' && open.size > 0 ? withBreakerVerdicts(decision, open) : decision;
  }

  /** The same with a conversation's own instances in front, where conversations keep theirs. */
  decideBound(facts: RequestFacts, excluded: ReadonlySet<string>): Decision {
    return this.decide(facts, excluded, this.#options.bindings?.bound(facts));
  }

  /** Decides and counts the turn at once: requests that leave the queue together must not all get the same pair. */
  decideInTurn(facts: RequestFacts, excluded: ReadonlySet<string>): Decision {
    const decision = this.decideBound(facts, excluded);
    if (decision.kind !== 'plan') return decision;
    const placed = this.#options.bindings?.place(facts, decision);
    // What a bound conversation takes is no turn: else conversations of an even number of turns would meet on one pair.
    const paired = this.avoidPairs(decision);
    for (const place of placed?.picked ?? PLACES) {
      const [instance] = paired[place];
      if (instance !== undefined) this.#seats.pick(instance.id);
    }
    return placed?.decision ?? decision;
  }

  /** The decision with instances in front that can exchange KV at the moment. */
  avoidPairs(decision: PlanDecision): PlanDecision {
    if (!this.#breakers.hasPairs) return decision;
    return avoidPairs(decision, (prefillId, decodeId) => this.#breakers.isPairAvoided(prefillId, decodeId));
  }

  /** Why the other instances were not picked. */
  explainLosers({ model }: RequestFacts, excluded: ReadonlySet<string>, decision: Decision): readonly Verdict[] {
    return explainLosers(this.#pools.of(model, this.#barred(excluded)), decision, model);
  }

  #barred(excluded: ReadonlySet<string>): ReadonlyMap<string, string> {
    const { full } = this.#seats;
    if (full.size + excluded.size === 0) return NOBODY;
    return new Map([
      ...[...full].map((id) => [id, FULL] as const),
      ...[...excluded].map((id) => [id, 'excluded'] as const),
    ]);
  }

  #coolingNow(): ReadonlySet<string> {
    if (this.#cooling.size === 0) return NONE;
    const now = this.#now();
    for (const [id, until] of this.#cooling) if (until <= now) this.#cooling.delete(id);
    return new Set(this.#cooling.keys());
  }
}

/** Says of the instances whose breaker is open why they were not picked; where nobody else was there, one was. */
function withBreakerVerdicts(decision: PlanDecision, open: ReadonlySet<string>): PlanDecision {
  const lost = (all: readonly Instance[]): readonly Verdict[] =>
    all
      .slice(1)
      .flatMap(({ id, role }) => (open.has(id) ? [{ instanceId: id, role, reason: 'breaker_open', detail: '' }] : []));
  return { ...decision, verdicts: [...decision.verdicts, ...lost(decision.prefill), ...lost(decision.decode)] };
}

const NONE: ReadonlySet<string> = new Set();
const NOBODY: ReadonlyMap<string, string> = new Map();
