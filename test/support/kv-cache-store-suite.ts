import { create, equals, type MessageInitShape } from '@bufbuild/protobuf';
import { durationFromMs, durationMs } from '@bufbuild/protobuf/wkt';
import type { Client } from '@connectrpc/connect';
import { afterAll, beforeAll, beforeEach, describe, expect, test } from 'vitest';
import {
  type KVCacheStore,
  MissReason,
  type PutEntryRequest,
  PutEntryRequestSchema,
  type TakeEntryRequest,
  TakeEntryRequestSchema,
} from '../../gen/baton/v1/kv_cache_store_pb.ts';
import { type KvTransferParams, KvTransferParamsSchema } from '../../gen/baton/v1/kv_transfer_pb.ts';
import { buildChain } from '../../src/core/chain.ts';
import { decodeKvTransferParams, encodeKvTransferParams } from '../../src/core/kv-transfer.ts';
import { batonErrorFrom } from '../../src/rpc/errors.ts';
import { type KvCacheStoreOptions, KvCacheStoreService } from '../../src/services/kv-cache-store.ts';
import { sha256 } from '../../src/services/sha256.ts';
import { STORES } from '../../src/stores/index.ts';
import { ids, limits, type TestTime } from './kv-store.ts';
import { needsRedis } from './redis.ts';
import { BINDINGS, type Binding } from './rpc-bindings.ts';
import { startBackends } from './store-backends.ts';

const KEY = { tenant: '', model: 'm', adapter: '', cacheSalt: '', conversationId: 'c' };
const SEED = { model: 'm', adapter: '', cacheSalt: '' };
const HANDLE_JSON =
  '{"do_remote_prefill":false,"do_remote_decode":true,"remote_block_ids":[[11,12,13]],"remote_engine_id":"e_dp0",' +
  '"remote_request_id":"chatcmpl-1","remote_host":"10.0.0.2","remote_port":5601,"tp_size":1,"remote_num_tokens":200,' +
  '"remote_blocks_expiry_time":1519.551656931,"unknown":{"a":9007199254740993}}';

type PutParts = Exclude<MessageInitShape<typeof PutEntryRequestSchema>, PutEntryRequest>;
type TakeParts = Exclude<MessageInitShape<typeof TakeEntryRequestSchema>, TakeEntryRequest>;

let calls = 0;
const key = () => `call-${++calls}`;

function handle(): KvTransferParams {
  const params = decodeKvTransferParams(Buffer.from(HANDLE_JSON));
  if (params === undefined) throw new Error('not a handle');
  return params;
}

function putRequest(rest: PutParts = {}, tokens = ids(200)): PutEntryRequest {
  return create(PutEntryRequestSchema, {
    idempotencyKey: key(),
    key: KEY,
    owner: {
      instanceId: 'd',
      engineId: 'e_dp0',
      incarnation: { engineId: 'e', generation: 1, processStartSeconds: 5 },
    },
    connector: 'nixl',
    handle: handle(),
    storedTokens: tokens.length,
    chain: buildChain(tokens, SEED, sha256),
    engineBlockSize: 16,
    remainingTtl: durationFromMs(450_000),
    ...rest,
  });
}

function takeRequest(rest: TakeParts = {}, prompt = ids(300)): TakeEntryRequest {
  return create(TakeEntryRequestSchema, {
    idempotencyKey: key(),
    key: KEY,
    prompt: { case: 'tokenIds', value: { tokenIds: prompt } },
    ...rest,
  });
}

async function refusal(promise: Promise<unknown>): Promise<unknown> {
  try {
    return await promise;
  } catch (thrown) {
    const error = batonErrorFrom(thrown, 'INTERNAL');
    return { reason: error.reason, ...error.metadata };
  }
}

/** The service over one backend, reached through one binding. */
export type StoreCase = Binding & { readonly backend: string };

/** Every backend through every binding. */
export const STORE_CASES: readonly StoreCase[] = Object.keys(STORES).flatMap((backend) =>
  BINDINGS.map((binding) => ({ backend, ...binding })),
);

