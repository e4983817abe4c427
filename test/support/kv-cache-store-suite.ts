import { equals } from '@bufbuild/protobuf';
import { durationMs } from '@bufbuild/protobuf/wkt';
import { describe, expect, test } from 'vitest';
import { MissReason } from '../../gen/baton/v1/kv_cache_store_pb.ts';
import { type KvTransferParams, KvTransferParamsSchema } from '../../gen/baton/v1/kv_transfer_pb.ts';
import { sharedBackends } from './store-backends.ts';
import { handle, refusal } from './store-messages.ts';
import { testStoreOnTheWire } from './store-wire-suite.ts';
import { callerFor, type LocalOptions, openLocalWorld, type StoreCase, type StoreWorld } from './store-world.ts';

/** What the KVCacheStore promises, for each of these. */
export function testKvCacheStore(cases: readonly StoreCase[]): void {
  const backends = sharedBackends();

  describe.each(cases)('$backend, $name', (storeCase) => {
    const opened = (context: Parameters<typeof openLocalWorld>[2], options: LocalOptions = {}) =>
      openLocalWorld(backends(), storeCase, context, {
        limits: { chainDigests: 4, promptTokens: 400 },
        ...options,
      });

    testStoreOnTheWire(opened);

    test('tells durations as they are at the moment of the call', async (context) => {
      await using run = await opened(context);
      await run.client.putEntry(run.putRequest());
      run.time.now = 1500.75;
      const { result } = await run.client.takeEntry(run.takeRequest());
      if (result.case !== 'taken') throw new Error('a miss');
      const { entry, claimRemaining } = result.value;
      expect(claimRemaining && durationMs(claimRemaining)).toBe(120_000);
      // A server's clock has whole milliseconds.
      expect([448_499, 448_500]).toContain(entry?.remainingTtl && durationMs(entry.remainingTtl));
      expect(entry?.age && durationMs(entry.age)).toBe(1500);
    });

    test('keeps what was put, whatever happens to the message afterwards', async (context) => {
      await using run = await opened(context);
      const request = run.putRequest();
      await run.client.putEntry(request);
      if (request.handle !== undefined) request.handle.remoteNumTokens = 1;
      request.handle?.remoteBlockIds?.groups.pop();
      request.chain?.digests.forEach((digest) => void digest.fill(0));
      const take = run.takeRequest();
      const first = await givenHandle(run, take);
      expect(equals(KvTransferParamsSchema, first, handle())).toBe(true);
      first.remoteNumTokens = 2;
      expect(equals(KvTransferParamsSchema, await givenHandle(run, take), handle())).toBe(true);
    });

    test('names tenants by their credentials, whose calls have keys of their own', async (context) => {
      await using run = await opened(context);
      const put = run.putRequest();
      expect((await run.client.putEntry(put)).entry?.key?.tenant).toBe('t');
      const other = callerFor(context, run, 'other');
      expect(
        (await run.client.putEntry({ ...put, storedTokens: 199, handle: handle(199) }, other)).entry?.key?.tenant,
      ).toBe('u');
      expect(await run.client.getStats({})).toMatchObject({ entries: 1, puts: 1n });
      expect(await run.client.getStats({}, other)).toMatchObject({ entries: 1, puts: 1n });
    });

    test('tells the limits in force', async (context) => {
      await using run = await opened(context);
      expect((await run.client.getStats({})).limits).toMatchObject({
        entryBytes: 4_194_304,
        chainDigests: 4,
        promptTokens: 400,
        entriesPerKey: 8,
        entriesPerDerivedKey: 64,
        tenantEntries: 100_000,
        tenantBytes: 268_435_456n,
        totalBytes: 1_073_741_824n,
        tenantWatches: 64,
      });
    });

    test('counts, and tells of releases', async (context) => {
      await using run = await opened(context);
      const { instanceId } = run.names;
      const heard: [string, number][] = [];
      run.service.onReleasable((owner, queued) => void heard.push([owner, queued]));
      const { entry } = await run.client.putEntry(run.putRequest());
      await run.client.putEntry(run.putRequest());
      await run.client.deleteEntry({ idempotencyKey: 'k', entryId: entry?.entryId ?? '' });
      expect(heard).toEqual([[instanceId, 1]]);
      await run.client.takeEntry(run.takeRequest());
      const stats = await run.client.getStats({});
      expect(stats).toMatchObject({ entries: 1, claims: 1, releaseQueue: 1, puts: 2n, takes: 1n, watches: 0 });
      expect(await run.service.readStats()).toMatchObject({ entries: 1, runId: stats.runId });
    });

    test('is switched off for a tenant', async (context) => {
      await using run = await opened(context, { isEnabled: (tenant) => tenant !== 'u' });
      const off = callerFor(context, run, 'other');
      expect((await run.client.takeEntry(run.takeRequest(), off)).result.value).toMatchObject({
        reason: MissReason.DISABLED,
      });
      const look = await run.client.getEntry({ selector: { case: 'key', value: run.names.key } }, off);
      expect(look.miss?.reason).toBe(MissReason.DISABLED);
      expect(await refusal(run.client.putEntry(run.putRequest(), off))).toMatchObject({ reason: 'QUOTA_EXCEEDED' });
      await run.client.putEntry(run.putRequest());
    });
  });
}

/** The handle of a take that must give one. */
async function givenHandle(
  run: Pick<StoreWorld, 'client'>,
  take: ReturnType<StoreWorld['takeRequest']>,
): Promise<KvTransferParams> {
  const { result } = await run.client.takeEntry(take);
  if (result.case !== 'taken' || result.value.handle === undefined) throw new Error('a miss');
  return result.value.handle;
}
