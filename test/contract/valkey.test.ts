import { once } from 'node:events';
import { createServer, type Socket } from 'node:net';
import { afterAll, beforeAll, beforeEach, describe, expect, test, vi } from 'vitest';
import { MissReason } from '../../gen/baton/v1/kv_cache_store_pb.ts';
import type { StoreNotice, ValkeyOptions } from '../../src/stores/store.ts';
import { callId, ids, KEY, newEntry, proofOf } from '../support/kv-store.ts';
import { hasRedis, needsRedis, RedisServer } from '../support/redis.ts';
import { miss, nextPrefix, openOn, put, SLOW, takeCall, takenOnceBack } from '../support/valkey.ts';

let redis: RedisServer;

beforeAll(async () => {
  if (hasRedis()) redis = await RedisServer.start();
});

afterAll(() => redis?.[Symbol.asyncDispose]());

beforeEach((context) => needsRedis(context));

const opened = (settings: Partial<ValkeyOptions> = {}) => openOn(redis, settings);

describe('several processes on one server', () => {
  test('two calls with one idempotency key, on two of them, make one claim', async () => {
    const prefix = nextPrefix();
    await using a = await opened({ prefix });
    await using b = await opened({ prefix });
    await put(a.store);
    await put(b.store);
    const call = takeCall();
    const results = await Promise.all([a, b, a, b, b, a].map(({ store }) => store.take(call)));
    const claims = results.map((result) => (result.kind === 'taken' ? result.taken.claimId : 'none'));
    expect(new Set(claims).size).toBe(1);
    expect(await a.store.stats({})).toMatchObject({ entries: 2, claims: 1, takes: 1 });
    const again = { id: callId(), entry: newEntry(), derivedKey: false };
    const puts = await Promise.all([a, b, a, b].map(({ store }) => store.put(again)));
    expect(new Set(puts.map(({ entry }) => entry.entryId)).size).toBe(1);
    expect(await b.store.stats({})).toMatchObject({ entries: 3, puts: 3 });
  });

  test('takers of one key get each entry once', async () => {
    const prefix = nextPrefix();
    await using a = await opened({ prefix });
    await using b = await opened({ prefix });
    for (let index = 0; index < 8; index++) await put(a.store);
    const stores = Array.from({ length: 24 }, (_, index) => (index % 2 === 0 ? a : b).store);
    const results = await Promise.all(stores.map((store) => store.take(takeCall())));
    const given = results.flatMap((result) => (result.kind === 'taken' ? [result.taken.entry.entryId] : []));
    expect(given).toHaveLength(8);
    expect(new Set(given).size).toBe(8);
    expect(results.filter(({ kind }) => kind === 'miss')).toEqual(Array(16).fill(miss(MissReason.TAKEN)));
  });

  test('what one stored and another touched is looked at again', async () => {
    const prefix = nextPrefix();
    await using a = await opened({ prefix });
    await using b = await opened({ prefix });
    const taken = async ({ store }: typeof a, rest = {}) => {
      const result = await store.take(takeCall(rest));
      return result.kind === 'taken' ? result.taken : result;
    };
    const claimOf = (result: Awaited<ReturnType<typeof taken>>) => ('claimId' in result ? result.claimId : '');
    const first = await put(a.store);
    const back = await b.store.release(claimOf(await taken(b)), () => true);
    const again = await taken(a);
    expect(again).toMatchObject({ entry: { entryId: first.entry.entryId } });
    expect('entry' in again && back !== undefined && again.entry.revision > back.revision).toBe(true);
    await a.store.commit(claimOf(again), () => true);

    await put(a.store, { tokens: ids(128) });
    const longer = await put(b.store);
    expect(await taken(a)).toMatchObject({ entry: { entryId: longer.entry.entryId }, matchedTokens: 200 });
    expect(await taken(a)).toMatchObject({ matchedTokens: 128 });

    const other = { key: { ...KEY, conversationId: 'other' } };
    const third = await put(a.store, other);
    expect(await taken(b, other)).toMatchObject({ entry: { entryId: third.entry.entryId } });
    expect(await taken(a, other)).toEqual(miss(MissReason.TAKEN));
  });

  test('a take of what was stored here is one step', async () => {
    await using own = await RedisServer.start();
    const prefix = nextPrefix();
    await using a = await openOn(own, { prefix });
    await using b = await openOn(own, { prefix });
    const COUNT = 20;
    const stepsOf = async (taker: typeof a) => {
      const key = (index: number) => ({ ...KEY, conversationId: `${index}` });
      for (let index = 0; index < COUNT; index++) await put(a.store, { key: key(index) });
      await own.command('CONFIG RESETSTAT');
      for (let index = 0; index < COUNT; index++) {
        expect((await taker.store.take(takeCall({ key: key(index) }))).kind).toBe('taken');
      }
      return Number(/cmdstat_evalsha:calls=(\d+)/.exec(await own.command('INFO commandstats'))?.[1]);
    };
    // Both also ask now and then what has changed.
    expect(await stepsOf(a)).toBeLessThan(1.5 * COUNT);
    expect(await stepsOf(b)).toBeGreaterThanOrEqual(2 * COUNT);
  });

  test('each hears what another changed, and of its queues', async () => {
    const prefix = nextPrefix();
    await using a = await opened({ prefix });
    await using b = await opened({ prefix });
    const seen: string[] = [];
    const queues: [string, number][] = [];
    b.store.onChange((change) => void seen.push(change.kind));
    b.store.onReleasable((instanceId, queued) => void queues.push([instanceId, queued]));
    await b.store.stats({});
    await put(a.store);
    await a.store.take(takeCall({ prove: proofOf(ids(300, 5000)) }));
    await expect.poll(() => [...seen, ...queues.flat()]).toEqual(['upserted', 'removed', 'd', 1]);
  });
});

