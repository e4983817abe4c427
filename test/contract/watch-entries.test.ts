import type { MessageInitShape } from '@bufbuild/protobuf';
import { durationFromMs } from '@bufbuild/protobuf/wkt';
import { describe, expect, test } from 'vitest';
import type { WatchEntriesRequestSchema, WatchEntriesResponse } from '../../gen/baton/v1/kv_cache_store_pb.ts';
import { batonErrorFrom } from '../../src/rpc/errors.ts';
import { KvCacheStoreService } from '../../src/services/kv-cache-store.ts';
import { openMemoryStore } from '../../src/stores/memory.ts';
import type { KvStore } from '../../src/stores/store.ts';
import { callId, limits, newEntry } from '../support/kv-store.ts';
import { BINDINGS, type Binding, openDirect } from '../support/rpc-bindings.ts';

async function opened(open: Binding['open'], tenantWatches = 64) {
  const store = await openMemoryStore({ now: () => performance.now(), limits: limits({ tenantWatches }) });
  const service = new KvCacheStoreService({
    store,
    limits: limits({ tenantWatches }),
    callerOf: ({ requestHeader }) => ({
      tenant: requestHeader.get('x-tenant') ?? 't',
      actsForAnyTenant: requestHeader.get('x-tenant') === 'any',
      mayTakeUnverified: false,
      isOperator: false,
    }),
  });
  const bound = await open({ kvCacheStore: service });
  const client = bound.kvCacheStore;
  const watch = (request: MessageInitShape<typeof WatchEntriesRequestSchema> = {}, tenant = 't') =>
    new Watch(client.watchEntries(request, { headers: { 'x-tenant': tenant } }));
  return {
    store,
    service,
    client,
    watch,
    async [Symbol.asyncDispose]() {
      await bound[Symbol.asyncDispose]();
      service[Symbol.dispose]();
      await store[Symbol.asyncDispose]();
    },
  };
}

/** Reads a watch one message at a time. */
class Watch {
  token = '';
  readonly #messages: AsyncIterator<WatchEntriesResponse>;

  constructor(messages: AsyncIterable<WatchEntriesResponse>) {
    this.#messages = messages[Symbol.asyncIterator]();
  }

  async next(): Promise<string> {
    const { value, done } = await this.#messages.next();
    if (done === true) return 'end';
    const { event, resumeToken } = value as WatchEntriesResponse;
    if (resumeToken !== '') this.token = resumeToken;
    switch (event.case) {
      case 'upserted':
        return `${event.value.key?.conversationId}${event.value.claimed ? ' claimed' : ''}`;
      case 'removed':
        return `-${event.value.reason}`;
      case 'reset':
        return `reset ${event.value.reason}`;
      case 'snapshotComplete':
        return `all ${event.value.count}`;
      default:
        return event.case ?? 'unknown';
    }
  }

  async take(count: number): Promise<string[]> {
    const seen: string[] = [];
    while (seen.length < count) seen.push(await this.next());
    return seen;
  }

  async end(): Promise<void> {
    await this.#messages.return?.();
  }
}

const put = (store: KvStore, conversationId: string, tenant = 't') =>
  store.put({ id: callId(), entry: newEntry({ key: { tenant, conversationId } }), derivedKey: false });
const remove = (store: KvStore, entryId: string) =>
  store.delete({ id: callId(), entryId, tenant: undefined, revision: undefined });
const reasonOf = (promise: Promise<unknown>) =>
  promise.then(
    () => 'none',
    (error: unknown) => batonErrorFrom(error, 'INTERNAL').reason,
  );