/** What the KVCacheStore promises, for each of these. */
export function testKvCacheStore(cases: readonly StoreCase[]): void {
  let backends: Awaited<ReturnType<typeof startBackends>>;

  beforeAll(async () => {
    backends = await startBackends();
  });

  afterAll(() => backends[Symbol.asyncDispose]());

  describe.each(cases)('$backend, $name', ({ backend, open }) => {
    beforeEach((context) => {
      if (backend === 'valkey') needsRedis(context);
    });

    /** A store whose callers name their tenant and rights in headers, as credentials would. */
    async function opened(options: Partial<KvCacheStoreOptions> = {}) {
      const time: TestTime = { now: 0 };
      const some = limits({ chainDigests: 4, promptTokens: 400 });
      const store = await backends.of(backend)({ now: () => time.now, limits: some });
      const service = new KvCacheStoreService({
        store,
        limits: some,
        callerOf: ({ requestHeader }) => {
          const rights = (requestHeader.get('x-rights') ?? '').split(',');
          return {
            tenant: requestHeader.get('x-tenant') ?? 't',
            actsForAnyTenant: rights.includes('any'),
            mayTakeUnverified: rights.includes('unverified'),
            isOperator: rights.includes('operator'),
          };
        },
        ...options,
      });
      const bound = await open({ kvCacheStore: service });
      const client: Client<typeof KVCacheStore> = bound.kvCacheStore;
      return { time, service, client, [Symbol.asyncDispose]: () => bound[Symbol.asyncDispose]() };
    }
    const as = (rights: string, tenant = 't') => ({ headers: { 'x-rights': rights, 'x-tenant': tenant } });

    test('gives a handle back as it was put, once', async () => {
      await using run = await opened();
      const { entry } = await run.client.putEntry(putRequest());
      expect(entry).toMatchObject({
        key: { tenant: 't', model: 'm', conversationId: 'c' },
        owner: {
          instanceId: 'd',
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
      run.time.now = 1500.75;
      const request = takeRequest();
      const { result } = await run.client.takeEntry(request);
      if (result.case !== 'taken') throw new Error('a miss');
      const { value } = result;
      expect(Buffer.from(encodeKvTransferParams(value.handle ?? handle())).toString()).toBe(HANDLE_JSON);
      expect(value.matchedTokens).toBe(200);
      expect(value.entry?.claimed).toBe(true);
      expect(value.claimRemaining && durationMs(value.claimRemaining)).toBe(120_000);
      // A server's clock has whole milliseconds.
      expect([448_499, 448_500]).toContain(value.entry?.remainingTtl && durationMs(value.entry.remainingTtl));
      expect(value.entry?.age && durationMs(value.entry.age)).toBe(1500);
      await run.client.commitClaim({ claimId: value.claimId });
      const again = await run.client.takeEntry(request);
      expect(again.result.value).toMatchObject({ claimId: value.claimId });
      expect((await run.client.takeEntry(takeRequest())).result).toMatchObject({
        case: 'miss',
        value: { reason: MissReason.TAKEN },
      });
      expect(await refusal(run.client.releaseClaim({ claimId: value.claimId }))).toEqual({
        reason: 'CLAIM_SPENT',
        claim_id: value.claimId,
      });
    });

    test('keeps what was put, whatever happens to the message afterwards', async () => {
      await using run = await opened();
      const request = putRequest();
      await run.client.putEntry(request);
      if (request.handle !== undefined) request.handle.remoteNumTokens = 1;
      request.handle?.remoteBlockIds?.groups.pop();
      request.chain?.digests.forEach((digest) => void digest.fill(0));
      const take = takeRequest();
      const first = (await run.client.takeEntry(take)).result;
      if (first.case !== 'taken' || first.value.handle === undefined) throw new Error('a miss');
      expect(equals(KvTransferParamsSchema, first.value.handle, handle())).toBe(true);
      first.value.handle.remoteNumTokens = 2;
      const again = (await run.client.takeEntry(take)).result;
      if (again.case !== 'taken' || again.value.handle === undefined) throw new Error('a miss');
      expect(equals(KvTransferParamsSchema, again.value.handle, handle())).toBe(true);
    });

    test('proves a chain with the raw block that GetEntry tells of', async () => {
      await using run = await opened();
      await run.client.putEntry(putRequest({ storedTokens: 205 }));
      const { entries } = await run.client.getEntry({ selector: { case: 'key', value: KEY } });
      expect(entries.map(({ cachedTokens }) => cachedTokens)).toEqual([200]);
      const prompt = ids(300);
      const chain = buildChain(prompt, SEED, sha256);
      const bare = { case: 'promptChain' as const, value: { chain, rawBlocks: [] } };
      const block = Math.floor(200 / 64);
      const raw = { ...bare.value, rawBlocks: [{ index: block, tokenIds: prompt.slice(block * 64, block * 64 + 64) }] };
      const taken = await run.client.takeEntry({ idempotencyKey: key(), key: KEY, prompt: { ...bare, value: raw } });
      expect(taken.result.value).toMatchObject({ matchedTokens: 200 });
      await run.client.putEntry(putRequest());
      const short = await run.client.takeEntry({ idempotencyKey: key(), key: KEY, prompt: bare });
      expect(short.result.value).toMatchObject({ matchedTokens: 192 });
    });

    test('asks for a prompt, unless the credential permits to go without', async () => {
      await using run = await opened();
      await run.client.putEntry(putRequest());
      const bare = { idempotencyKey: key(), key: KEY };
      expect(await refusal(run.client.takeEntry(bare))).toEqual({ reason: 'PROMPT_REQUIRED' });
      expect(await refusal(run.client.takeEntry({ ...bare, allowUnverified: true }))).toEqual({
        reason: 'UNVERIFIED_NOT_PERMITTED',
      });
      // A prompt is proven even so.
      const other = takeRequest({ allowUnverified: true }, ids(300, 9000));
      await run.client.putEntry(putRequest({ chain: undefined }));
      expect((await run.client.takeEntry(other, as('unverified'))).result).toMatchObject({
        case: 'miss',
        value: { reason: MissReason.PREFIX_MISMATCH, matchedTokens: 0 },
      });
      const { result } = await run.client.takeEntry({ ...bare, allowUnverified: true }, as('unverified'));
      expect(result.value).toMatchObject({ matchedTokens: 0, entry: { chainTokens: 0, chainAlgorithm: '' } });
    });

    test('keeps tenants apart', async () => {
      await using run = await opened();
      const { entry } = await run.client.putEntry(putRequest());
      const foreign = { key: { ...KEY, tenant: 't' } };
      const forbidden = { reason: 'TENANT_FORBIDDEN', tenant: 't' };
      expect(await refusal(run.client.takeEntry(takeRequest(foreign), as('', 'u')))).toEqual(forbidden);
      expect(await refusal(run.client.putEntry(putRequest(foreign), as('', 'u')))).toEqual(forbidden);
      expect(await refusal(run.client.listEntries({ filter: { tenant: 't' } }, as('', 'u')))).toEqual(forbidden);
      const selector = { case: 'entryId' as const, value: entry?.entryId ?? '' };
      expect((await run.client.getEntry({ selector }, as('', 'u'))).miss?.reason).toBe(MissReason.NEVER_STORED);
      expect((await run.client.takeEntry(takeRequest(), as('', 'u'))).result.case).toBe('miss');
      expect((await run.client.listEntries({}, as('', 'u'))).entries).toEqual([]);
      expect(await run.client.getStats({}, as('', 'u'))).toMatchObject({ entries: 0, puts: 0n, bytes: 0n, owners: [] });
      const remove = { idempotencyKey: key(), entryId: entry?.entryId ?? '' };
      expect(await run.client.deleteEntry(remove, as('', 'u'))).toMatchObject({ deleted: false });
      const { result } = await run.client.takeEntry(takeRequest(foreign), as('any', 'router'));
      if (result.case !== 'taken') throw new Error('a miss');
      const { claimId } = result.value;
      expect(await refusal(run.client.commitClaim({ claimId }, as('', 'u')))).toEqual({
        reason: 'CLAIM_NOT_FOUND',
        claim_id: claimId,
      });
      expect((await run.client.releaseClaim({ claimId, reason: 'not_sent' })).entry?.claimed).toBe(false);
      expect((await run.client.listEntries({}, as('any', 'router'))).entries).toHaveLength(1);
    });

    test('lets operators alone free blocks and drop owners', async () => {
      await using run = await opened();
      await run.client.putEntry(putRequest());
      const release = () => ({ idempotencyKey: key(), instanceId: 'd' });
      expect(await refusal(run.client.takeForRelease(release()))).toEqual({
        reason: 'OPERATOR_REQUIRED',
        method: 'baton.v1.KVCacheStore/TakeForRelease',
      });
      expect(await refusal(run.client.invalidateOwner(release(), as('any')))).toMatchObject({
        reason: 'OPERATOR_REQUIRED',
      });
      expect((await run.client.takeForRelease({ ...release(), queuedOnly: true }, as('operator'))).taken).toEqual([]);
      const { taken } = await run.client.takeForRelease(release(), as('operator'));
      const claimId = taken[0]?.claimId ?? '';
      expect(taken[0]?.handle?.remoteRequestId).toBe('chatcmpl-1');
      expect((await run.client.takeEntry(takeRequest())).result.value).toMatchObject({ reason: MissReason.RELEASED });
      expect(await refusal(run.client.commitClaim({ claimId }))).toMatchObject({ reason: 'CLAIM_NOT_FOUND' });
      await run.client.commitClaim({ claimId }, as('operator'));

      await run.client.putEntry(putRequest());
      const current = (generation: number) => ({ ...release(), current: { engineId: 'e', generation } });
      expect(await run.client.invalidateOwner(current(1), as('operator'))).toMatchObject({ droppedEntries: 0 });
      expect(await run.client.invalidateOwner({ ...current(0), reason: 'restarted' }, as('operator'))).toMatchObject({
        droppedEntries: 0,
      });
      expect(await run.client.invalidateOwner(current(2), as('operator'))).toMatchObject({ droppedEntries: 1 });
      expect((await run.client.takeEntry(takeRequest())).result.value).toMatchObject({ reason: MissReason.OWNER_GONE });
    });

    test('refuses a key that comes with another request', async () => {
      await using run = await opened();
      const put = putRequest();
      await run.client.putEntry(put);
      const reused = { reason: 'IDEMPOTENCY_KEY_REUSED', idempotency_key: put.idempotencyKey };
      expect(await refusal(run.client.putEntry({ ...put, storedTokens: 199 }))).toEqual(reused);
      const take = takeRequest();
      await run.client.takeEntry(take);
      const other = { case: 'tokenIds' as const, value: { tokenIds: ids(300).with(299, 7) } };
      for (const changed of [{ prompt: other }, { minTokens: 65 }, { claimDeadline: durationFromMs(1000) }]) {
        const request = takeRequest({ idempotencyKey: take.idempotencyKey, ...changed });
        expect(await refusal(run.client.takeEntry(request))).toEqual({
          ...reused,
          idempotency_key: take.idempotencyKey,
        });
      }
      // Another tenant's calls have keys of their own.
      expect((await run.client.putEntry(put, as('', 'u'))).entry?.key?.tenant).toBe('u');
    });

    test.each<[string, (client: Client<typeof KVCacheStore>) => Promise<unknown>]>([
      ['idempotency_key', (c) => c.putEntry(putRequest({ idempotencyKey: '' }))],
      ['idempotency_key', (c) => c.takeEntry(takeRequest({ idempotencyKey: 'é'.repeat(65) }))],
      ['key', (c) => c.putEntry({ idempotencyKey: 'k' })],
      ['key.model', (c) => c.putEntry(putRequest({ key: { ...KEY, model: '' } }))],
      ['key.conversation_id', (c) => c.putEntry(putRequest({ key: { ...KEY, conversationId: 'é'.repeat(257) } }))],
      ['key.cache_salt', (c) => c.takeEntry(takeRequest({ key: { ...KEY, cacheSalt: 'x'.repeat(513) } }))],
      ['key.adapter', (c) => c.takeEntry(takeRequest({ key: { ...KEY, adapter: 'x'.repeat(4097) } }))],
      ['owner', (c) => c.putEntry({ idempotencyKey: 'k', key: KEY })],
      ['owner.incarnation', (c) => c.putEntry(putRequest({ owner: { instanceId: 'd', engineId: 'e' } }))],
      ['owner.engine_id', (c) => c.putEntry(putRequest({ owner: { instanceId: 'd', engineId: '', incarnation: {} } }))],
      ['handle', (c) => c.putEntry({ idempotencyKey: 'k', key: KEY, owner: putRequest().owner! })],
      ['stored_tokens', (c) => c.putEntry(putRequest({ storedTokens: 0 }))],
      ['engine_block_size', (c) => c.putEntry(putRequest({ engineBlockSize: 0 }))],
      ['connector', (c) => c.putEntry(putRequest({ connector: 'Nixl_1' }))],
      ['remaining_ttl', (c) => c.putEntry(putRequest({ remainingTtl: durationFromMs(0) }))],
      ['remaining_ttl', (c) => c.putEntry(putRequest({ remainingTtl: durationFromMs(86_400_001) }))],
      ['chain.algorithm', (c) => c.putEntry(putRequest({ chain: { ...putRequest().chain!, algorithm: 'c0' } }))],
      ['chain.token_count', (c) => c.putEntry(putRequest({ chain: { ...putRequest().chain!, tokenCount: 7 } }))],
      ['precondition', (c) => c.putEntry(putRequest({ precondition: { condition: { case: undefined } } }))],
      ['claim_deadline', (c) => c.takeEntry(takeRequest({ claimDeadline: durationFromMs(3_600_001) }))],
      ['prompt_chain.chain', (c) => c.takeEntry(takeRequest({ prompt: { case: 'promptChain', value: {} } }))],
      ['precondition.entry_id', (c) => c.takeEntry(takeRequest({ precondition: { entryId: '', revision: 1n } }))],
      ['precondition.revision', (c) => c.takeEntry(takeRequest({ precondition: { entryId: 'e' } }))],
      ['claim_id', (c) => c.commitClaim({})],
      ['reason', (c) => c.releaseClaim({ claimId: 'c', reason: 'Not sent' })],
      ['selector', (c) => c.getEntry({})],
      ['entry_id', (c) => c.deleteEntry({ idempotencyKey: 'k' })],
      ['instance_id', (c) => c.takeForRelease({ idempotencyKey: 'k' }, as('operator'))],
      ['instance_id', (c) => c.invalidateOwner({ idempotencyKey: 'k' }, as('operator'))],
    ])('names the field at fault: %s (%#)', async (field, call) => {
      await using run = await opened();
      expect(await refusal(call(run.client))).toEqual({ reason: 'INVALID_ARGUMENT', field });
      expect(await run.client.getStats({})).toMatchObject({ entries: 0, puts: 0n, takes: 0n });
    });

    test('holds the limits of its contract', async () => {
      await using run = await opened();
      const digests = { reason: 'LIMIT_EXCEEDED', limit: 'chain_digests', max: '4' };
      expect(await refusal(run.client.putEntry(putRequest({}, ids(320))))).toEqual(digests);
      const chain = buildChain(ids(320), SEED, sha256);
      const prompt = { case: 'promptChain' as const, value: { chain, rawBlocks: [] } };
      expect(await refusal(run.client.takeEntry(takeRequest({ prompt })))).toEqual(digests);
      expect(await refusal(run.client.takeEntry(takeRequest({}, ids(401))))).toEqual({
        reason: 'LIMIT_EXCEEDED',
        limit: 'prompt_tokens',
        max: '400',
      });
      expect((await run.client.getStats({})).limits).toMatchObject({
        entryBytes: 4_194_304,
        chainDigests: 4,
        promptTokens: 400,
        entriesPerKey: 8,
        entriesPerDerivedKey: 64,
        tenantEntries: 10_000,
        tenantBytes: 268_435_456n,
        totalBytes: 1_073_741_824n,
        tenantWatches: 64,
      });
    });

    test('pages, counts and tells of releases', async () => {
      await using run = await opened();
      const heard: [string, number][] = [];
      run.service.onReleasable((instanceId, queued) => void heard.push([instanceId, queued]));
      for (let index = 0; index < 5; index++) await run.client.putEntry(putRequest());
      const first = await run.client.listEntries({ pageSize: 3 });
      const second = await run.client.listEntries({ pageSize: 3, pageToken: first.nextPageToken });
      expect([first.entries.length, second.entries.length, second.nextPageToken]).toEqual([3, 2, '']);
      expect(await refusal(run.client.listEntries({ pageToken: 'x' }))).toEqual({ reason: 'PAGE_TOKEN_INVALID' });
      const { entryId = '', revision = 0n } = first.entries[0] ?? {};
      expect((await run.client.deleteEntry({ idempotencyKey: key(), entryId, revision })).deleted).toBe(true);
      expect(heard).toEqual([['d', 1]]);
      await run.client.takeEntry(takeRequest());
      const stats = await run.client.getStats({ filter: { instanceId: 'd' } });
      expect(stats).toMatchObject({ entries: 4, claims: 1, releaseQueue: 1, puts: 5n, takes: 1n, watches: 0 });
      expect(stats.owners).toMatchObject([{ instanceId: 'd', entries: 4, pinnedBlocks: 15n }]);
      expect(await run.service.readStats()).toMatchObject({ entries: 4, runId: stats.runId });
    });

    test('is switched off for a tenant', async () => {
      await using run = await opened({ isEnabled: (tenant) => tenant !== 'off' });
      expect((await run.client.takeEntry(takeRequest(), as('', 'off'))).result.value).toMatchObject({
        reason: MissReason.DISABLED,
      });
      const look = await run.client.getEntry({ selector: { case: 'key', value: KEY } }, as('', 'off'));
      expect(look.miss?.reason).toBe(MissReason.DISABLED);
      expect(await refusal(run.client.putEntry(putRequest(), as('', 'off')))).toMatchObject({
        reason: 'QUOTA_EXCEEDED',
      });
      await run.client.putEntry(putRequest());
    });
  });
}
