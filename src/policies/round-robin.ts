import type { Policy } from '../core/policy.ts';
import { least } from './least.ts';

/** Each instance in its turn, as both example proxies do: the one whose last turn is longest ago, also when pools change. */
export const roundRobin = (): Policy => ({
  name: 'round_robin',
  rank: ({ candidates, count }) => least(candidates, count, () => 0),
});
