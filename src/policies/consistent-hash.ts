import { hash32 } from '../core/hash32.ts';
import type { Policy, PolicySettings } from '../core/policy.ts';
import { boundedHash } from './bounded-hash.ts';
import { powerOfTwo } from './power-of-two.ts';
import { topUp } from './top-up.ts';

/** Each conversation on an instance of its own, as long as that has no more than its share; without one, power of two. */
export const consistentHash = ({ consistentHash: { loadFactor } }: PolicySettings): Policy => {
  const others = powerOfTwo();
  return {
    name: 'consistent_hash',
    rank(input) {
      const { candidates, count, request } = input;
      if (request.session === '') return others.rank(input);
      // Never empty: not every instance can have more than its share.
      return topUp(boundedHash(candidates, count, hash32(request.session), loadFactor), input, others);
    },
  };
};
