import { type Instance, Role } from '../../gen/baton/v1/instance_pb.ts';
import type { Decision } from './plan.ts';
import type { Verdict } from './pools.ts';

type PlanDecision = Extract<Decision, { readonly kind: 'plan' }>;

/**
 * The decision with a pair in front that is not avoided, if there is one: the decode instance moves first, because the
 * prefill instance may be the one that can read the stored handle. Fallbacks that would be avoided come last.
 */
export function avoidPairs(
  decision: PlanDecision,
  isAvoided: (prefillId: string, decodeId: string) => boolean,
): PlanDecision {
  const { prefill, decode } = decision;
  const chosen = firstPair(prefill, decode, isAvoided);
  if (chosen === undefined) return decision;
  const [p, d] = chosen;
  // Who stood before it has nobody left to hand over to.
  const goodP = (other: Instance) =>
    other === p || (prefill.indexOf(other) > prefill.indexOf(p) && !isAvoided(other.id, d.id));
  const goodD = (other: Instance) => other === d || !isAvoided(p.id, other.id);
  return {
    ...decision,
    prefill: ordered(p, prefill, goodP),
    decode: ordered(d, decode, goodD),
    verdicts: [
      ...decision.verdicts,
      ...verdicts(prefill, Role.PREFILL, goodP),
      ...verdicts(decode, Role.DECODE, goodD),
    ],
  };
}

function firstPair(
  prefill: readonly Instance[],
  decode: readonly Instance[],
  isAvoided: (prefillId: string, decodeId: string) => boolean,
): readonly [Instance, Instance] | undefined {
  for (const p of prefill) {
    const d = decode.find(({ id }) => !isAvoided(p.id, id));
    if (d !== undefined) return [p, d];
  }
  return undefined;
}

function ordered(
  first: Instance,
  all: readonly Instance[],
  isGood: (instance: Instance) => boolean,
): readonly Instance[] {
  const others = all.filter((instance) => instance !== first);
  return [first, ...others.filter(isGood), ...others.filter((instance) => !isGood(instance))];
}

function verdicts(all: readonly Instance[], role: Role, isGood: (instance: Instance) => boolean): readonly Verdict[] {
  return all.flatMap((instance) =>
    isGood(instance) ? [] : [{ instanceId: instance.id, role, reason: 'pair_breaker_open', detail: '' }],
  );
}
