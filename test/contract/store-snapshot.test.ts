import {
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  statSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { durationFromMs } from '@bufbuild/protobuf/wkt';
import { afterEach, beforeEach, describe, expect, test, vi } from 'vitest';
import { MissReason } from '../../gen/baton/v1/kv_cache_store_pb.ts';
import { buildChain } from '../../src/core/chain.ts';
import { connectRemote } from '../../src/rpc/clients.ts';
import { sha256 } from '../../src/services/sha256.ts';
import { openMemoryStore } from '../../src/stores/memory.ts';
import type { KvStore, StoreNotice, TakeResult } from '../../src/stores/store.ts';
import { startBatonProcess } from '../support/baton-process.ts';
import { callId, type EntryParts, ids, KEY, limits, newEntry, proofOf } from '../support/kv-store.ts';

let folder: string;
let file: string;
beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), 'baton-snapshot-'));
  file = join(folder, 'store');
});
afterEach(() => {
  vi.useRealTimers();
  rmSync(folder, { recursive: true });
});

async function open(now = () => 0) {
  const notices: StoreNotice[] = [];
  const store = await openMemoryStore({
    now,
    limits: limits(),
    snapshotFile: file,
    onNotice: (notice) => notices.push(notice),
  });
  return { store, notices, close: () => store[Symbol.asyncDispose]() };
}

const put = (store: KvStore, parts: EntryParts = {}) =>
  store.put({ id: callId(), entry: newEntry(parts), derivedKey: false });
const take = (store: KvStore, conversationId = 'c'): Promise<TakeResult> =>
  store.take({
    id: callId(),
    key: { ...KEY, conversationId },
    prove: proofOf(ids(300)),
    minTokens: 64,
    compatGroup: '',
    deadlineMs: 60_000,
  });

describe('a snapshot', () => {
  test('keeps what is idle, whole, and its time runs on', async () => {
    vi.useFakeTimers({ toFake: ['Date'] });
    let now = 0;
    const first = await open(() => now);
    await put(first.store, { handle: Uint8Array.of(9, 8, 7), compatGroup: 'group', afterHit: true });
    await put(first.store, { key: { conversationId: 'claimed' } });
    await put(first.store, { key: { conversationId: 'short' }, ttlMs: 20_000 });
    await put(first.store, { key: { conversationId: 'bare' }, tokens: null });
    await take(first.store, 'claimed');
    now += 10_000;
    await first.close();
    expect(statSync(file).mode & 0o777).toBe(0o600);
    vi.setSystemTime(Date.now() + 15_000);
    const second = await open(() => now);
    expect(readdirSync(folder)).toEqual(['store.lock']);
    expect(second.notices).toMatchObject([{ level: 'info', fields: { entries: 2 } }]);
    const { entries } = await second.store.list({ filter: {}, after: undefined, size: 10 });
    expect(entries).toMatchObject([
      {
        key: KEY,
        ageMs: 25_000,
        remainingMs: 425_000,
        owner: { compatGroup: 'group' },
        claimed: false,
        hasChain: true,
        afterHit: true,
      },
      { key: { conversationId: 'bare' }, hasChain: false },
    ]);
    const result = await take(second.store);
    expect(result).toMatchObject({ kind: 'taken', taken: { matchedTokens: 200, handle: Uint8Array.of(9, 8, 7) } });
    expect(await take(second.store, 'claimed')).toMatchObject({ reason: MissReason.NEVER_STORED });
    await second.close();
  });

  test('is used up by the start: what is killed then has nothing', async () => {
    const first = await open();
    await put(first.store);
    await first.close();
    await open();
    expect(existsSync(file)).toBe(false);
    // The process is killed here; its lock is one of a process that is gone.
    writeFileSync(`${file}.lock`, '999999999 x');
    const third = await open();
    expect(third.notices).toEqual([]);
    expect(await take(third.store)).toMatchObject({ kind: 'miss' });
    await third.close();
  });

  test('is not read after a kill in the middle of the start', async () => {
    const first = await open();
    await put(first.store);
    await first.close();
    writeFileSync(`${file}.taken`, readFileSync(file));
    rmSync(file);
    const second = await open();
    expect(await take(second.store)).toMatchObject({ kind: 'miss' });
    expect(existsSync(`${file}.taken`)).toBe(false);
    await second.close();
  });

  test.each([
    ['a flipped bit', (bytes: Buffer) => bytes.fill((bytes[200] ?? 0) ^ 1, 200, 201), 'is damaged'],
    ['a lost end', (bytes: Buffer) => bytes.subarray(0, bytes.length - 1), 'is damaged'],
    [
      'another version',
      (bytes: Buffer) => Buffer.from(bytes.toString('latin1').replace('-1\n', '-2\n'), 'latin1'),
      'version',
    ],
  ])('with %s is lost, and the store starts', async (_, change, why) => {
    const first = await open();
    await put(first.store);
    await first.close();
    writeFileSync(file, change(readFileSync(file)));
    const second = await open();
    expect(second.notices).toMatchObject([{ level: 'warn', message: expect.stringContaining(why) }]);
    expect((await second.store.stats({})).entries).toBe(0);
    await second.close();
  });

  test('is never made of what is somebody else’s: that stays as it is', async () => {
    writeFileSync(file, 'a letter');
    await expect(open()).rejects.toThrow(/is not one that a store wrote; name a file for the store alone/);
    expect(readFileSync(file, 'utf8')).toBe('a letter');
    rmSync(file);
    mkdirSync(file);
    await expect(open()).rejects.toThrow(/is a directory; name a file/);
    expect(readdirSync(folder)).toEqual(['store']);
    rmSync(file, { recursive: true });
    writeFileSync(file, '');
    const store = await open();
    await put(store.store);
    await store.close();
    expect(readFileSync(file, 'latin1').slice(0, 12)).toBe('baton-store-');
  });

  test('of a time to come is lost', async () => {
    vi.useFakeTimers({ toFake: ['Date'] });
    const first = await open();
    await put(first.store);
    await first.close();
    vi.setSystemTime(Date.now() - 1);
    const second = await open();
    expect(second.notices).toMatchObject([{ level: 'warn', message: expect.stringContaining('clock') }]);
    await second.close();
  });

  test('belongs to one process', async () => {
    const first = await open();
    await expect(open()).rejects.toThrow(/is used by another process .* give each store a file of its own/);
    await first.close();
    await (await open()).close();
  });
});

