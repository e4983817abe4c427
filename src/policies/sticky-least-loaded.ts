import type { Policy, PolicySettings } from '../core/policy.ts';
import { byId } from './by-id.ts';
import { leastLoaded } from './least-loaded.ts';
import { topUp } from './top-up.ts';

/**
 * Each conversation where its turn before was, whose prefix cache holds the history, unless that instance has too much to
 * do; otherwise, and for first turns, the least loaded.
 */
export const stickyLeastLoaded = ({ stickyLeastLoaded: { maxLegs, sessions } }: PolicySettings): Policy => {
  const others = leastLoaded();
  /** Least recently used first. */
  const places = new Map<string, string>();
  return {
    name: 'sticky_least_loaded',
    rank(input) {
      const { candidates, request } = input;
      const place = places.get(request.session);
      const previous = place === undefined ? undefined : byId(candidates, place);
      if (previous === undefined) return others.rank(input);
      let idlest = Number.POSITIVE_INFINITY;
      for (const { inFlight } of candidates) if (inFlight < idlest) idlest = inFlight;
      if (previous.inFlight >= Math.max(maxLegs, 2 * idlest)) return others.rank(input);
      return topUp([previous], input, others);
    },
    learn({ session }, { id }) {
      if (session === '') return;
      places.delete(session);
      places.set(session, id);
      const [oldest] = places.size > sessions ? places.keys() : [];
      if (oldest !== undefined) places.delete(oldest);
    },
  };
};
