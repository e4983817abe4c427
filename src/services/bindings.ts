import type { Instance } from '../../gen/baton/v1/instance_pb.ts';
import type { RequestFacts } from '../../gen/baton/v1/router_pb.ts';
import type { Decision } from '../core/plan.ts';

type PlanDecision = Extract<Decision, { readonly kind: 'plan' }>;

/** The two places of a pair. */
export type Place = 'prefill' | 'decode';

/** Why a conversation moved: its instance could not be chosen, or a leg on it failed and another one served. */
export type RebindReason = 'gone' | 'failed';

/** Instance ids of a plan or of a served request; undefined where there was no such leg. */
export type Pair = { readonly [P in Place]?: string | undefined };

/** A decision with the conversation's own instances in front. */
export interface Placed {
  readonly decision: PlanDecision;
  /** Places that were taken in turn, because the conversation had no instance there or lost it. */
  readonly picked: readonly Place[];
}

/**
 * Keeps each conversation on one prefill and one decode instance (`CLIENT_BOUND`), from its first plan on. Bindings are
 * this router's own, least recently used first out.
 */
export class Bindings {
  readonly #observe: (place: Place, reason: RebindReason) => void;
  readonly #limit: number;
  readonly #pairs = new Map<string, Pair>();

  constructor(observe: (place: Place, reason: RebindReason) => void, limit = 100_000) {
    this.#observe = observe;
    this.#limit = limit;
  }

  /** Puts the conversation's instances in front; what it lacks or lost it gets from the decision's own order. */
  place(facts: RequestFacts, decision: PlanDecision): Placed {
    const key = keyOf(facts);
    if (key === undefined) return { decision, picked: ['prefill', 'decode'] };
    const bound = this.#pairs.get(key) ?? {};
    const prefill = first(decision.prefill, bound.prefill);
    const decode = first(decision.decode, bound.decode);
    const next = { prefill: prefill[0]?.id ?? bound.prefill, decode: decode[0]?.id ?? bound.decode };
    this.#move(key, bound, next, 'gone');
    const picked = PLACES.filter((place) => next[place] !== bound[place]);
    return { decision: { ...decision, prefill, decode }, picked };
  }

  /** The conversation's own instances; undefined where it has none yet. */
  bound(facts: RequestFacts): Pair | undefined {
    return this.#pairs.get(keyOf(facts) ?? '');
  }

  /** A request has ended: where a fallback served it, the conversation goes on there. */
  served(facts: RequestFacts, planned: Pair, served: Pair): void {
    const key = keyOf(facts);
    const bound = this.#pairs.get(key ?? '');
    if (key === undefined || bound === undefined) return;
    // A binding that moved meanwhile is the newer one.
    const now = (place: Place) => (bound[place] === planned[place] ? (served[place] ?? bound[place]) : bound[place]);
    this.#move(key, bound, { prefill: now('prefill'), decode: now('decode') }, 'failed');
  }

  #move(key: string, before: Pair, after: Pair, reason: RebindReason): void {
    for (const place of PLACES) {
      if (before[place] !== undefined && before[place] !== after[place]) this.#observe(place, reason);
    }
    this.#pairs.delete(key);
    this.#pairs.set(key, after);
    const [oldest] = this.#pairs.size > this.#limit ? this.#pairs.keys() : [];
    if (oldest !== undefined) this.#pairs.delete(oldest);
  }
}

const PLACES = ['prefill', 'decode'] as const;

/** Undefined for a request that names no conversation. */
function keyOf({ tenant, model, conversationId, derivedConversation }: RequestFacts): string | undefined {
  return conversationId === '' || derivedConversation ? undefined : JSON.stringify([tenant, model, conversationId]);
}

/** The instances with `id` in front; an unknown one changes nothing. */
function first(instances: readonly Instance[], id: string | undefined): readonly Instance[] {
  const chosen = instances.find((instance) => instance.id === id);
  return chosen === undefined ? instances : [chosen, ...instances.filter((instance) => instance !== chosen)];
}
