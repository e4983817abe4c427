import { openMemoryStore } from './memory.ts';
import type { OpenStore } from './store.ts';
import { openValkeyStore } from './valkey.ts';

/** Every store backend by its configuration name. A new one is one file and one line here. */
export const STORES = {
  memory: openMemoryStore,
  valkey: openValkeyStore,
} as const satisfies Record<string, OpenStore>;
