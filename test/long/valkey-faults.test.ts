import { mkdtemp, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { Code } from '@connectrpc/connect';
import { beforeEach, describe, expect, test } from 'vitest';
import { MissReason } from '../../gen/baton/v1/kv_cache_store_pb.ts';
import { EVERYTHING, KvCacheStoreService } from '../../src/services/kv-cache-store.ts';
import { freePort } from '../support/free-port.ts';
import { KEY } from '../support/kv-store.ts';
import { needsRedis, RedisServer } from '../support/redis.ts';
import { openDirect } from '../support/rpc-bindings.ts';
import { TLS_FOLDER } from '../support/tls.ts';
import { miss, nextPrefix, openOn, put, SLOW, takeCall, takenOnceBack } from '../support/valkey.ts';

beforeEach((context) => needsRedis(context));

describe('the server of a valkey store', () => {
  test('restarted from its own file: nothing of before is given, and it is known why', async () => {
    await using own = await RedisServer.start(['--appendonly', 'yes', '--appendfsync', 'always']);
    await using a = await openOn(own);
    await put(a.store);
    await put(a.store, { key: { conversationId: 'other' } });
    const before = await a.store.take(takeCall());
    const { runId } = a.store;
    const changes: string[] = [];
    a.store.onChange(({ kind }) => void changes.push(kind));
    await own.kill();
    await expect(a.store.take(takeCall())).rejects.toMatchObject({ reason: 'STORE_UNAVAILABLE', code: 'unavailable' });
    await own.restart();
    expect(await takenOnceBack(a.store)).toEqual(miss(MissReason.STORE_EPOCH));
    expect(a.store.runId).not.toBe(runId);
    expect(before.kind).toBe('taken');
    if (before.kind === 'taken') {
      await expect(a.store.release(before.taken.claimId, () => true)).rejects.toMatchObject({
        reason: 'CLAIM_NOT_FOUND',
      });
      const selector = { kind: 'entry' as const, entryId: before.taken.entry.entryId, tenant: 't' };
      expect(await a.store.get(selector)).toEqual({ entries: [], miss: MissReason.STORE_EPOCH });
    }
    await put(a.store);
    expect((await a.store.take(takeCall())).kind).toBe('taken');
    expect(changes).toContain('gap');
    // The old entries' space is freed; that there were some is still known.
    await expect.poll(() => own.command(`EVAL "return #redis.call('KEYS','*:e:e-${runId}-*')" 0`)).toBe(':0\r\n');
    const other = takeCall({ key: { ...KEY, conversationId: 'other' } });
    expect(await a.store.take(other)).toEqual(miss(MissReason.STORE_EPOCH));
    expect(a.notices.map(({ level }) => level)).toEqual(['warn', 'warn', 'info']);
  });

  test('a replica that is promoted, and the old primary promoted again, give nothing of before', async () => {
    await using first = await RedisServer.start(['--repl-diskless-sync-delay', '0']);
    await using second = await RedisServer.start();
    await second.command(`REPLICAOF 127.0.0.1 ${first.port}`);
    await expect.poll(() => second.command('INFO replication'), SLOW).toContain('master_link_status:up');
    const prefix = nextPrefix();
    await using a = await openOn(first, { prefix });
    await put(a.store);
    const only = async (part: string, server: RedisServer) =>
      expect.poll(() => server.command(`EVAL "return #redis.call('KEYS','${part}')" 0`)).toBe(':1\r\n');
    await only('*:e:e-*', second);
    await second.command('REPLICAOF NO ONE');
    {
      await using b = await openOn(second, { prefix });
      expect(await b.store.take(takeCall())).toEqual(miss(MissReason.STORE_EPOCH));
    }
    // Behind the partition the old primary is right to give it.
    const taken = await a.store.take(takeCall());
    expect(taken.kind).toBe('taken');
    // It comes back with the other's data, where the entry was never taken, and is promoted again: same process.
    await second.command('FLUSHALL');
    await first.command(`REPLICAOF 127.0.0.1 ${second.port}`);
    await expect.poll(() => first.command('INFO replication'), SLOW).toContain('master_link_status:up');
    await expect(a.store.take(takeCall())).rejects.toMatchObject({ reason: 'STORE_UNAVAILABLE' });
    await first.command('REPLICAOF NO ONE');
    expect((await takenOnceBack(a.store)).kind).toBe('miss');
    await put(a.store);
    expect((await a.store.take(takeCall())).kind).toBe('taken');
  });

  test('paused: calls are answered in time, and work again by themselves', async () => {
    await using own = await RedisServer.start();
    await using a = await openOn(own);
    await put(a.store);
    own.signal('SIGSTOP');
    const refused = { reason: 'STORE_UNAVAILABLE' };
    await expect(a.store.take(takeCall())).rejects.toMatchObject(refused);
    // From then on at once.
    const calls = Array.from({ length: 100 }, () => a.store.take(takeCall()));
    for (const call of calls) await expect(call).rejects.toMatchObject(refused);
    own.signal('SIGCONT');
    expect((await takenOnceBack(a.store)).kind).toBe('taken');
    expect(a.notices.map(({ level }) => level)).toEqual(['warn', 'info']);
  });

  test('away at the start: the store opens, and works when it comes', async () => {
    await using own = await RedisServer.start();
    await own.kill();
    await using a = await openOn(own);
    await expect(put(a.store)).rejects.toMatchObject({ reason: 'STORE_UNAVAILABLE' });
    await own.restart();
    expect(await takenOnceBack(a.store)).toEqual(miss(MissReason.NEVER_STORED));
    await put(a.store);
    expect(a.notices.map(({ level }) => level)).toEqual(['warn', 'info']);
  });

  test('wants a password, from the URL or a file, which nothing shows', async () => {
    await using own = await RedisServer.start(['--requirepass', 'sesame-1']);
    await using good = await openOn(own, { url: own.url.replace('//', '//:sesame-1@') });
    await put(good.store);
    const dir = await mkdtemp(join(tmpdir(), 'baton-valkey-'));
    const passwordFile = join(dir, 'password');
    await writeFile(passwordFile, 'sesame-1\n');
    await using file = await openOn(own, { passwordFile });
    await put(file.store);
    await writeFile(passwordFile, 'sesame-2\n');
    const wrong: readonly [Parameters<typeof openOn>[1], RegExp][] = [
      // Of the refused password, or of the first call behind it.
      [{ url: own.url.replace('//', '//:sesame-2@') }, /^(WRONGPASS|NOAUTH): .*correct them in store\.valkey\.url \(/],
      [{ passwordFile }, /^(WRONGPASS|NOAUTH): .*the right one into the file that store\.valkey\.password_file names/],
      [{}, /^NOAUTH: .*wants a password; .*name that with store\.valkey\.password_file/],
    ];
    for (const [settings, cause] of wrong) {
      await using bad = await openOn(own, settings);
      const error: unknown = await put(bad.store).catch((refusal: unknown) => refusal);
      expect(error).toMatchObject({ reason: 'STORE_UNAVAILABLE' });
      expect(bad.notices).toMatchObject([{ level: 'warn', fields: { cause: expect.stringMatching(cause) } }]);
      expect(JSON.stringify([error, String(error), bad.notices])).not.toContain('sesame');
    }
    await rm(dir, { recursive: true });
  });

  test('may be a cluster', async () => {
    // Its other port would be among those that the system gives to connections.
    const bus = ['--cluster-port', String(await freePort())];
    await using own = await RedisServer.start([
      '--cluster-enabled',
      'yes',
      '--cluster-announce-ip',
      '127.0.0.1',
      ...bus,
    ]);
    await own.command('CLUSTER ADDSLOTSRANGE 0 16383');
    await expect.poll(() => own.command('CLUSTER INFO'), SLOW).toContain('cluster_state:ok');
    await using a = await openOn(own, { cluster: true });
    await put(a.store);
    const taken = await a.store.take(takeCall());
    expect(taken.kind).toBe('taken');
    if (taken.kind === 'taken') await a.store.commit(taken.taken.claimId, () => true);
    expect(await a.store.stats({})).toMatchObject({ entries: 0, puts: 1, takes: 1 });
  });

  test('restarted under a watch: it begins anew and goes on, also one that was opened while the server was away', async () => {
    await using own = await RedisServer.start();
    await using a = await openOn(own);
    using service = new KvCacheStoreService({ store: a.store, callerOf: () => EVERYTHING });
    await using bound = await openDirect({ kvCacheStore: service });
    const seen: string[] = [];
    const watch = async () => {
      for await (const { event } of bound.kvCacheStore.watchEntries({})) {
        seen.push(event.case === 'upserted' ? (event.value.key?.conversationId ?? '') : (event.case ?? ''));
      }
    };
    await own.kill();
    await expect(watch()).rejects.toMatchObject({ code: Code.Unavailable });
    await own.restart();
    await takenOnceBack(a.store);
    const watching = watch().catch(() => {});
    await expect.poll(() => seen).toContain('snapshotComplete');
    await put(a.store, { key: { conversationId: 'before' } });
    await expect.poll(() => seen.at(-1)).toBe('before');
    await own.kill();
    await own.restart();
    await takenOnceBack(a.store);
    await put(a.store, { key: { conversationId: 'after' } });
    await expect.poll(() => seen.at(-1), SLOW).toBe('after');
    expect(seen.filter((word) => word !== 'checkpoint')).toContain('reset');
    expect(seen.slice(seen.indexOf('reset'))).not.toContain('before');
    service[Symbol.dispose]();
    await watching;
  });

  test('may speak TLS, and is checked', async () => {
    const file = (name: string) => join(TLS_FOLDER, name);
    const port = await freePort();
    const tls = [
      '--tls-port',
      String(port),
      '--tls-cert-file',
      file('server.pem'),
      '--tls-key-file',
      file('server.key'),
    ];
    await using own = await RedisServer.start([
      ...tls,
      '--tls-ca-cert-file',
      file('ca.pem'),
      '--tls-auth-clients',
      'no',
    ]);
    const url = `rediss://localhost:${port}`;
    await using a = await openOn(own, { url, caFile: file('ca.pem') });
    await put(a.store);
    expect((await a.store.take(takeCall())).kind).toBe('taken');
    await using unchecked = await openOn(own, { url });
    await expect(put(unchecked.store)).rejects.toMatchObject({ reason: 'STORE_UNAVAILABLE' });
  });

  test('may be the primary that sentinels name, and the one they name next', async () => {
    await using first = await RedisServer.start();
    await using second = await RedisServer.start();
    await second.command(`REPLICAOF 127.0.0.1 ${first.port}`);
    await expect.poll(() => second.command('INFO replication'), SLOW).toContain('master_link_status:up');
    await using sentinel = await RedisServer.startSentinel(first.port);
    await expect.poll(() => sentinel.command('SENTINEL REPLICAS mymaster'), SLOW).toContain(String(second.port));
    const sentinels = [`127.0.0.1:${sentinel.port}`];
    await using a = await openOn(first, { url: 'valkey://unused', sentinels, sentinelName: 'mymaster' });
    await put(a.store);
    await first.kill();
    await expect.poll(() => second.command('INFO replication'), { timeout: 40_000 }).toContain('role:master');
    expect((await takenOnceBack(a.store)).kind).toBe('miss');
    await put(a.store);
    expect((await a.store.take(takeCall())).kind).toBe('taken');
  }, 60_000);
});
