import type { Instance } from '../../gen/baton/v1/instance_pb.ts';
import { PlanMode } from '../../gen/baton/v1/router_pb.ts';
import { pairMismatch, pairTraits } from './compat.ts';
import type { Policy, PolicyMoment, PolicyRequest } from './policy.ts';
import type { Pools, Seated, Verdict } from './pools.ts';

/** What planning needs to know about a request. */
export interface PlanFacts {
  /** Empty: any model. */
  readonly model: string;
  readonly bodyBytes: number;
  readonly localReasons: readonly string[];
  readonly request: PolicyRequest;
}

/** The pools as they are at this moment. */
export interface PlanView extends PolicyMoment {
  readonly pools: Pools;
  /** Instances that refused a connection a moment ago: tried last. */
  readonly cooling: ReadonlySet<string>;
}

/** The part of the configuration that planning follows. */
export interface PlanRules {
  readonly prefillPolicy: Policy;
  readonly decodePolicy: Policy;
  /** Below this estimate of uncached prompt tokens D works alone; 0: always prefill and decode. */
  readonly minUncachedTokens: number;
}

/** Instances that go before the policy's choice, where they can be chosen at all. */
export interface Preference {
  readonly prefill?: string | undefined;
  readonly decode?: string | undefined;
}

export type Decision =
  | {
      readonly kind: 'plan';
      readonly mode: PlanMode;
      readonly reason: string;
      /** Best first, at most {@link MAX_RANKED}; empty for modes with one leg. Each pairs with each of `decode`. */
      readonly prefill: readonly Instance[];
      /** Best first, at most {@link MAX_RANKED}; never empty. */
      readonly decode: readonly Instance[];
      readonly verdicts: readonly Verdict[];
    }
  /** Nothing can take it at this moment. */
  | { readonly kind: 'no-route'; readonly verdicts: readonly Verdict[] }
  /** Every instance told its models, and none has this one. */
  | { readonly kind: 'unknown-model' };

/** Instances of one role in a plan: the one to ask and its fallbacks. A plan must not grow with the pools. */
export const MAX_RANKED = 8;

/** Bytes of JSON per prompt token, as a rough estimate. */
const BYTES_PER_TOKEN = 4;

/** Decides mode and instances: D first, because it may hold the history, then P among those that pair with it. */
export function decide(facts: PlanFacts, view: PlanView, rules: PlanRules, prefer: Preference = {}): Decision {
  const { pools } = view;
  if (pools.unknownModel) return { kind: 'unknown-model' };
  const { verdicts } = pools;
  const { mode, reason } = chooseMode(facts, rules, pools.disaggregated);
  const handsOver = mode === PlanMode.PREFILL_DECODE;
  const decode = rankDecode(facts, view, rules.decodePolicy, handsOver, prefer.decode);
  const [first] = decode;
  if (first === undefined) return { kind: 'no-route', verdicts };
  const prefill = handsOver
    ? rank(facts, view, rules.prefillPolicy, pools.prefillFor(first), prefer.prefill, MAX_RANKED)
    : [];
  return { kind: 'plan', mode, reason, prefill: prefill.map(toInstance), decode: decode.map(toInstance), verdicts };
}

/** Why each instance that passed the filter is not the one of the plan; in the order of the pool. */
export function explainLosers(pools: Pools, decision: Decision, model: string): readonly Verdict[] {
  const { alone, prefill } = pools;
  if (decision.kind === 'unknown-model') return [];
  if (decision.kind === 'no-route') {
    return [...alone.map((seat) => lonely(seat, prefill, model)), ...prefill.map((seat) => lonely(seat, alone, model))];
  }
  const [chosenPrefill, chosenDecode] = [decision.prefill[0], decision.decode[0]];
  const isLonely = (seat: Seated) => chosenPrefill !== undefined && pools.prefillFor(seat).length === 0;
  const decodes = alone
    .filter(({ id }) => id !== chosenDecode?.id)
    .map((seat) => (isLonely(seat) ? lonely(seat, prefill, model) : notPicked(seat)));
  if (chosenPrefill === undefined || chosenDecode === undefined) return decodes;
  const prefills = prefill
    .filter(({ id }) => id !== chosenPrefill.id)
    .map((seat) => mismatch(seat, chosenDecode, model) ?? notPicked(seat));
  return [...prefills, ...decodes];
}

