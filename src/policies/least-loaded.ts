import type { Policy } from '../core/policy.ts';
import { least } from './least.ts';
import { loadOf } from './load.ts';

/** The instance with the least to do, by own counts and by what engines tell. */
export const leastLoaded = (): Policy => ({
  name: 'least_loaded',
  rank: ({ candidates, count, now }) => least(candidates, count, (candidate) => loadOf(candidate, now)),
});
