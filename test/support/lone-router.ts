import type { PolicySettings } from '../../src/core/policy.ts';
import { POLICIES } from '../../src/policies/index.ts';
import type { InstanceView } from '../../src/services/instance-view.ts';
import { type RouterOptions, RouterService } from '../../src/services/router.ts';

/** A router with one policy for both roles, and no limit, breaker or reuse that gets in its way. */
export function loneRouter(
  view: InstanceView,
  policy: keyof typeof POLICIES,
  settings: PolicySettings,
  options: Pick<RouterOptions, 'now' | 'random'> = {},
): RouterService {
  return new RouterService(view, {
    rules: {
      prefillPolicy: POLICIES[policy](settings),
      decodePolicy: POLICIES[policy](settings),
      minUncachedTokens: 0,
    },
    connector: 'nixl',
    queue: { max: 1, tenantMax: 0 },
    limits: { requests: 0, prefill: 0, decode: 0 },
    slowStartMs: 0,
    breaker: { failures: 0, pairFailures: 0, openMs: 1000 },
    ...options,
  });
}
