import type { Connector } from './connector.ts';
import { lmcache } from './lmcache.ts';
import { nixl } from './nixl.ts';

/** Every connector by its configuration name. A new one is one file and one line here. */
export const CONNECTORS = {
  nixl,
  lmcache,
} as const satisfies Record<string, Connector>;
