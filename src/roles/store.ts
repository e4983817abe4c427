import { create } from '@bufbuild/protobuf';
import type { Client } from '@connectrpc/connect';
import { GetStatsResponseSchema, KVCacheStore } from '../../gen/baton/v1/kv_cache_store_pb.ts';
import type { Config } from '../config/config.ts';
import type { Logger } from '../obs/log.ts';
import type { Metrics } from '../obs/metrics.ts';
import type { Tracer } from '../obs/tracer.ts';
import type { FaultSink } from '../rpc/bind.ts';
import { ServerBreaker } from '../rpc/breaker.ts';
import { CALLER } from '../rpc/caller.ts';
import type { RemoteOptions } from '../rpc/clients.ts';
import { createDirectClient } from '../rpc/direct-client.ts';
import { isRefusal } from '../rpc/errors.ts';
import { traceCalls } from '../rpc/trace-calls.ts';
import { EVERYTHING, KvCacheStoreService, type StoreCallContext } from '../services/kv-cache-store.ts';
import { STORES } from '../stores/index.ts';
import { type KvStore, type OpenStore, STORE_LIMITS, type StoreLimits, type StoreOptions } from '../stores/store.ts';
import { StartError } from './listen.ts';
import { PeerLog } from './peer-log.ts';

/** The store of this process: the service for the RPC port, and the client of the router beside it. */
export interface LocalStore {
  readonly service: KvCacheStoreService;
  readonly client: Client<typeof KVCacheStore>;
  /** Live handles, and those that expired since the last call. */
  readonly health: () => Promise<{ readonly conversations: number; readonly expired: number }>;
}

/** Opens the store; the stack closes it. */
export async function openStore(
  config: Config['store'],
  tracer: Tracer | undefined,
  log: Logger,
  metrics: Metrics,
  onFault: FaultSink,
  stack: AsyncDisposableStack,
): Promise<LocalStore> {
  const backends: Readonly<Record<string, OpenStore>> = STORES;
  const open = backends[config.backend];
  if (open === undefined) throw new StartError(`unknown store "${config.backend}" (--store)`);
  const limits: StoreLimits = {
    ...STORE_LIMITS,
    totalBytes: config.maxBytes,
    tenantEntries: config.tenantEntries,
    tenantBytes: config.tenantBytes,
  };
  const store = stack.use(
    await openOrExplain(config.backend, open, {
      now: () => performance.now(),
      limits,
      ...(config.snapshotFile === undefined ? {} : { snapshotFile: config.snapshotFile }),
      ...(config.valkey === undefined ? {} : { valkey: config.valkey }),
      onNotice: ({ level, message, fields }) => log[level]({ ...fields }, message),
    }),
  );
  // The router beside the store has told tenants apart before; calls through the port carry their caller.
  const callerOf = ({ protocolName, values }: StoreCallContext) =>
    protocolName === 'direct' ? EVERYTHING : values.get(CALLER);
  const service = traceCalls(KVCacheStore, stack.use(new KvCacheStoreService({ store, limits, callerOf })), tracer);
  const client = createDirectClient(KVCacheStore, service, onFault, (call) => metrics.storeCalled(call));
  // Nothing is counted while the server behind the store is away; who looks at the counts is not refused for that.
  const readStats = () => client.getStats({}).catch(() => create(GetStatsResponseSchema));
  metrics.watchStore(async () => {
    const stats = await readStats();
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
    const { entries, expirations } = await readStats();
    // A new run of the store counts from 0.
    const expired = Number(expirations < expiredBefore ? expirations : expirations - expiredBefore);
    expiredBefore = expirations;
    return { conversations: entries, expired };
  };
  return { service, client, health };
}

/**
 * How a store of another process is called: while it does not answer it is left alone for a moment, as each request would
 * else wait for it in vain. The log and the metrics say so.
 */
export function watchStore(metrics: Metrics, log: Logger): Pick<RemoteOptions, 'breaker' | 'onEnd' | 'onCall'> {
  const { note } = new PeerLog(log, 'store');
  let lastFailure: unknown;
  const breaker = new ServerBreaker({
    onChange(event) {
      metrics.storeBreaker(event);
      if (event === 'open') note(lastFailure);
      if (event === 'closed') note(undefined);
    },
  });
  const onEnd = (error: unknown) => {
    // One call may be late without harm: the breaker knows when there are too many.
    if (error !== undefined && !isRefusal(error)) lastFailure = error;
    else if (!breaker.isOpen) note(error);
  };
  return { breaker, onEnd, onCall: (call) => metrics.storeCalled(call) };
}

/** A backend that refuses to start says why. */
async function openOrExplain(backend: string, open: OpenStore, options: StoreOptions): Promise<KvStore> {
  try {
    return await open(options);
  } catch (error) {
    // All that can go wrong with the memory of this process is its snapshot.
    const setting = backend === 'memory' ? '--store-snapshot' : '--valkey-url, store.valkey';
    if (error instanceof Error) throw new StartError(`${error.message} (${setting})`, { cause: error });
    throw error;
  }
}