function rankDecode(
  facts: PlanFacts,
  view: PlanView,
  policy: Policy,
  handsOver: boolean,
  preferred: string | undefined,
): readonly Seated[] {
  const { pools } = view;
  if (!handsOver) return rank(facts, view, policy, pools.alone, preferred, MAX_RANKED);
  if (pools.uniform) return rank(facts, view, policy, pools.paired, preferred, MAX_RANKED);
  // The kind of the best one decides: what stands in for it must be able to take the same KV.
  const [best] = rank(facts, view, policy, pools.paired, preferred, 1);
  return best === undefined ? [] : rank(facts, view, policy, pools.decodeLike(best), best.id, MAX_RANKED);
}

function rank(
  { request }: PlanFacts,
  { cooling, random, now }: PlanView,
  policy: Policy,
  pool: readonly Seated[],
  preferred: string | undefined,
  count: number,
): readonly Seated[] {
  const ask = (candidates: readonly Seated[], wanted: number): readonly Seated[] =>
    candidates.length === 0 || wanted <= 0 ? [] : policy.rank({ candidates, count: wanted, request, random, now });
  const first = preferred === undefined ? undefined : pool.find(({ id }) => id === preferred);
  if (first === undefined && cooling.size === 0) return ask(pool, count);
  const others = pool.filter((seat) => seat !== first);
  const front = first === undefined ? [] : [first];
  const warm = ask(
    others.filter(({ id }) => !cooling.has(id)),
    count - front.length,
  );
  const left = count - front.length - warm.length;
  return [
    ...front,
    ...warm,
    ...ask(
      others.filter(({ id }) => cooling.has(id)),
      left,
    ),
  ];
}

function toInstance({ instance }: Seated): Instance {
  return instance;
}

function chooseMode(facts: PlanFacts, rules: PlanRules, disaggregated: boolean): { mode: PlanMode; reason: string } {
  if (!disaggregated) return { mode: PlanMode.AGGREGATED, reason: 'aggregated_pool' };
  const [local] = facts.localReasons;
  if (local !== undefined) return { mode: PlanMode.DECODE_LOCAL, reason: local };
  if (facts.bodyBytes / BYTES_PER_TOKEN < rules.minUncachedTokens) {
    return { mode: PlanMode.DECODE_LOCAL, reason: 'short_prompt' };
  }
  return { mode: PlanMode.PREFILL_DECODE, reason: 'disaggregated' };
}

/** Why nobody of the other role pairs with this one: told of the first of them, or that there is none. */
function lonely(seat: Seated, [other]: readonly Seated[], model: string): Verdict {
  const found = other === undefined ? undefined : mismatch(seat, other.instance, model);
  return (
    found ?? { instanceId: seat.id, role: seat.instance.role, reason: 'no_peer', detail: 'no instance pairs with it' }
  );
}

function mismatch({ id, instance }: Seated, other: Instance, model: string): Verdict | undefined {
  const [own, others] = [pairTraits(instance, model), pairTraits(other, model)];
  const trait = pairMismatch(own, others);
  if (trait === undefined) return undefined;
  const detail = `${trait} ${own[trait]}, but ${other.id} has ${others[trait]}`;
  return { instanceId: id, role: instance.role, reason: `incompatible_${trait}`, detail };
}

function notPicked({ id, instance, inFlight, weight, reading }: Seated): Verdict {
  const share = weight === 1 ? '' : `, weight ${weight}`;
  const engine =
    reading === undefined
      ? ''
      : `; engine: ${reading.foreign} of others, ${reading.waiting} waiting, KV ${Math.round(100 * reading.kvUsage)} %`;
  return {
    instanceId: id,
    role: instance.role,
    reason: 'not_picked',
    detail: `${inFlight} in flight${share}${engine}`,
  };
}