describe.each(BINDINGS)('WatchEntries, $name', ({ open }) => {
  test('a snapshot, then each change, and on from a token', async () => {
    await using run = await opened(open);
    const { entry } = await put(run.store, 'a');
    await put(run.store, 'b');
    await put(run.store, 'foreign', 'other');
    const watch = run.watch();
    expect(await watch.take(3)).toEqual(['a', 'b', 'all 2']);
    await put(run.store, 'foreign', 'other');
    await put(run.store, 'c');
    await remove(run.store, entry.entryId);
    expect(await watch.take(2)).toEqual(['c', '-4']);
    const { token } = watch;
    await watch.end();
    await put(run.store, 'd');
    const resumed = run.watch({ resumeToken: token });
    expect(await resumed.next()).toBe('d');
    await resumed.end();
  });

  test('what the filter names, of tenants that the caller may see', async () => {
    await using run = await opened(open);
    await put(run.store, 'a');
    await put(run.store, 'a', 'other');
    const filter = (tenant: string, conversationId = '') => ({ tenant, conversationId });
    expect(await reasonOf(run.watch({ filter: filter('other') }).next())).toBe('TENANT_FORBIDDEN');
    const all = run.watch({}, 'any');
    expect(await all.take(3)).toEqual(['a', 'a', 'all 2']);
    const one = run.watch({ filter: filter('', 'z') }, 'any');
    expect(await one.next()).toBe('all 0');
    await put(run.store, 'y');
    await put(run.store, 'z');
    expect(await one.next()).toBe('z');
    await Promise.all([all.end(), one.end()]);
  });

  test('so many watches a tenant, and none when the store closes', async () => {
    await using run = await opened(open, 2);
    const watches = [run.watch(), run.watch()];
    for (const watch of watches) expect(await watch.next()).toBe('all 0');
    expect(await run.client.getStats({})).toMatchObject({ watches: 2 });
    expect(await reasonOf(run.watch().next())).toBe('LIMIT_EXCEEDED');
    const [first, second] = watches;
    await first?.end();
    await expect.poll(async () => (await run.client.getStats({})).watches).toBe(1);
    run.service[Symbol.dispose]();
    expect(await reasonOf(second?.next() ?? Promise.resolve())).toBe('SHUTTING_DOWN');
    expect(await reasonOf(run.watch().next())).toBe('SHUTTING_DOWN');
  });

  test('a token of nobody is refused, one of another run gets a new snapshot', async () => {
    await using run = await opened(open);
    expect(await reasonOf(run.watch({ resumeToken: 'what?' }).next())).toBe('RESUME_TOKEN_INVALID');
    await put(run.store, 'a');
    const watch = run.watch({ resumeToken: 'otherrun.5' });
    expect(await watch.take(3)).toEqual(['reset epoch', 'a', 'all 1']);
    await watch.end();
  });
});

test('a watch without changes says so from time to time', async () => {
  await using run = await opened(openDirect);
  const watch = run.watch({ checkpointInterval: durationFromMs(1) });
  expect(await watch.take(2)).toEqual(['all 0', 'checkpoint']);
  await watch.end();
});

const remote = BINDINGS.filter(({ name }) => name === 'Connect on HTTP/2');
test.each(remote)(
  'a reader that stops reads a new snapshot later, and costs others nothing, $name',
  async ({ open }) => {
    await using run = await opened(open);
    const stuck = run.watch();
    expect(await stuck.next()).toBe('all 0');
    const before = process.memoryUsage().heapUsed;
    const changes = 20_000;
    for (let index = 0; index < changes; index++) {
      const { entry } = await put(run.store, `c${index}`);
      await remove(run.store, entry.entryId);
      if (index % 1000 === 0) await new Promise(setImmediate);
    }
    // Far less than a kilobyte for each change that it has not read: tombstones, the release queue and the history.
    expect((process.memoryUsage().heapUsed - before) / (2 * changes)).toBeLessThan(4096);
    await put(run.store, 'last');
    const quick = run.watch();
    expect(await quick.take(2)).toEqual(['last', 'all 1']);
    // What was on its way when it stopped comes first.
    let seen = '';
    let told = 0;
    while (seen !== 'reset compacted') {
      seen = await stuck.next();
      told += 1;
    }
    expect(told).toBeLessThan(changes);
    expect(await stuck.take(2)).toEqual(['last', 'all 1']);
    await Promise.all([stuck.end(), quick.end()]);
  },
);