describe('a server that changes', () => {
  test('the old primary, promoted again with an untaken copy, does not give it', async () => {
    await using first = await RedisServer.start();
    await using a = await openOn(first);
    await put(a.store);
    // What a resync does without a second server: the same data under another history.
    await first.command('REPLICAOF 127.0.0.1 1');
    await first.command('REPLICAOF NO ONE');
    expect(await takenOnceBack(a.store)).toEqual(miss(MissReason.STORE_EPOCH));
  });

  test('a clock that steps back ends the run; a little is waited out', async () => {
    let now = 1_000_000;
    await using a = await opened({ clock: () => now });
    await put(a.store);
    const { runId } = a.store;
    now -= 2000;
    const [entry] = (await a.store.get({ kind: 'key', key: KEY })).entries;
    expect(entry?.ageMs).toBe(0);
    expect(a.store.runId).toBe(runId);
    now -= 1;
    expect(await a.store.take(takeCall())).toEqual(miss(MissReason.STORE_EPOCH));
    expect(a.store.runId).not.toBe(runId);
  });

  test('emptied: nothing is there', async () => {
    await using own = await RedisServer.start();
    await using a = await openOn(own);
    await put(a.store);
    const { runId } = a.store;
    await own.command('FLUSHALL');
    expect(await a.store.take(takeCall())).toEqual(miss(MissReason.NEVER_STORED));
    expect(a.store.runId).not.toBe(runId);
    await own.command('SCRIPT FLUSH');
    await put(a.store);
    expect((await a.store.take(takeCall())).kind).toBe('taken');
  });
});

/** Deletes the keys whose names end in one of these letters; a server that evicts does so sooner or later. */
const lose = (ends: string): string =>
  `EVAL "for _, k in ipairs(redis.call('KEYS','*')) do if string.match(k, ':[${ends}]$') then redis.call('DEL', k) end end" 0`;

