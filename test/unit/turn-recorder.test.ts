import { create } from '@bufbuild/protobuf';
import { durationFromMs, durationMs } from '@bufbuild/protobuf/wkt';
import type { Client } from '@connectrpc/connect';
import { describe, expect, test } from 'vitest';
import { EngineInfoSchema, IncarnationSchema, KvSettingsSchema } from '../../gen/baton/v1/instance_pb.ts';
import type { KVCacheStore } from '../../gen/baton/v1/kv_cache_store_pb.ts';
import {
  type ReportOutcomeRequest,
  ReportOutcomeRequestSchema,
  RequestFactsSchema,
  ReuseOutcome,
} from '../../gen/baton/v1/router_pb.ts';
import { TokenChainSchema } from '../../gen/baton/v1/tokens_pb.ts';
import { buildChain } from '../../src/core/chain.ts';
import { decodeKvTransferParams } from '../../src/core/kv-transfer.ts';
import { CachedPrefixes } from '../../src/services/cached-prefixes.ts';
import { ConversationMemory } from '../../src/services/conversation-memory.ts';
import { HandleHabits } from '../../src/services/handle-habits.ts';
import { sha256 } from '../../src/services/sha256.ts';
import { TurnRecorder } from '../../src/services/turn-recorder.ts';
import { decodeOf } from '../support/plan-instances.ts';

const HANDLE = {
  do_remote_prefill: false,
  do_remote_decode: true,
  remote_block_ids: [[1, 2, 3, 4, 5, 6, 7]],
  remote_engine_id: 'e',
  remote_request_id: 'r',
  remote_host: '10.0.0.2',
  remote_port: 5601,
  remote_num_tokens: 100,
  remote_blocks_expiry_time: 5.5,
};

const CHAIN = create(
  TokenChainSchema,
  buildChain(
    Array.from({ length: 101 }, (_, id) => id),
    { model: 'm', adapter: '', cacheSalt: '' },
    sha256,
  ),
);

const FACTS = create(RequestFactsSchema, { model: 'm', conversationId: 'c' });

function handleOf(changes: object = {}) {
  const params = decodeKvTransferParams(new TextEncoder().encode(JSON.stringify({ ...HANDLE, ...changes })));
  if (params === undefined) throw new Error('no handle');
  return params;
}

function setUp(decoderTtlMs?: number) {
  const puts: { readonly conversation: string | undefined; readonly ttlMs: number }[] = [];
  const deleted: string[] = [];
  const store: Partial<Client<typeof KVCacheStore>> = {
    putEntry: async ({ key, remainingTtl }) => {
      puts.push({ conversation: key?.conversationId, ttlMs: durationMs(remainingTtl as never) });
      return { entry: { entryId: 'entry' } } as never;
    },
    deleteEntry: async ({ entryId = '' }) => {
      deleted.push(entryId);
      return {} as never;
    },
    invalidateOwner: async () => ({}) as never,
  };
  const memory = new ConversationMemory();
  const recorder = new TurnRecorder(
    store as Client<typeof KVCacheStore>,
    { snapshot: () => [] },
    memory,
    new HandleHabits(),
    new CachedPrefixes(),
    'exact',
  );
  const kv = create(KvSettingsSchema, decoderTtlMs === undefined ? {} : { decoderTtl: durationFromMs(decoderTtlMs) });
  const decode = decodeOf('d', {
    engine: create(EngineInfoSchema, { version: '0.33.0', blockSize: 16 }),
    incarnation: create(IncarnationSchema, { generation: 1 }),
    kv,
  });
  const record = (report: Partial<ReportOutcomeRequest>, unprovenMembers: readonly string[] = [], media?: string) =>
    recorder.record({
      planId: 'plan',
      facts: create(RequestFactsSchema, {
        model: 'm',
        conversationId: 'c',
        unprovenMembers: [...unprovenMembers],
        ...(media === undefined ? {} : { media: { conversationId: media, lookups: [] } }),
      }),
      connector: 'nixl',
      prefillId: 'p',
      prefill: undefined,
      decode,
      report: create(ReportOutcomeRequestSchema, report as never),
      handedOver: true,
      streamed: false,
      afterHit: false,
    });
  return { record, memory, puts, deleted };
}

