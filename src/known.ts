import type { Known } from './config/build-input.ts';
import type { CONNECTORS } from './connectors/index.ts';
import type { POLICIES } from './policies/index.ts';
import type { STORES } from './stores/index.ts';

type Names<T> = Readonly<Record<keyof T, true>>;

// The compiler compares them with the tables themselves, which are not loaded for their names.
const CONNECTOR_NAMES: Names<typeof CONNECTORS> = { nixl: true, lmcache: true };
const STORE_NAMES: Names<typeof STORES> = { memory: true, valkey: true };
const POLICY_NAMES: Names<typeof POLICIES> = {
  round_robin: true,
  random: true,
  power_of_two: true,
  least_loaded: true,
  weighted: true,
  consistent_hash: true,
  sticky_least_loaded: true,
  cache_aware: true,
  least_load: true,
  consistent_hashing: true,
  session: true,
  prefix_aware: true,
};

/** The names that settings may choose from. */
export const KNOWN: Known = {
  policies: Object.keys(POLICY_NAMES),
  connectors: Object.keys(CONNECTOR_NAMES),
  stores: Object.keys(STORE_NAMES),
};
