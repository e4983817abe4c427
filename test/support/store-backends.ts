import { afterAll, beforeAll } from 'vitest';
import { STORES } from '../../src/stores/index.ts';
import type { KvStore, StoreOptions } from '../../src/stores/store.ts';
import { hasRedis, RedisServer } from './redis.ts';

/** Opens a store whose clock is the test's own; each one is empty. */
export type OpenTestStore = (options: StoreOptions) => Promise<KvStore>;

let prefixes = 0;

/** Every backend, ready to be opened in a test. */
export interface Backends extends AsyncDisposable {
  readonly of: (name: string) => OpenTestStore;
}

/** Starts the backends of a test file before its tests, and ends them after these. */
export function sharedBackends(): () => Backends {
  let backends: Backends;
  beforeAll(async () => {
    backends = await startBackends();
  });
  afterAll(() => backends[Symbol.asyncDispose]());
  return () => backends;
}

async function startBackends(): Promise<Backends> {
  const redis = hasRedis() ? await RedisServer.start() : undefined;
  const opened: KvStore[] = [];
  const of =
    (name: string): OpenTestStore =>
    async (options) => {
      const store = await (name === 'valkey' ? openOn(redis, options) : STORES.memory(options));
      opened.push(store);
      return store;
    };
  return {
    of,
    async [Symbol.asyncDispose]() {
      for (const store of opened) await store[Symbol.asyncDispose]();
      await redis?.[Symbol.asyncDispose]();
    },
  };
}

function openOn(redis: RedisServer | undefined, options: StoreOptions): Promise<KvStore> {
  if (redis === undefined) throw new Error('redis-server is not installed');
  return STORES.valkey({ ...options, valkey: valkeyOn(redis, `test${++prefixes}`, options.now) });
}

/** Settings of a store on a server, with the test's clock if there is one. */
export function valkeyOn(redis: Pick<RedisServer, 'url'>, prefix: string, clock?: () => number) {
  return {
    url: redis.url,
    cluster: false,
    sentinels: [],
    sentinelName: '',
    prefix,
    ...(clock === undefined ? {} : { clock }),
  };
}
