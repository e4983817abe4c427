import type { Policy } from '../core/policy.ts';

/** Each instance in its turn, as both example proxies do. */
export const roundRobin: Policy = {
  name: 'round_robin',
  rank({ candidates, turn }) {
    const first = candidates.length === 0 ? 0 : turn % candidates.length;
    return [...candidates.slice(first), ...candidates.slice(0, first)];
  },
};
