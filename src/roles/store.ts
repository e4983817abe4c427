import type { Client } from '@connectrpc/connect';
import { KVCacheStore } from '../../gen/baton/v1/kv_cache_store_pb.ts';
import type { Metrics } from '../obs/metrics.ts';
import type { FaultSink } from '../rpc/bind.ts';
import { createDirectClient } from '../rpc/direct-client.ts';
import { EVERYTHING, KvCacheStoreService } from '../services/kv-cache-store.ts';
import { STORES } from '../stores/index.ts';
import { STORE_LIMITS } from '../stores/store.ts';

/** The store of this process: the service for the RPC port, and the client of the router beside it. */
export interface LocalStore {
  readonly service: KvCacheStoreService;
  readonly client: Client<typeof KVCacheStore>;
  /** Live handles, and those that expired since the last call. */
  readonly health: () => Promise<{ readonly conversations: number; readonly expired: number }>;
}

/** Opens the store; the stack closes it. */
export async function openStore(
  metrics: Metrics,
  onFault: FaultSink,
  stack: AsyncDisposableStack,
): Promise<LocalStore> {
  const store = stack.use(await STORES.memory({ now: () => performance.now(), limits: STORE_LIMITS }));
  const service = new KvCacheStoreService({ store, callerOf: () => EVERYTHING });
  const client = createDirectClient(KVCacheStore, service, onFault);
  metrics.watchStore(async () => {
    const stats = await client.getStats({});
    return {
      entries: stats.entries,
      releaseQueue: stats.releaseQueue,
      pinnedBlocks: stats.owners.map(({ instanceId, pinnedBlocks }) => ({
        instance: instanceId,
        blocks: Number(pinnedBlocks),
      })),
    };
  });
  let expiredBefore = 0n;
  const health = async () => {
    const { entries, expirations } = await client.getStats({});
    const expired = Number(expirations - expiredBefore);
    expiredBefore = expirations;
    return { conversations: entries, expired };
  };
  return { service, client, health };
}
