import { afterAll, beforeAll, beforeEach, expect, test } from 'vitest';
import { EVERYTHING, KvCacheStoreService } from '../../src/services/kv-cache-store.ts';
import type { ValkeyOptions } from '../../src/stores/store.ts';
import { hasRedis, needsRedis, RedisServer } from '../support/redis.ts';
import { openDirect } from '../support/rpc-bindings.ts';
import { seeded } from '../support/seeded.ts';
import { refusal } from '../support/store-messages.ts';
import { ownRequests, type StoreWorld } from '../support/store-world.ts';
import { nextPrefix, openOn, SLOW } from '../support/valkey.ts';
import { change, expectSame, follow, putEntry, View, Watch } from '../support/watch-reader.ts';

// Watches over what other store processes do, and over the changes of a server.
let redis: RedisServer;

beforeAll(async () => {
  if (hasRedis()) redis = await RedisServer.start();
});
afterAll(() => redis?.[Symbol.asyncDispose]());
beforeEach((context) => needsRedis(context));

/** More than a page of a snapshot. */
const ENTRIES = 600;

/** A store process on a server; those with the same requests are about the same entries. */
async function processOn(
  server: RedisServer,
  settings: Partial<ValkeyOptions>,
  requests: ReturnType<typeof ownRequests> = ownRequests(),
): Promise<StoreWorld> {
  const opened = await openOn(server, settings);
  const service = new KvCacheStoreService({ store: opened.store, callerOf: () => EVERYTHING });
  const bound = await openDirect({ kvCacheStore: service });
  return {
    client: bound.kvCacheStore,
    as: () => ({}),
    pass: async () => {},
    ...requests,
    async [Symbol.asyncDispose]() {
      await bound[Symbol.asyncDispose]();
      service[Symbol.dispose]();
      await opened[Symbol.asyncDispose]();
    },
  };
}

/** Makes the server another run at once, without the loss of a connection: what a failover comes to. */
async function beginAnotherRun(server: RedisServer): Promise<void> {
  await server.command('REPLICAOF 127.0.0.1 1');
  await server.command('REPLICAOF NO ONE');
}

test('who follows through one process and then another sees what each of them does', async () => {
  const prefix = nextPrefix();
  const requests = ownRequests();
  await using a = await processOn(redis, { prefix }, requests);
  await using b = await processOn(redis, { prefix }, requests);
  const random = seeded(11);
  const view = new View();
  const follower = follow(view, a, b);
  for (let step = 0; step < 400; step++) {
    if (step % 50 === 49) await follower.reconnect();
    await change(step % 3 === 0 ? a : b, `-${Math.floor(random() * 60)}`, random);
  }
  await expectSame(view, b);
  await follower.end();
});

test('a server that becomes another run within a snapshot: the snapshot begins anew', async () => {
  await using own = await RedisServer.start();
  const prefix = nextPrefix();
  const requests = ownRequests();
  await using a = await processOn(own, { prefix }, requests);
  for (let index = 0; index < ENTRIES; index++) await putEntry(a, `-old${index}`);
  const watch = new Watch(a);
  expect(await watch.take(3)).toEqual(['-old0 idle', '-old1 idle', '-old2 idle']);
  await beginAnotherRun(own);
  await using b = await processOn(own, { prefix }, requests);
  for (const name of ['-new0', '-new1']) await putEntry(b, name);
  const told: string[] = [];
  while (!told.at(-1)?.startsWith('all')) told.push(await watch.next());
  expect(told.slice(told.indexOf('reset epoch'))).toEqual(['reset epoch', '-new0 idle', '-new1 idle', 'all 2']);
  expect(told.length).toBeLessThan(ENTRIES);
  await putEntry(b, '-new2');
  expect(await watch.next()).toBe('-new2 idle');
  await watch.end();
});

test('a page token of a run that is over is refused, also by the call that finds out', async () => {
  await using own = await RedisServer.start();
  const prefix = nextPrefix();
  await using a = await processOn(own, { prefix });
  for (let index = 0; index < 10; index++) await putEntry(a, `-${index}`);
  const { nextPageToken: pageToken } = await a.client.listEntries({ pageSize: 5 });
  await beginAnotherRun(own);
  await using b = await processOn(own, { prefix });
  await putEntry(b, 'new');
  expect(await refusal(a.client.listEntries({ pageSize: 5, pageToken }))).toEqual({ reason: 'PAGE_TOKEN_INVALID' });
  expect((await a.client.listEntries({ pageSize: 5 })).entries).toHaveLength(1);
});

test('a server that forgot its revisions, with a clock that is behind: the watch goes on', async () => {
  await using own = await RedisServer.start();
  let now = 1_000_000;
  await using a = await processOn(own, { clock: () => now });
  const watch = new Watch(a);
  expect(await watch.next()).toBe('all 0');
  await putEntry(a, '-before');
  expect(await watch.next()).toBe('-before idle');
  await own.command('FLUSHALL');
  now -= 1000;
  await putEntry(a, '-after');
  const told: string[] = [];
  await expect.poll(async () => told.push(await watch.next()) && told, SLOW).toContain('-after idle');
  expect(told[0]).toMatch(/^reset/);
  await putEntry(a, '-later');
  while (told.at(-1) !== '-later idle') told.push(await watch.next());
  await watch.end();
});
