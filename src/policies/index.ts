import type { Policy, PolicySettings } from '../core/policy.ts';
import { cacheAware } from './cache-aware.ts';
import { consistentHash } from './consistent-hash.ts';
import { leastLoaded } from './least-loaded.ts';
import { powerOfTwo } from './power-of-two.ts';
import { random } from './random.ts';
import { roundRobin } from './round-robin.ts';
import { stickyLeastLoaded } from './sticky-least-loaded.ts';
import { weighted } from './weighted.ts';

/** Every policy by its configuration name. A new one is one file and one line here. */
export const POLICIES = {
  round_robin: roundRobin,
  random,
  power_of_two: powerOfTwo,
  least_loaded: leastLoaded,
  weighted,
  consistent_hash: consistentHash,
  sticky_least_loaded: stickyLeastLoaded,
  cache_aware: cacheAware,
  // The same under the names that other routers give them.
  least_load: leastLoaded,
  consistent_hashing: consistentHash,
  session: consistentHash,
  prefix_aware: cacheAware,
} as const satisfies Record<string, (settings: PolicySettings) => Policy>;
