import type { Candidate, Policy, PolicyInput } from '../core/policy.ts';

/** The chosen ones, and behind them as many as are still wanted in the order of another policy. */
export function topUp<C extends Candidate>(chosen: readonly C[], input: PolicyInput<C>, others: Policy): readonly C[] {
  const missing = Math.min(input.count, input.candidates.length) - chosen.length;
  if (missing <= 0) return chosen;
  const rest = others.rank(input).filter((candidate) => !chosen.includes(candidate));
  return [...chosen, ...rest.slice(0, missing)];
}
