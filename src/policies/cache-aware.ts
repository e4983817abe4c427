import type { Candidate, Policy, PolicySettings } from '../core/policy.ts';
import { byId } from './by-id.ts';
import { least } from './least.ts';
import { leastLoaded } from './least-loaded.ts';
import { PrefixIndex } from './prefix-index.ts';
import { topUp } from './top-up.ts';

/**
 * The instance that was given the longest beginning of this prompt, whose prefix cache may still hold it, among those
 * that have not much more to do than the idlest; the least loaded where too little is known of the prompt.
 */
export const cacheAware = ({ cacheAware: settings }: PolicySettings): Policy => {
  const { cacheThreshold, balanceAbsThreshold, balanceRelThreshold, maxBytes, maxAgeMs } = settings;
  const index = new PrefixIndex(maxBytes, maxAgeMs);
  const others = leastLoaded();
  return {
    name: 'cache_aware',
    rank(input) {
      const { candidates, count, request, now } = input;
      const lengths = index.match(request.prefix, now);
      if (lengths.size === 0) return others.rank(input);
      let idlest = Number.POSITIVE_INFINITY;
      for (const { inFlight } of candidates) if (inFlight < idlest) idlest = inFlight;
      const isBusy = ({ inFlight }: Candidate) =>
        inFlight - idlest > balanceAbsThreshold && inFlight > balanceRelThreshold * idlest;
      const enough = cacheThreshold * (request.prefix.at(-1)?.bytes ?? 0);
      const near = [...lengths].flatMap(([id, bytes]) => {
        const candidate = bytes < enough ? undefined : byId(candidates, id);
        return candidate === undefined || isBusy(candidate) ? [] : [candidate];
      });
      return topUp(
        least(near, count, ({ id }) => -(lengths.get(id) ?? 0)),
        input,
        others,
      );
    },
    learn({ prefix }, { id }, now) {
      if (prefix.length > 0) index.add(prefix, id, now);
    },
  };
};
