import type { Candidate } from '../core/policy.ts';

/** Places in lists that stay the same for many plans. */
const PLACES = new WeakMap<readonly Candidate[], ReadonlyMap<string, number>>();

/** The candidate with this id, if it is among these; what the look-up needs is kept as long as the list. */
export function byId<C extends Candidate>(candidates: readonly C[], id: string): C | undefined {
  const known = PLACES.get(candidates);
  const places = known ?? new Map(candidates.map((candidate, place) => [candidate.id, place]));
  if (known === undefined) PLACES.set(candidates, places);
  const place = places.get(id);
  return place === undefined ? undefined : candidates[place];
}
