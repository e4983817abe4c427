import type { Policy } from '../core/policy.ts';
import { least } from './least.ts';
import { loadOf } from './load.ts';
import { sample } from './sample.ts';

/** The less loaded of two instances drawn at random; a few more are drawn as fallbacks. */
export const powerOfTwo = (): Policy => ({
  name: 'power_of_two',
  rank({ candidates, count, random, now }) {
    const drawn = sample(candidates, Math.max(2, count), random);
    const [first] = least(drawn.slice(0, 2), 1, (candidate) => loadOf(candidate, now));
    const others = drawn.filter((candidate) => candidate !== first);
    return first === undefined ? [] : [first, ...least(others, count - 1, (candidate) => loadOf(candidate, now))];
  },
});