// Three processes one after the other, which takes long on a busy machine.
const LONG = { timeout: 60_000 };

test('a store process keeps its entries over a stop, and after a kill every earlier key is a miss', LONG, async () => {
  const start = () => startBatonProcess(['--roles', 'kvstore', '--store-snapshot', file, '--admin-port', 'off']);
  const key = (conversationId: string) => ({ tenant: 't', model: 'm', conversationId });
  const seed = { model: 'm', adapter: '', cacheSalt: '' };
  const names = ['a', 'b', 'c'];
  const first = await start();
  using one = connectRemote({ url: `http://${first.rpc}` });
  for (const name of names) {
    await one.kvCacheStore.putEntry({
      idempotencyKey: name,
      key: key(name),
      owner: { instanceId: 'd', engineId: 'e', incarnation: { engineId: 'e' } },
      connector: 'nixl',
      handle: {},
      storedTokens: 200,
      chain: buildChain(ids(200), seed, sha256),
      engineBlockSize: 16,
      remainingTtl: durationFromMs(450_000),
    });
  }
  expect(await first.end('SIGTERM')).toBe(0);
  const second = await start();
  await expect(start()).rejects.toThrow(/is used by another process .* \(--store-snapshot\)/);
  using two = connectRemote({ url: `http://${second.rpc}` });
  const takeFrom = async (remote: typeof one, name: string) => {
    const prompt = { case: 'tokenIds' as const, value: { tokenIds: ids(300) } };
    const { result } = await remote.kvCacheStore.takeEntry({ idempotencyKey: `take ${name}`, key: key(name), prompt });
    return result.case;
  };
  expect(await takeFrom(two, 'a')).toBe('taken');
  await second.end('SIGKILL');
  await using third = await start();
  using three = connectRemote({ url: `http://${third.rpc}` });
  for (const name of names) expect(await takeFrom(three, name), name).toBe('miss');
});
