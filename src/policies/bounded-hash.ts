import { mix32 } from '../core/hash32.ts';
import type { Candidate } from '../core/policy.ts';
import { least } from './least.ts';

/**
 * The candidates in the order in which a key prefers them, those that have their fill left out. Every key ranks the
 * instances in its own order (rendezvous hashing), so when one leaves only its keys move, evenly to all the others; an
 * instance takes no more than `loadFactor` times its share of all legs.
 */
export function boundedHash<C extends Candidate>(
  candidates: readonly C[],
  count: number,
  key: number,
  loadFactor: number,
): readonly C[] {
  let legs = 1;
  let weights = 0;
  for (const { inFlight, weight } of candidates) {
    legs += inFlight;
    weights += weight;
  }
  return least(candidates, count, ({ hash, inFlight, weight }) => {
    const share = (legs * weight) / weights;
    // Few legs cannot be spread more evenly than to whole numbers.
    const most = Math.max(Math.ceil(share), Math.floor(share * loadFactor));
    if (inFlight >= most) return Number.POSITIVE_INFINITY;
    const chance = (mix32(hash ^ key) + 0.5) / 4_294_967_296;
    return -Math.log(chance) / weight;
  });
}
