import type { PolicySettings } from '../../src/core/policy.ts';

/** Settings with which every limit is reached by a few candidates. */
export const POLICY_SETTINGS: PolicySettings = {
  consistentHash: { loadFactor: 1.25 },
  cacheAware: {
    cacheThreshold: 0.3,
    balanceAbsThreshold: 4,
    balanceRelThreshold: 1.5,
    maxBytes: 1024 ** 2,
    maxAgeMs: 1000,
  },
  stickyLeastLoaded: { maxLegs: 3, sessions: 2 },
};
