import {
  Leg,
  LegEnding,
  type LegReport,
  type Plan,
  type PlanRouteResponse,
  type RequestFacts,
  type Target,
} from '../../gen/baton/v1/router_pb.ts';
import type { PlanRules } from '../core/plan.ts';
import type { PolicyRequest } from '../core/policy.ts';
import type { Place } from './bindings.ts';
import type { Breakers, Trials } from './breakers.ts';
import type { PreparedReuse } from './reuse.ts';
import type { Seats } from './seats.ts';

/** Plans whose caller never reported are forgotten after this time. */
const PLAN_TTL_MS = 2 * 60 * 60 * 1000;
/** What is left of a plan when its request is over. */
export interface FinishedPlan {
  readonly facts: RequestFacts;
  readonly plan: Plan;
  readonly reuse: PreparedReuse | undefined;
  readonly legs: readonly LegReport[];
}

/** A plan whose request runs, and what is held for it. */
export interface Reservation extends FinishedPlan {
  /** Slots that are still held. */
  readonly slots: { prefill: Target | undefined; decode: Target | undefined };
  readonly trials: Trials | undefined;
  readonly key: string;
  readonly response: PlanRouteResponse;
  readonly expiresAt: number;
  readonly legs: LegReport[];
}

type NewPlan = Pick<Reservation, 'plan' | 'key' | 'response' | 'facts' | 'reuse'>;

interface ReservationsDeps {
  readonly seats: Seats;
  readonly breakers: Breakers;
  readonly rules: Pick<PlanRules, 'prefillPolicy' | 'decodePolicy'>;
  /** Told when a place is free again. */
  readonly onRoom: () => void;
  readonly now: () => number;
}

/** Both, in the order of the legs. */
export const PLACES = ['prefill', 'decode'] as const satisfies readonly Place[];

/** What policies get of the facts. */
export function policyRequest({ tenant, conversationId, derivedConversation, prefix }: RequestFacts): PolicyRequest {
  const isNamed = conversationId !== '' && !derivedConversation;
  return { session: isNamed ? `${tenant}\n${conversationId}` : '', prefix };
}

/** The plans whose requests run, and the places on engines that they hold. */
export class Reservations {
  readonly #deps: ReservationsDeps;
  /** By plan id, oldest first. */
  readonly #byId = new Map<string, Reservation>();
  readonly #planByKey = new Map<string, string>();

  constructor(deps: ReservationsDeps) {
    this.#deps = deps;
  }

  get size(): number {
    return this.#byId.size;
  }

  get(planId: string): Reservation | undefined {
    return this.#byId.get(planId);
  }

  /** The answer that a key has got already. */
  answerTo(planKey: string): PlanRouteResponse | undefined {
    return this.#byId.get(this.#planByKey.get(planKey) ?? '')?.response;
  }

  /** Takes the places of a plan. */
  add({ plan, key, response, facts, reuse }: NewPlan): void {
    const { prefillPolicy, decodePolicy } = this.#deps.rules;
    const policies = { prefill: prefillPolicy, decode: decodePolicy };
    const now = this.#deps.now();
    for (const [id, { expiresAt, reuse: abandoned }] of this.#byId) {
      if (expiresAt > now) break;
      abandoned?.abandon();
      this.free(id);
    }
    const slots = { prefill: plan.prefill, decode: plan.decode };
    const told = policyRequest(facts);
    for (const place of PLACES) {
      const slot = slots[place];
      const seat = slot === undefined ? undefined : this.#deps.seats.get(slot.instanceId);
      if (seat === undefined) continue;
      this.#deps.seats.take(seat.id, slot?.dataParallelRank);
      policies[place].learn?.(told, seat, now);
    }
    this.#byId.set(plan.planId, {
      slots,
      trials: this.#deps.breakers.begin(plan.prefill?.instanceId, plan.decode?.instanceId),
      key,
      response,
      expiresAt: now + PLAN_TTL_MS,
      facts,
      plan,
      reuse,
      legs: [],
    });
    if (key !== '') this.#planByKey.set(key, plan.planId);
  }

  /** Ends a plan, and gives up what it holds. */
  free(planId: string): void {
    const reservation = this.#byId.get(planId);
    if (reservation === undefined) return;
    this.#byId.delete(planId);
    this.#planByKey.delete(reservation.key);
    reservation.trials?.end();
    for (const place of PLACES) this.#moveSlot(reservation, place, undefined);
    this.#deps.onRoom();
  }

  /** P's slot is free as soon as it has answered; where a leg was never sent, the fallback that is asked next has it. */
  moveSlots(reservation: Reservation, legs: readonly LegReport[]): void {
    for (const { leg, instanceId, ending } of legs) {
      const place = leg === Leg.PREFILL ? 'prefill' : 'decode';
      if (reservation.slots[place]?.instanceId !== instanceId) continue;
      if (place === 'prefill' && ending === LegEnding.OK) this.#moveSlot(reservation, place, undefined);
      if (ending !== LegEnding.NOT_SENT) continue;
      const { prefillFallbacks, decodeFallbacks } = reservation.plan;
      const fallbacks = place === 'prefill' ? prefillFallbacks : decodeFallbacks;
      const next = fallbacks.findIndex((target) => target.instanceId === instanceId) + 1;
      this.#moveSlot(reservation, place, fallbacks[next]);
    }
  }

  #moveSlot({ slots }: Reservation, place: Place, to: Target | undefined): void {
    const from = slots[place];
    if (from !== undefined) this.#deps.seats.free(from.instanceId, from.dataParallelRank);
    if (to !== undefined) this.#deps.seats.take(to.instanceId, to.dataParallelRank);
    slots[place] = to;
    if (from !== undefined) this.#deps.onRoom();
  }
}