test.each([
  ['FLUSHALL', false],
  [lose('n'), true],
  [lose('m'), false],
  [lose('nm'), false],
])('after %s no claim and no entry has the id of an earlier one', async (loss, isSameRun) => {
  await using own = await RedisServer.start();
  await using a = await openOn(own);
  const first = await put(a.store);
  const early = await a.store.take(takeCall());
  if (early.kind !== 'taken') throw new Error('not taken');
  await own.command(loss);
  const second = await put(a.store);
  const late = await a.store.take(takeCall());
  if (late.kind !== 'taken') throw new Error('not taken');
  expect(second.entry.entryId).not.toBe(first.entry.entryId);
  expect(late.taken.claimId).not.toBe(early.taken.claimId);
  // Else the holder of the early claim would put back what the other one reads.
  const back = await a.store.release(early.taken.claimId, () => true).catch(({ reason }) => reason);
  const its = expect.objectContaining({ entryId: first.entry.entryId });
  expect(back).toEqual(isSameRun ? its : 'CLAIM_NOT_FOUND');
  const third = await a.store.take(takeCall());
  expect(third.kind === 'taken' ? third.taken.entry : 'miss').toEqual(isSameRun ? its : 'miss');
});

describe('the server', () => {
  test('without the database of the URL is refused, and no other one is used', async () => {
    await using own = await RedisServer.start();
    const url = `redis://127.0.0.1:${own.port}/99`;
    const heard: StoreNotice[] = [];
    await expect
      .poll(() => {
        heard.length = 0;
        return refusalOf(openOn(own, { url }, heard));
      }, SLOW)
      .toMatch(/has no database 99; name another one/);
    // Whoever opens it tells of it, once.
    expect(heard).toEqual([]);
    await using other = await opened({ url: url.replace('99', '1') });
    // On a busy machine the store may be open before its server has answered.
    const outcome = () =>
      put(other.store).then(
        () => 'put',
        (error: Error) => `${error}: ${error.cause}; ${JSON.stringify(other.notices)}`,
      );
    await expect.poll(outcome, SLOW).toBe('put');
    expect(await own.command('INFO keyspace')).toMatch(/db1:/);
    expect(await own.command('INFO keyspace')).not.toMatch(/db0:/);
  }, 60_000);

  test('too old is refused, with its version and what is needed', async () => {
    await using old = await oldServer('redis_version:6.2.14');
    await expect(opened({ url: old.url })).rejects.toThrow(/Redis 6\.2\.14; it needs Redis 7\.0 or Valkey 7\.2/);
    await using fork = await oldServer('redis_version:7.2.4\r\nvalkey_version:7.1.9');
    await expect(opened({ url: fork.url })).rejects.toThrow(/Valkey 7\.1\.9/);
  });

  test('that does not speak what is asked of it is told apart', async () => {
    await using web = await serverOf((socket) => void socket.end('HTTP/1.1 400 Bad Request\r\n\r\n'));
    const tls = ({ url }: { readonly url: string }) => ({ url: url.replace('redis:', 'rediss:') });
    // The last: Redis waits for the end of a line that TLS does not send.
    const wrong = [openOn(web), openOn(web, tls(web)), openOn(redis, tls(redis))];
    const causes: unknown[] = [];
    for (const opening of wrong) {
      await using opened = await opening;
      causes.push(opened.notices.map(({ fields }) => fields?.['cause']));
    }
    expect(causes).toEqual([
      ['what answers there is no Redis or Valkey server'],
      ['ERR_SSL_WRONG_VERSION_NUMBER: what answers there speaks no TLS'],
      [expect.stringContaining('no answer in TLS; a port without TLS wants redis://')],
    ]);
  });

  test('that wants no password says so once, and nothing is written beside the log', async () => {
    const warn = vi.spyOn(console, 'warn').mockImplementation(() => {});
    const url = redis.url.replace('//', '//:sesame@');
    await using a = await opened({ url });
    await put(a.store);
    expect(a.notices).toEqual([{ level: 'warn', message: 'the valkey server wants no password, and is given one' }]);
    expect(warn).not.toHaveBeenCalled();
  });

  test('that evicts is refused, and one that would is warned of', async () => {
    await using own = await RedisServer.start(['--maxmemory-policy', 'allkeys-lru']);
    await using a = await openOn(own);
    expect(a.notices).toMatchObject([{ level: 'warn', message: expect.stringContaining('allkeys-lru') }]);
    await own.command('CONFIG SET maxmemory 64mb');
    const refusal = /allkeys-lru.*set maxmemory-policy to noeviction/;
    await expect(openOn(own)).rejects.toThrow(refusal);
    await own.command('CLIENT KILL TYPE normal');
    const told = { level: 'error', message: expect.stringMatching(refusal) };
    await expect.poll(() => a.notices.at(-1)).toMatchObject(told);
    await expect(put(a.store)).rejects.toThrow(refusal);
    expect(a.notices.filter(({ level }) => level === 'error')).toHaveLength(1);
  });

  test('without memory refuses to store, and still gives what it has', async () => {
    await using own = await RedisServer.start();
    await using a = await openOn(own);
    await put(a.store);
    await own.command('CONFIG SET maxmemory 1');
    await expect(put(a.store)).rejects.toMatchObject({
      reason: 'STORE_UNAVAILABLE',
      message: 'the valkey server has no memory left',
    });
    expect((await a.store.take(takeCall())).kind).toBe('taken');
    expect(a.notices).toEqual([]);
  });

  test('forgets everything in time', async () => {
    const prefix = nextPrefix();
    await using a = await opened({ prefix });
    a.store.onChange(() => {});
    for (const conversationId of ['a', 'b', 'c', 'd']) await put(a.store, { key: { conversationId } });
    const of = (conversationId: string) => ({ key: { ...KEY, conversationId } });
    const taken = await a.store.take(takeCall(of('a')));
    if (taken.kind === 'taken') await a.store.commit(taken.taken.claimId, () => true);
    await a.store.take(takeCall({ ...of('b'), prove: proofOf(ids(300, 5000)) }));
    const id = callId();
    await a.store.takeForRelease({ id, instanceId: 'd', max: 1, queuedOnly: false, deadlineMs: 1000 });
    await a.store.take(takeCall(of('d')));
    const script = `local n,p=0,{} for _,k in ipairs(redis.call('KEYS','{${prefix}}:*')) do n=n+1 if redis.call('TTL',k)<0 then p[#p+1]=k end end return n..' '..table.concat(p,' ')`;
    const [count = '', ...forever] = (await redis.command(`EVAL "${script}" 0`)).split('\r\n')[1]!.split(' ');
    expect(Number(count)).toBeGreaterThan(20);
    expect(forever.filter((name) => name !== '')).toEqual([]);
  });
});

/** Why a store does not open; one that does, because its server was slow to answer, is closed. */
function refusalOf(opening: ReturnType<typeof openOn>): Promise<string> {
  return opening.then(
    async (late) => {
      await late[Symbol.asyncDispose]();
      return '';
    },
    (error: unknown) => String(error),
  );
}

/** A server that says this of itself and knows nothing else. */
function oldServer(info: string) {
  return serverOf((socket, data) => {
    const text = `# Server\r\n${info}\r\n`;
    const isInfo = /info/i.test(data);
    socket.write(isInfo ? `$${Buffer.byteLength(text)}\r\n${text}\r\n` : '-ERR unknown command\r\n');
  });
}

/** A server that answers so. */
async function serverOf(answer: (socket: Socket, data: string) => void) {
  const server = createServer((socket) => {
    socket.on('error', () => {});
    socket.on('data', (data) => answer(socket, String(data)));
  }).listen(0, '127.0.0.1');
  await once(server, 'listening');
  const address = server.address();
  if (address === null || typeof address === 'string') throw new Error('no port');
  return {
    url: `redis://127.0.0.1:${address.port}`,
    [Symbol.asyncDispose]: async () => void server.close(),
  };
}
