import { hash32 } from './hash32.ts';

/** Most legs of a rank as a multiple of the mean, before a conversation goes to the next one. */
const LOAD_FACTOR = 1.25;

/**
 * The data parallel rank that a leg goes to: each rank has a prefix cache of its own, so a conversation keeps its rank as
 * long as that has no more than its share; a leg outside any conversation goes to the idlest.
 *
 * @param inFlight legs on each rank, at least one rank
 * @param session empty outside any conversation
 */
export function pickRank(inFlight: readonly number[], session: string): number {
  const idlest = inFlight.indexOf(Math.min(...inFlight));
  if (session === '') return idlest;
  const share = (inFlight.reduce((sum, legs) => sum + legs, 0) + 1) / inFlight.length;
  // Few legs cannot be spread more evenly than to whole numbers.
  const most = Math.max(Math.ceil(share), Math.floor(share * LOAD_FACTOR));
  const home = hash32(session) % inFlight.length;
  for (let i = 0; i < inFlight.length; i += 1) {
    const rank = (home + i) % inFlight.length;
    if ((inFlight[rank] ?? 0) < most) return rank;
  }
  return idlest;
}
