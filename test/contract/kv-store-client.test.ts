import { afterEach, beforeEach, describe, expect, test } from 'vitest';
import { type Claim, connectKvStore, type KvStoreClient, type Missed } from '../../src/client/kv-store-client.ts';
import { startRpcListener } from '../../src/rpc/listener.ts';
import { EVERYTHING, KvCacheStoreService } from '../../src/services/kv-cache-store.ts';
import { openMemoryStore } from '../../src/stores/memory.ts';
import { ids, limits } from '../support/kv-store.ts';
import { type Switchboard, startSwitchboard } from '../support/switchboard.ts';

const KEY = { tenant: 't', model: 'm', conversationId: 'c' };
const HANDLE = JSON.stringify({
  do_remote_prefill: false,
  do_remote_decode: true,
  remote_block_ids: [ids(13)],
  remote_engine_id: 'e_dp0',
  remote_request_id: 'r',
  remote_host: '10.0.0.2',
  remote_port: 5601,
  remote_num_tokens: 200,
});
const OWNER = { instanceId: 'd', engineId: 'e_dp0', incarnation: { engineId: 'e' } };

let stack: AsyncDisposableStack;
let board: Switchboard;
let target: string;
let client: KvStoreClient;

beforeEach(async () => {
  stack = new AsyncDisposableStack();
  const store = stack.use(await openMemoryStore({ now: () => performance.now(), limits: limits() }));
  const service = new KvCacheStoreService({ store, callerOf: () => EVERYTHING });
  const listener = await startRpcListener({
    host: '127.0.0.1',
    port: 0,
    services: { kvCacheStore: service },
    callerOf: () => EVERYTHING,
    onFault: () => undefined,
  });
  stack.defer(() => listener.close(0));
  target = `127.0.0.1:${listener.port}`;
  board = stack.use(await startSwitchboard([target]));
  client = stack.use(connectKvStore({ url: `http://${board.address}`, budgetMs: 2000, breaker: { openMs: 50 } }));
});
afterEach(() => stack.disposeAsync());

const put = () => client.put({ key: KEY, owner: OWNER, handle: HANDLE, tokenIds: ids(201), blockSize: 16 });
const take = (prompt = ids(300)) => client.take({ key: KEY, promptTokenIds: prompt });
const claimOf = (result: Claim | Missed): Claim => {
  if (result.kind === 'miss') throw new Error(result.reason);
  return result;
};

test('gives a handle back as the engine wrote it, once', async () => {
  expect(await put()).toMatchObject({ kind: 'stored' });
  {
    await using claim = claimOf(await take());
    expect(claim.handle).toBe(HANDLE);
    expect(claim.matchedTokens).toBe(200);
    expect(await take()).toEqual({ kind: 'miss', reason: 'taken' });
  }
  // The scope ended without a word: the handle counts as used.
  expect(await take()).toEqual({ kind: 'miss', reason: 'taken' });
});

test('cuts a handle to the blocks that are equal, count and list', async () => {
  await put();
  const claim = claimOf(await take([...ids(100), ...ids(100, 5000)]));
  expect(JSON.parse(claim.handle)).toMatchObject({ remote_num_tokens: 64, remote_block_ids: [ids(4)] });
});

test('puts back what no engine has seen, and that only once', async () => {
  await put();
  const claim = claimOf(await take());
  await claim.release('not_sent');
  await claim.commit();
  const again = claimOf(await take());
  await again.commit();
  await again.release('not_sent');
  expect(await take()).toEqual({ kind: 'miss', reason: 'taken' });
});

test('says why there is nothing', async () => {
  expect(await take()).toEqual({ kind: 'miss', reason: 'never_stored' });
  await put();
  expect(await take(ids(300, 7000))).toEqual({ kind: 'miss', reason: 'prefix_mismatch' });
});

test('tells the caller of his own mistakes', async () => {
  await expect(client.take({ key: { ...KEY, model: '' }, promptTokenIds: [1] })).rejects.toThrow(/model is required/);
  await expect(client.put({ key: KEY, owner: OWNER, handle: '{"a":1}', tokenIds: [1], blockSize: 16 })).rejects.toThrow(
    /no remote_num_tokens/,
  );
});

describe('a store that is away', () => {
  test('is a miss and stores nothing, is left alone for a while, and is found again', async () => {
    await put();
    board.targets = [];
    board.cut();
    const misses = await Promise.all(Array.from({ length: 20 }, () => take()));
    expect(new Set(misses.map((miss) => miss.kind === 'miss' && miss.reason))).toEqual(new Set(['store_unavailable']));
    expect(await put()).toEqual({ kind: 'not_stored', reason: 'store_unavailable' });
    board.targets = [target];
    await expect.poll(async () => (await take()).kind, { timeout: 10_000 }).toBe('taken');
  });

  test('a take whose answer is lost is given back: the next one gets the handle', async () => {
    await put();
    const impatient = stack.use(connectKvStore({ url: `http://${target}`, budgetMs: 1 }));
    // A budget that is over before the answer is there; whichever of them got it, it comes back.
    const results = await Promise.all(
      Array.from({ length: 8 }, () => impatient.take({ key: KEY, promptTokenIds: ids(200_000) })),
    );
    for (const result of results) if (result.kind === 'taken') await result.release('not_sent');
    expect(results.some((result) => result.kind === 'miss')).toBe(true);
    await expect.poll(async () => (await take()).kind, { timeout: 10_000 }).toBe('taken');
  });
});
