import { equals } from '@bufbuild/protobuf';
import { durationFromMs, durationMs } from '@bufbuild/protobuf/wkt';
import type { CallOptions } from '@connectrpc/connect';
import { expect, test } from 'vitest';
import { MissReason, type TakenEntry } from '../../gen/baton/v1/kv_cache_store_pb.ts';
import { KvTransferParamsSchema } from '../../gen/baton/v1/kv_transfer_pb.ts';
import { buildChain } from '../../src/core/chain.ts';
import { encodeKvTransferParams } from '../../src/core/kv-transfer.ts';
import { sha256 } from '../../src/services/sha256.ts';
import { FAULTY_CALLS } from './faulty-calls.ts';
import { ids } from './kv-store.ts';
import {
  callKey,
  handle,
  handleJson,
  type PutParts,
  reasonName,
  refusal,
  SEED,
  type TakeParts,
} from './store-messages.ts';
import { callerFor, listed, type OpenWorld, type StoreWorld } from './store-world.ts';

/** Stores an entry; resolves with its id and revision. */
async function stored(run: StoreWorld, rest: PutParts = {}, tokens = ids(200)) {
  const { entry, displacedEntryIds } = await run.client.putEntry(run.putRequest(rest, tokens));
  return { entryId: entry?.entryId ?? '', revision: entry?.revision ?? 0n, displacedEntryIds };
}

/** A take that must give something. */
async function taken(run: StoreWorld, rest: TakeParts = {}, prompt = ids(300)): Promise<TakenEntry> {
  const { result } = await run.client.takeEntry(run.takeRequest(rest, prompt));
  if (result.case !== 'taken') throw new Error(`a miss: ${result.value?.reason}`);
  return result.value;
}

/** Why a take gives nothing, with what it found equal. */
async function missed(run: StoreWorld, rest: TakeParts = {}, prompt = ids(300), options: CallOptions = {}) {
  const { result } = await run.client.takeEntry(run.takeRequest(rest, prompt), options);
  if (result.case !== 'miss') return result.case;
  const { reason, matchedTokens } = result.value;
  return matchedTokens === 0 ? reasonName(reason) : `${reasonName(reason)} ${matchedTokens}`;
}

