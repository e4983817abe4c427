import type { Policy } from '../core/policy.ts';
import { roundRobin } from './round-robin.ts';

/** Every policy by its configuration name. A new one is one file and one line here. */
export const POLICIES = {
  round_robin: roundRobin,
} as const satisfies Record<string, Policy>;
