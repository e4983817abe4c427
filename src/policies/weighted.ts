import type { Candidate, Policy } from '../core/policy.ts';
import { least } from './least.ts';

/**
 * Turns in proportion to the weights, evenly spread: each turn costs an instance one part in its weight, and next is the
 * one that will have paid least after it. One that was away does not get the turns that it missed.
 */
export const weighted = (): Policy => {
  const paid = new WeakMap<Candidate, number>();
  let level = 0;
  const next = (candidate: Candidate) => Math.max((paid.get(candidate) ?? 0) + 1 / candidate.weight, level);
  return {
    name: 'weighted',
    rank: ({ candidates, count }) => least(candidates, count, next),
    learn(_request, candidate) {
      level = next(candidate);
      paid.set(candidate, level);
    },
  };
};