/** What KVCacheStore promises to whoever sees nothing of the store but its port. */
export function testStoreOnTheWire(open: OpenWorld): void {
  test('gives a handle back as it was put, once', async (context) => {
    await using run = await open(context);
    const { names } = run;
    const { entry } = await run.client.putEntry(run.putRequest());
    expect(entry).toMatchObject({
      key: { model: 'm', conversationId: names.key.conversationId },
      owner: {
        instanceId: names.instanceId,
        engineId: 'e_dp0',
        incarnation: { engineId: 'e', generation: 1, processStartSeconds: 5 },
      },
      connector: 'nixl',
      storedTokens: 200,
      chainTokens: 200,
      cachedTokens: 200,
      engineBlockSize: 16,
      chainAlgorithm: 'c1',
      claimed: false,
    });
    await run.pass(100);
    const request = run.takeRequest();
    const { result } = await run.client.takeEntry(request);
    if (result.case !== 'taken') throw new Error('a miss');
    const { value } = result;
    expect(Buffer.from(encodeKvTransferParams(value.handle ?? handle())).toString()).toBe(handleJson());
    expect(value.handle && equals(KvTransferParamsSchema, value.handle, handle())).toBe(true);
    expect(value).toMatchObject({ matchedTokens: 200, entry: { claimed: true, entryId: entry?.entryId } });
    const remainingMs = durationMs(value.entry?.remainingTtl ?? durationFromMs(0));
    expect(remainingMs).toBeGreaterThan(400_000);
    expect(remainingMs).toBeLessThanOrEqual(449_900);
    expect(durationMs(value.entry?.age ?? durationFromMs(0))).toBeGreaterThanOrEqual(99);
    expect(durationMs(value.claimRemaining ?? durationFromMs(0))).toBeLessThanOrEqual(120_000);
    await run.client.commitClaim({ claimId: value.claimId });
    expect((await run.client.takeEntry(request)).result.value).toMatchObject({ claimId: value.claimId });
    expect(await missed(run)).toBe('TAKEN');
    expect(await refusal(run.client.releaseClaim({ claimId: value.claimId }))).toEqual({
      reason: 'CLAIM_SPENT',
      claim_id: value.claimId,
    });
  });

  test('gives each entry to one of many takers', async (context) => {
    await using run = await open(context);
    const put = new Set<string>();
    for (let index = 0; index < 8; index++) put.add((await stored(run)).entryId);
    const takes = Array.from({ length: 24 }, () => run.client.takeEntry(run.takeRequest()));
    const results = (await Promise.all(takes)).map(({ result }) => result);
    const given = results.flatMap((result) => (result.case === 'taken' ? [result.value.entry?.entryId] : []));
    expect(given).toHaveLength(8);
    expect(new Set(given)).toEqual(put);
    const misses = results.flatMap((result) => (result.case === 'miss' ? [result.value.reason] : []));
    expect(misses).toEqual(Array(16).fill(MissReason.TAKEN));
  });

  test('puts a claim back that is released, and only one that is open', async (context) => {
    await using run = await open(context);
    const { entryId } = await stored(run);
    const first = await taken(run);
    const { entry } = await run.client.releaseClaim({ claimId: first.claimId, reason: 'not_sent' });
    expect(entry).toMatchObject({ entryId, claimed: false });
    expect(entry?.revision).toBeGreaterThan(first.entry?.revision ?? 0n);
    const second = await taken(run);
    expect([second.entry?.entryId, second.claimId === first.claimId]).toEqual([entryId, false]);
    // The first claim gives no right to end the second.
    expect((await run.client.releaseClaim({ claimId: first.claimId })).entry).toBeUndefined();
    expect(await refusal(run.client.commitClaim({ claimId: first.claimId }))).toMatchObject({
      reason: 'CLAIM_NOT_FOUND',
    });
    expect(await missed(run)).toBe('TAKEN');
    expect(await refusal(run.client.commitClaim({ claimId: 'nobody' }))).toEqual({
      reason: 'CLAIM_NOT_FOUND',
      claim_id: 'nobody',
    });
  });

  test('lets time end entries and claims', async (context) => {
    await using run = await open(context);
    await stored(run, { remainingTtl: durationFromMs(1000) });
    const { claimId } = await taken(run);
    await run.client.releaseClaim({ claimId });
    await run.pass(1000);
    expect(await missed(run)).toBe('EXPIRED');
    await stored(run);
    const late = await taken(run, { claimDeadline: durationFromMs(1000) });
    await run.pass(1000);
    expect(await refusal(run.client.releaseClaim({ claimId: late.claimId }))).toMatchObject({ reason: 'CLAIM_SPENT' });
    expect(await missed(run)).toBe('TAKEN');
  });

  test('gives the longest proven prefix, and a part where that is all', async (context) => {
    await using run = await open(context);
    expect(await missed(run)).toBe('NEVER_STORED');
    const short = await stored(run, {}, ids(128));
    const long = await stored(run);
    await stored(run, {}, ids(200, 5000));
    expect(await taken(run)).toMatchObject({ matchedTokens: 200, entry: { entryId: long.entryId } });
    expect(await taken(run)).toMatchObject({ matchedTokens: 128, entry: { entryId: short.entryId } });
    await stored(run, {}, [...ids(100), ...ids(100, 7000)]);
    expect(await taken(run)).toMatchObject({ matchedTokens: 64, entry: { storedTokens: 200 } });
    // Never more than the handle names, nor than the chain covers.
    await stored(run, { storedTokens: 199 });
    expect((await taken(run)).matchedTokens).toBe(199);
    await stored(run, { storedTokens: 205 });
    expect((await taken(run)).matchedTokens).toBe(200);
  });

  test('frees what was compared and differs, and leaves what is small', async (context) => {
    await using run = await open(context);
    await stored(run);
    expect(await missed(run, { minTokens: 191 }, ids(190))).toBe('PREFIX_MISMATCH 128');
    expect(await missed(run, { minTokens: 191 })).toBe('RELEASED');
    await stored(run, {}, ids(50));
    expect(await missed(run)).toBe('TOO_SMALL');
    expect((await taken(run, { minTokens: 50 })).matchedTokens).toBe(50);
  });

  test('proves a chain with the raw block that GetEntry tells of', async (context) => {
    await using run = await open(context);
    await run.client.putEntry(run.putRequest({ storedTokens: 205 }));
    const { entries } = await run.client.getEntry({ selector: { case: 'key', value: run.names.key } });
    expect(entries.map(({ cachedTokens }) => cachedTokens)).toEqual([200]);
    const prompt = ids(300);
    const chain = buildChain(prompt, SEED, sha256);
    const block = Math.floor(200 / 64);
    const rawBlocks = [{ index: block, tokenIds: prompt.slice(block * 64, block * 64 + 64) }];
    expect(await taken(run, { prompt: { case: 'promptChain', value: { chain, rawBlocks } } })).toMatchObject({
      matchedTokens: 200,
    });
    await run.client.putEntry(run.putRequest());
    expect(await taken(run, { prompt: { case: 'promptChain', value: { chain, rawBlocks: [] } } })).toMatchObject({
      matchedTokens: 192,
    });
  });

  test('asks for a prompt', async (context) => {
    await using run = await open(context);
    await run.client.putEntry(run.putRequest());
    const bare = { idempotencyKey: callKey(), key: run.names.key };
    expect(await refusal(run.client.takeEntry(bare))).toEqual({ reason: 'PROMPT_REQUIRED' });
    expect(await refusal(run.client.takeEntry({ ...bare, allowUnverified: true }))).toEqual({
      reason: 'UNVERIFIED_NOT_PERMITTED',
    });
    expect((await taken(run)).matchedTokens).toBe(200);
  });

  test('goes without a prompt where the credential permits it, and proves one all the same', async (context) => {
    await using run = await open(context);
    const unverified = callerFor(context, run, 'unverified');
    await run.client.putEntry(run.putRequest(), unverified);
    expect(await missed(run, { allowUnverified: true }, ids(300, 9000), unverified)).toBe('PREFIX_MISMATCH');
    await run.client.putEntry(run.putRequest({ chain: undefined }), unverified);
    const bare = { idempotencyKey: callKey(), key: run.names.key, allowUnverified: true };
    const { result } = await run.client.takeEntry(bare, unverified);
    expect(result.value).toMatchObject({ matchedTokens: 0, entry: { chainTokens: 0, chainAlgorithm: '' } });
  });

  test('keeps tenants apart', async (context) => {
    await using run = await open(context);
    const other = callerFor(context, run, 'other');
    const router = callerFor(context, run, 'router');
    const { entry } = await run.client.putEntry(run.putRequest());
    const tenant = entry?.key?.tenant ?? '';
    const foreign = { key: { ...run.names.key, tenant } };
    const forbidden = { reason: 'TENANT_FORBIDDEN', tenant };
    expect(await refusal(run.client.takeEntry(run.takeRequest(foreign), other))).toEqual(forbidden);
    expect(await refusal(run.client.putEntry(run.putRequest(foreign), other))).toEqual(forbidden);
    expect(await refusal(run.client.listEntries({ filter: { tenant } }, other))).toEqual(forbidden);
    const selector = { case: 'entryId' as const, value: entry?.entryId ?? '' };
    expect((await run.client.getEntry({ selector }, other)).miss?.reason).toBe(MissReason.NEVER_STORED);
    expect(await missed(run, {}, ids(300), other)).toBe('NEVER_STORED');
    const filter = { instanceId: run.names.instanceId };
    expect(await listed(run, filter, other)).toEqual([]);
    expect(await run.client.getStats({ filter }, other)).toMatchObject({ entries: 0, bytes: 0n, owners: [] });
    const remove = { idempotencyKey: callKey(), entryId: entry?.entryId ?? '' };
    expect(await run.client.deleteEntry(remove, other)).toMatchObject({ deleted: false });
    const { result } = await run.client.takeEntry(run.takeRequest(foreign), router);
    if (result.case !== 'taken') throw new Error('a miss');
    const { claimId } = result.value;
    expect(await refusal(run.client.commitClaim({ claimId }, other))).toEqual({
      reason: 'CLAIM_NOT_FOUND',
      claim_id: claimId,
    });
    expect((await run.client.releaseClaim({ claimId, reason: 'not_sent' })).entry?.claimed).toBe(false);
    expect(await listed(run, filter, router)).toHaveLength(1);
  });

  test('frees blocks and drops owners', async (context) => {
    await using run = await open(context);
    const operator = callerFor(context, run, 'operator');
    await run.client.putEntry(run.putRequest());
    const release = () => ({ idempotencyKey: callKey(), instanceId: run.names.instanceId });
    expect((await run.client.takeForRelease({ ...release(), queuedOnly: true }, operator)).taken).toEqual([]);
    const call = release();
    const { taken: freed } = await run.client.takeForRelease(call, operator);
    const claimId = freed[0]?.claimId ?? '';
    expect(freed[0]?.handle?.remoteRequestId).toBe('chatcmpl-1');
    expect((await run.client.takeForRelease(call, operator)).taken.map((each) => each.claimId)).toEqual([claimId]);
    expect(await missed(run)).toBe('RELEASED');
    await run.client.commitClaim({ claimId }, operator);

    await run.client.putEntry(run.putRequest());
    const current = (generation: number) => ({ ...release(), current: { engineId: 'e', generation } });
    expect(await run.client.invalidateOwner(current(1), operator)).toMatchObject({ droppedEntries: 0 });
    expect(await run.client.invalidateOwner({ ...current(0), reason: 'restarted' }, operator)).toMatchObject({
      droppedEntries: 0,
    });
    expect(await run.client.invalidateOwner(current(2), operator)).toMatchObject({ droppedEntries: 1 });
    expect(await missed(run)).toBe('OWNER_GONE');
  });

  test('frees the blocks of conversations that go on last', async (context) => {
    await using run = await open(context);
    const operator = callerFor(context, run, 'operator');
    const goesOn = (await run.client.putEntry({ ...run.putRequest(), afterHit: true })).entry;
    expect(goesOn?.afterHit).toBe(true);
    const other = (await run.client.putEntry(run.putRequest())).entry;
    for (const expected of [other, goesOn]) {
      const call = {
        idempotencyKey: callKey(),
        instanceId: run.names.instanceId,
        spareAfterHit: durationFromMs(3.6e6),
      };
      const { taken } = await run.client.takeForRelease(call, operator);
      expect(taken.map(({ entry }) => entry?.entryId)).toEqual([expected?.entryId]);
    }
  });

  test('lets operators alone do so', async (context) => {
    await using run = await open(context);
    const operator = callerFor(context, run, 'operator');
    // Whoever calls as another tenant is no operator.
    const other = callerFor(context, run, 'other');
    await run.client.putEntry(run.putRequest());
    const release = { idempotencyKey: callKey(), instanceId: run.names.instanceId };
    const required = (method: string) => ({
      reason: 'OPERATOR_REQUIRED',
      method: `baton.v1.KVCacheStore/${method}`,
    });
    expect(await refusal(run.client.takeForRelease(release, other))).toEqual(required('TakeForRelease'));
    expect(await refusal(run.client.invalidateOwner(release, other))).toEqual(required('InvalidateOwner'));
    const claimId = (await run.client.takeForRelease(release, operator)).taken[0]?.claimId ?? '';
    expect(await refusal(run.client.commitClaim({ claimId }, other))).toMatchObject({ reason: 'CLAIM_NOT_FOUND' });
    await run.client.commitClaim({ claimId }, operator);
  });

  test('refuses a key that comes with another request', async (context) => {
    await using run = await open(context);
    const put = run.putRequest();
    const { entry } = await run.client.putEntry(put);
    expect((await run.client.putEntry(put)).entry?.entryId).toBe(entry?.entryId);
    const reused = { reason: 'IDEMPOTENCY_KEY_REUSED', idempotency_key: put.idempotencyKey };
    expect(await refusal(run.client.putEntry({ ...put, storedTokens: 199, handle: handle(199) }))).toEqual(reused);
    const take = run.takeRequest();
    await run.client.takeEntry(take);
    const other = { case: 'tokenIds' as const, value: { tokenIds: ids(300).with(299, 7) } };
    for (const changed of [{ prompt: other }, { minTokens: 65 }, { claimDeadline: durationFromMs(1000) }]) {
      const request = run.takeRequest({ idempotencyKey: take.idempotencyKey, ...changed });
      expect(await refusal(run.client.takeEntry(request))).toEqual({
        ...reused,
        idempotency_key: take.idempotencyKey,
      });
    }
  });

  test('heeds preconditions', async (context) => {
    await using run = await open(context);
    const absent = { precondition: { condition: { case: 'absent' as const, value: {} } } };
    const { displacedEntryIds: none, ...first } = await stored(run, absent);
    expect(none).toEqual([]);
    expect(await refusal(run.client.putEntry(run.putRequest(absent)))).toEqual({
      reason: 'ENTRY_EXISTS',
      entry_id: first.entryId,
    });
    const at = (value: { readonly entryId: string; readonly revision: bigint }) => ({
      precondition: { condition: { case: 'revision' as const, value } },
    });
    const { displacedEntryIds, ...second } = await stored(run, at(first));
    expect(displacedEntryIds).toEqual([first.entryId]);
    const mismatch = { reason: 'REVISION_MISMATCH', entry_id: first.entryId };
    expect(await refusal(run.client.putEntry(run.putRequest(at(first))))).toMatchObject(mismatch);
    expect(await refusal(run.client.takeEntry(run.takeRequest({ precondition: first })))).toMatchObject(mismatch);
    const remove = (revision: bigint) =>
      run.client.deleteEntry({ idempotencyKey: callKey(), entryId: second.entryId, revision });
    expect(await refusal(remove(second.revision + 1n))).toMatchObject({ reason: 'REVISION_MISMATCH' });
    expect((await taken(run, { precondition: second })).entry?.entryId).toBe(second.entryId);
    expect(await refusal(run.client.deleteEntry({ idempotencyKey: callKey(), entryId: second.entryId }))).toMatchObject(
      { reason: 'ENTRY_CLAIMED' },
    );
  });

  test('gives only what the reader can read', async (context) => {
    await using run = await open(context);
    const { owner } = run.putRequest();
    await run.client.putEntry(run.putRequest(owner === undefined ? {} : { owner: { ...owner, compatGroup: 'a' } }));
    expect(await missed(run, { compatGroup: 'b' })).toBe('NEVER_STORED');
    expect((await taken(run, { compatGroup: 'a' })).entry?.owner?.compatGroup).toBe('a');
  });

  test('names the field at fault', async (context) => {
    await using run = await open(context);
    for (const [field, call] of FAULTY_CALLS) {
      const options = field === 'instance_id' ? run.as('operator') : undefined;
      if (field === 'instance_id' && options === undefined) continue;
      const answer = await refusal(call(run, options));
      expect.soft(answer, String(call)).toEqual({ reason: 'INVALID_ARGUMENT', field });
    }
    const filter = { conversationId: run.names.key.conversationId };
    expect(await listed(run, filter)).toEqual([]);
  });

  test('holds the limits that it tells', async (context) => {
    await using run = await open(context);
    const { limits } = await run.client.getStats({});
    const { chainDigests = 0, promptTokens = 0, entriesPerKey = 0, entriesPerDerivedKey = 0 } = limits ?? {};
    const over = (limit: string, max: number) => ({ reason: 'LIMIT_EXCEEDED', limit, max: String(max) });
    const long = ids(64 * (chainDigests + 1));
    const chain = buildChain(long, SEED, sha256);
    const digests = over('chain_digests', chainDigests);
    expect(await refusal(run.client.putEntry(run.putRequest({ chain, storedTokens: long.length })))).toEqual(digests);
    const prompt = { case: 'promptChain' as const, value: { chain, rawBlocks: [] } };
    expect(await refusal(run.client.takeEntry(run.takeRequest({ prompt })))).toEqual(digests);
    const tokens = over('prompt_tokens', promptTokens);
    expect(await refusal(run.client.takeEntry(run.takeRequest({}, ids(promptTokens + 1))))).toEqual(tokens);
    const { entryId } = await stored(run);
    for (let index = 1; index < entriesPerKey; index++) expect((await stored(run)).displacedEntryIds).toEqual([]);
    expect((await stored(run, { derivedKey: true })).displacedEntryIds).toEqual([]);
    expect(entriesPerDerivedKey).toBeGreaterThan(entriesPerKey);
    // One more for the one that the longer limit let in.
    expect((await stored(run)).displacedEntryIds).toHaveLength(2);
    expect((await run.client.getEntry({ selector: { case: 'entryId', value: entryId } })).miss?.reason).toBe(
      MissReason.RELEASED,
    );
  });

  test('pages and counts', async (context) => {
    await using run = await open(context);
    for (let index = 0; index < 5; index++) await stored(run);
    const filter = { instanceId: run.names.instanceId };
    const seen: string[] = [];
    const sizes: number[] = [];
    for (let pageToken = ''; seen.length === 0 || pageToken !== ''; ) {
      const page = await run.client.listEntries({ filter, pageSize: 3, pageToken });
      expect(page.entries.length).toBeLessThanOrEqual(3);
      sizes.push(page.entries.length);
      seen.push(...page.entries.map(({ entryId }) => entryId));
      pageToken = page.nextPageToken;
    }
    expect(seen).toEqual([...new Set(seen)].toSorted());
    expect(seen).toHaveLength(5);
    expect(await refusal(run.client.listEntries({ pageToken: 'x' }))).toEqual({ reason: 'PAGE_TOKEN_INVALID' });
    const remove = { idempotencyKey: callKey(), entryId: seen[0] ?? '' };
    expect((await run.client.deleteEntry(remove)).deleted).toBe(true);
    expect((await run.client.deleteEntry(remove)).deleted).toBe(true);
    expect((await run.client.deleteEntry({ ...remove, idempotencyKey: callKey() })).deleted).toBe(false);
    await taken(run);
    const stats = await run.client.getStats({ filter });
    expect(stats).toMatchObject({ entries: 4, claims: 1, releaseQueue: 1 });
    // The queued one, too, keeps its blocks from being freed.
    expect(stats.owners).toMatchObject([{ instanceId: run.names.instanceId, entries: 4, pinnedBlocks: 65n }]);
  });
}
