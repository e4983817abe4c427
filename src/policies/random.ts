import type { Policy } from '../core/policy.ts';
import { sample } from './sample.ts';

/** Any instance. */
export const random = (): Policy => ({
  name: 'random',
  rank: ({ candidates, count, random: chance }) => sample(candidates, count, chance),
});