describe('a handle is kept', () => {
  test.each([
    ['for 450 s of 480 s', undefined, 0, 450_000],
    ['for two thirds of a short time', 60_000, 0, 40_000],
    ['for less where the client read slowly', undefined, 20_000, 430_000],
  ])('%s', async (_, decoderTtlMs, pausedMs, ttlMs) => {
    const { record, memory, puts, deleted } = setUp(decoderTtlMs);
    expect(await record({ handle: handleOf(), chain: CHAIN, paused: durationFromMs(pausedMs) })).toBe('stored');
    expect(puts).toEqual([{ conversation: 'c', ttlMs }]);
    expect(deleted).toEqual([]);
    expect(memory.get(FACTS)).toEqual({ prefillId: 'p', decodeId: 'd', noHandle: undefined });
  });

  test('not where the client read so slowly that its time is over', async () => {
    const { record, memory, puts } = setUp();
    expect(await record({ handle: handleOf(), chain: CHAIN, paused: durationFromMs(450_000) })).toBe('none');
    expect(puts).toEqual([]);
    expect(memory.get(FACTS)?.noHandle).toBe(ReuseOutcome.MISS_EXPIRED);
  });
});

describe('a handle is given back', () => {
  test.each([
    ['without a proof', { handle: handleOf() }, [], ReuseOutcome.MISS_UNVERIFIABLE],
    [
      'without an end',
      { handle: handleOf({ remote_blocks_expiry_time: null }), chain: CHAIN },
      [],
      ReuseOutcome.MISS_UNVERIFIABLE,
    ],
    [
      'of a prompt with linked pictures',
      { handle: handleOf(), chain: CHAIN },
      ['messages'],
      ReuseOutcome.MISS_UNSUPPORTED,
    ],
  ])('%s', async (_, report, unproven, noHandle) => {
    const { record, memory, puts, deleted } = setUp();
    expect(await record(report, unproven)).toBe('released');
    expect(puts.map(({ conversation }) => conversation)).toEqual(['baton.release/plan']);
    expect(deleted).toEqual(['entry']);
    expect(memory.get(FACTS)?.noHandle).toBe(noHandle);
  });
});

test('members that shape the prompt are in the tokens of the turn: it is kept', async () => {
  const { record } = setUp();
  expect(await record({ handle: handleOf(), chain: CHAIN }, ['documents'])).toBe('stored');
});

test.each([
  ['none at all', {}, 'none'],
  ['a malformed one', { handle: handleOf({ remote_port: 'x' }), chain: CHAIN }, 'malformed'],
  ['one with too many blocks', { handle: handleOf({ remote_block_ids: [[1, 2, 3, 4, 5, 6, 7, 8]] }) }, 'malformed'],
])('%s: the conversation has no handle', async (_, report, fate) => {
  const { record, memory, puts } = setUp();
  expect(await record(report)).toBe(fate);
  expect(puts).toEqual([]);
  expect(memory.get(FACTS)?.noHandle).toBe(ReuseOutcome.MISS_NO_HANDLE);
});

describe('a prompt with pictures, all of them within it', () => {
  test('is kept under its messages, and the conversation knows', async () => {
    const { record, memory, puts } = setUp();
    expect(await record({ handle: handleOf(), chain: CHAIN }, ['messages'], 'its messages')).toBe('stored');
    expect(puts.map(({ conversation }) => conversation)).toEqual(['its messages']);
    expect(memory.get(FACTS)).toEqual({ prefillId: 'p', decodeId: 'd', noHandle: undefined, hasMedia: true });
  });

  test.each([
    ['without a proof', {}, ['messages'], ReuseOutcome.MISS_UNVERIFIABLE],
    [
      'whose pixels other members shaped',
      { chain: CHAIN },
      ['messages', 'mm_processor_kwargs'],
      ReuseOutcome.MISS_UNSUPPORTED,
    ],
  ])('is given back %s', async (_, report, unproven, noHandle) => {
    const { record, memory, deleted } = setUp();
    expect(await record({ handle: handleOf(), ...report }, unproven, 'its messages')).toBe('released');
    expect(deleted).toEqual(['entry']);
    expect(memory.get(FACTS)?.noHandle).toBe(noHandle);
  });
});
