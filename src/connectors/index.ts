import type { Connector } from './connector.ts';
import { nixl } from './nixl.ts';

/** Every connector by its configuration name. A new one is one file and one line here. */
export const CONNECTORS = {
  nixl,
} as const satisfies Record<string, Connector>;
