import type { KvStore, StoreOptions } from './store.ts';

/** Opens a store on a Redis or Valkey server; its client is loaded only then. */
export async function openValkeyStore(options: StoreOptions): Promise<KvStore> {
  const { openValkey } = await import('./valkey/store.ts');
  return openValkey(options);
}
