import { create, type MessageInitShape } from '@bufbuild/protobuf';
import type { Client } from '@connectrpc/connect';
import { describe, expect, test } from 'vitest';
import {
  EngineInfoSchema,
  IncarnationSchema,
  type Instance,
  KvSettingsSchema,
  ModelCardSchema,
} from '../../gen/baton/v1/instance_pb.ts';
import {
  EntrySchema,
  GetEntryResponseSchema,
  type KVCacheStore,
  MissReason,
  MissSchema,
  ReleaseClaimResponseSchema,
  TakeEntryResponseSchema,
  TakenEntrySchema,
} from '../../gen/baton/v1/kv_cache_store_pb.ts';
import { RequestFactsSchema, ReuseOutcome } from '../../gen/baton/v1/router_pb.ts';
import { PromptTokensSchema } from '../../gen/baton/v1/tokens_pb.ts';
import { buildChain } from '../../src/core/chain.ts';
import { compatGroup } from '../../src/core/compat.ts';
import { decodeKvTransferParams } from '../../src/core/kv-transfer.ts';
import { BidirectionalTrials } from '../../src/services/bidirectional-trials.ts';
import { CachedPrefixes } from '../../src/services/cached-prefixes.ts';
import { ConversationMemory } from '../../src/services/conversation-memory.ts';
import { HandleClaims } from '../../src/services/handle-claims.ts';
import { ReusePlanner, type ReuseSettings } from '../../src/services/reuse-planner.ts';
import { sha256 } from '../../src/services/sha256.ts';
import { decodeOf, prefillOf } from '../support/plan-instances.ts';

const known = (bidirectional = 'auto') => ({
  incarnation: create(IncarnationSchema, { generation: 1 }),
  models: [create(ModelCardSchema, { id: 'm', root: 'weights' })],
  engine: create(EngineInfoSchema, { kind: 'vllm', version: '0.33.0', blockSize: 16, templateFingerprint: 'f' }),
  kv: create(KvSettingsSchema, { bidirectional, loadFailurePolicy: 'fail' }),
});
const [P1, P2, D1, D2] = [
  prefillOf('p1', known()),
  prefillOf('p2', known()),
  decodeOf('d1', known()),
  decodeOf('d2', known()),
];
const TOKENS = 128;

const HANDLE = {
  do_remote_prefill: false,
  do_remote_decode: true,
  remote_block_ids: [[1, 2, 3, 4, 5, 6, 7, 8]],
  remote_engine_id: 'e',
  remote_request_id: 'r',
  remote_host: '10.0.0.2',
  remote_port: 5601,
  remote_num_tokens: TOKENS,
  remote_blocks_expiry_time: 5.5,
};

function entryOf(owner: Instance) {
  const { id, incarnation } = owner;
  return create(EntrySchema, {
    entryId: `entry-of-${id}`,
    owner: { instanceId: id, compatGroup: compatGroup(owner), ...(incarnation === undefined ? {} : { incarnation }) },
    storedTokens: TOKENS,
    cachedTokens: TOKENS,
    engineBlockSize: 16,
  });
}

/** A store with entries of the given owners; a take gives the entry of `taken`. */
function setUp(options: {
  readonly owners: readonly Instance[];
  readonly taken?: Instance;
  /** Tokens that the take proves equal; default all. */
  readonly matched?: number;
  /** Default two of each kind. */
  readonly pools?: readonly Instance[];
  readonly takes?: () => Promise<void>;
  readonly settings?: Partial<ReuseSettings>;
  readonly facts?: MessageInitShape<typeof RequestFactsSchema>;
  /** Why nothing is found; default TAKEN. */
  readonly absent?: MissReason;
  /** Why a take gives nothing. */
  readonly miss?: MessageInitShape<typeof MissSchema>;
}) {
  const ended: string[] = [];
  const takeKeys: string[] = [];
  const asked: unknown[] = [];
  const store: Partial<Client<typeof KVCacheStore>> = {
    getEntry: async () =>
      create(GetEntryResponseSchema, {
        entries: options.owners.map(entryOf),
        miss: create(MissSchema, { reason: options.absent ?? MissReason.TAKEN }),
      }),
    takeEntry: async ({ idempotencyKey = '', minTokens, keepTokens, key }) => {
      takeKeys.push(idempotencyKey);
      asked.push({ minTokens, keepTokens, key: key?.conversationId });
      await options.takes?.();
      const handle = decodeKvTransferParams(new TextEncoder().encode(JSON.stringify(HANDLE)));
      if (options.miss !== undefined) {
        return create(TakeEntryResponseSchema, { result: { case: 'miss', value: create(MissSchema, options.miss) } });
      }
      if (options.taken === undefined || handle === undefined) return create(TakeEntryResponseSchema, {});
      const value = {
        entry: entryOf(options.taken),
        handle,
        matchedTokens: options.matched ?? TOKENS,
        claimId: 'claim',
      };
      return create(TakeEntryResponseSchema, { result: { case: 'taken', value: create(TakenEntrySchema, value) } });
    },
    releaseClaim: async ({ claimId, reason }) => {
      ended.push(`release ${claimId} ${reason}`);
      return create(ReleaseClaimResponseSchema, {});
    },
    commitClaim: async ({ claimId }) => {
      ended.push(`commit ${claimId}`);
      return {} as never;
    },
  };
  const view = {
    snapshot: () => options.pools ?? [P1, P2, D1, D2],
    onChange: () => () => undefined,
    notePassive: () => undefined,
    noteBidirectional: () => undefined,
    noteLearnt: () => undefined,
    drain: () => undefined,
  };
  const trials = new BidirectionalTrials();
  const memory = new ConversationMemory();
  const cached = new CachedPrefixes();
  const claims = new HandleClaims(store as Client<typeof KVCacheStore>, { storeMs: 20 });
  const planner = new ReusePlanner(claims, view, trials, memory, cached, {
    guard: 'exact',
    prefillWarmMs: 60_000,
    prefillWarmPerTokenMs: 10,
    remoteHost: 'auto',
    minSavedTokens: 64,
    localTailTokens: 0,
    ...options.settings,
  });
  const facts = create(RequestFactsSchema, {
    tenant: 't',
    model: 'm',
    conversationId: 'c',
    continues: true,
    ...options.facts,
  });
  const prompt = create(PromptTokensSchema, {
    instanceId: 'p1',
    tokenIds: Array.from({ length: TOKENS + 5 }, (_, id) => id),
  });
  const plan = () => planner.plan({ facts, prompt, prefillFor: () => [P1, P2], signal: new AbortController().signal });
  const chain = buildChain(prompt.tokenIds, { model: 'm', adapter: '', cacheSalt: '' }, sha256);
  return { planner, trials, memory, cached, chain, facts, plan, ended, takeKeys, asked };
}

describe('who may get a handle', () => {
  test('on trial: nobody else in its place', async () => {
    const { plan } = setUp({ owners: [D1], taken: D1 });
    expect(await plan()).toMatchObject({ kind: 'hit', admission: 'trial', handle: { instanceIds: ['p1'] } });
  });

  test('an instance that would need a trial does not stand in for one that needs none', async () => {
    const { plan, trials } = setUp({ owners: [D1], taken: D1 });
    trials.settle(P1, 'd1', 'ok');
    expect(await plan()).toMatchObject({ kind: 'hit', admission: 'go', handle: { instanceIds: ['p1'] } });
    trials.settle(P2, 'd1', 'ok');
    expect(await plan()).toMatchObject({ kind: 'hit', admission: 'go', handle: { instanceIds: ['p1', 'p2'] } });
  });

  test('a barred pair gets none, whichever entry matches best', async () => {
    const { plan, trials, ended } = setUp({ owners: [D1, D2], taken: D2 });
    trials.settle(P1, 'd1', 'ok');
    trials.settle(P1, 'd2', 'hung');
    expect(await plan()).toMatchObject({ kind: 'cold', outcome: ReuseOutcome.MISS_DISABLED });
    expect(ended).toEqual(['release claim not_sent']);
  });
});

test('no engine reads from itself under another name', async () => {
  const renamed = decodeOf('d1', { ...known(), url: P1.url });
  const seen = setUp({ owners: [renamed], taken: renamed, pools: [P1, P2, renamed] });
  seen.trials.settle(P2, 'd1', 'ok');
  expect(await seen.plan()).toMatchObject({ kind: 'hit', handle: { instanceIds: ['p2'] } });
  // The entry that matches best may be another one's than the reader was chosen for.
  const { plan, ended } = setUp({ owners: [D2, renamed], taken: renamed, pools: [P1, P2, renamed, D2] });
  expect(await plan()).toMatchObject({ kind: 'cold', outcome: ReuseOutcome.MISS_DISABLED });
  expect(ended).toEqual(['release claim not_sent']);
});

describe('a take whose answer is lost', () => {
  test('is asked after, and its claim is given back', async () => {
    let isFirst = true;
    const takes = async () => {
      if (!isFirst) return;
      isFirst = false;
      throw new Error('deadline exceeded');
    };
    const { plan, ended, takeKeys } = setUp({ owners: [D1], taken: D1, takes });
    expect(await plan()).toMatchObject({ kind: 'cold', outcome: ReuseOutcome.MISS_STORE_UNAVAILABLE });
    await expect.poll(() => ended).toEqual(['release claim answer_lost']);
    const [taken = ''] = takeKeys;
    expect(takeKeys).toEqual([taken, taken]);
    expect(taken).not.toBe('');
  });

  test('leaves the trial to the next leg', async () => {
    const { plan, trials } = setUp({ owners: [D1], taken: D1, takes: () => Promise.reject(new Error('away')) });
    await plan();
    expect(trials.admit(P1, 'd1')).toBe('trial');
  });
});

describe('nothing is stored', () => {
  test.each([
    ['the last turn left no handle', ReuseOutcome.MISS_NO_HANDLE, ReuseOutcome.MISS_NO_HANDLE],
    ['the last turn left one', undefined, ReuseOutcome.MISS_TAKEN],
  ])('%s', async (_, noHandle, outcome) => {
    const { plan, memory, facts } = setUp({ owners: [] });
    memory.set(facts, { prefillId: 'p1', decodeId: 'd1', noHandle });
    expect(await plan()).toEqual({ kind: 'cold', outcome, ownerId: 'd1' });
  });
});

describe('what a handle is worth', () => {
  test('only what the reader likely does not hold counts', async () => {
    const { plan, cached, chain, trials, asked } = setUp({ owners: [D1], taken: D1 });
    trials.settle(P1, 'd1', 'ok');
    await plan();
    cached.note(P1, chain.digests, 70);
    await plan();
    // Another life of the instance holds nothing.
    cached.note({ ...P1, incarnation: create(IncarnationSchema, { generation: 2 }) }, chain.digests, 70);
    await plan();
    expect(asked).toMatchObject([{ minTokens: 64 }, { minTokens: 128 }, { minTokens: 64 }]);
  });

  test('switched off, every proven handle is used', async () => {
    const { plan, cached, chain, asked } = setUp({ owners: [D1], taken: D1, settings: { minSavedTokens: 0 } });
    cached.note(P1, chain.digests, TOKENS);
    expect(await plan()).toMatchObject({ kind: 'hit' });
    expect(asked).toMatchObject([{ minTokens: 64, keepTokens: 64 }]);
  });

  test('what is proven and saves too little stays, and is no mismatch', async () => {
    const miss = { reason: MissReason.PREFIX_MISMATCH, matchedTokens: 100 };
    const { plan } = setUp({ owners: [D1], miss });
    expect(await plan()).toMatchObject({ kind: 'cold', outcome: ReuseOutcome.MISS_TOO_SMALL });
    const other = setUp({ owners: [D1], miss: { ...miss, matchedTokens: 63 } });
    expect(await other.plan()).toMatchObject({ kind: 'cold', outcome: ReuseOutcome.MISS_MISMATCH });
  });

  test('a short rest is left to the decode instance that holds the others', async () => {
    const { plan, cached, chain, asked } = setUp({ owners: [D1], taken: D1, settings: { localTailTokens: 8 } });
    expect(await plan()).toMatchObject({ kind: 'hit' });
    cached.note(D1, chain.digests, TOKENS);
    expect(await plan()).toEqual({ kind: 'local', ownerId: 'd1' });
    expect(asked).toHaveLength(1);
  });
});

describe('a conversation that is found by its history', () => {
  const facts = { conversationId: 'own', lookupConversationIds: ['own', 'before'], derivedConversation: true };

  test('is looked for under each of them, and leaves what is of others', async () => {
    const miss = { reason: MissReason.PREFIX_MISMATCH, matchedTokens: 0 };
    const { plan, asked } = setUp({ owners: [D1], miss, facts });
    expect(await plan()).toMatchObject({ kind: 'cold', outcome: ReuseOutcome.MISS_MISMATCH });
    expect(asked).toMatchObject([
      { key: 'own', keepTokens: 0 },
      { key: 'before', keepTokens: 0 },
    ]);
  });

  test('has no outcome but a hit where it may be the first turn', async () => {
    const first = { ...facts, continues: false };
    const { plan, memory, facts: sent } = setUp({ owners: [], facts: first });
    memory.set(sent, { prefillId: 'p1', decodeId: 'd1', noHandle: undefined });
    expect(await plan()).toEqual({ kind: 'cold', outcome: ReuseOutcome.UNSPECIFIED, ownerId: undefined });
    expect(await setUp({ owners: [D1], taken: D1, facts: first }).plan()).toMatchObject({ kind: 'hit' });
  });
});

describe('a prompt with pictures', () => {
  const lookups = [
    { conversationId: 'all', moreMedia: false },
    { conversationId: 'before', moreMedia: true },
  ];
  const facts = { conversationId: 'c', unprovenMembers: ['messages'], media: { conversationId: 'all', lookups } };
  const MISS = { reason: MissReason.PREFIX_MISMATCH, matchedTokens: 0 };

  test('is looked for under its messages alone, whatever its name', async () => {
    const { plan, asked } = setUp({ owners: [D1], miss: MISS, facts });
    await plan();
    expect(asked).toMatchObject([{ key: 'all' }, { key: 'before' }]);
  });

  test('reads what is cut only where no picture comes behind it', async () => {
    const cut = setUp({ owners: [D1], taken: D1, matched: 80, facts });
    expect(await cut.plan()).toMatchObject({ kind: 'hit', outcome: ReuseOutcome.HIT_CUT });
    const behind = { ...facts, media: { conversationId: 'all', lookups: lookups.slice(1) } };
    const kept = setUp({ owners: [D1], taken: D1, matched: 80, facts: behind });
    expect(await kept.plan()).toMatchObject({ kind: 'cold', outcome: ReuseOutcome.MISS_MISMATCH });
    expect(kept.ended).toEqual(['release claim not_sent']);
    expect(kept.trials.admit(P1, 'd1')).toBe('trial');
    const whole = setUp({ owners: [D1], taken: D1, facts: behind });
    expect(await whole.plan()).toMatchObject({ kind: 'hit', outcome: ReuseOutcome.HIT });
  });

  test.each([
    ['a link is among them', { ...facts, media: undefined }],
    ['other members shape it', { ...facts, unprovenMembers: ['messages', 'mm_processor_kwargs'] }],
  ])('reads nothing where %s', async (_, sent) => {
    const { plan, asked } = setUp({ owners: [D1], taken: D1, facts: sent });
    expect(await plan()).toMatchObject({ kind: 'cold', outcome: ReuseOutcome.MISS_UNSUPPORTED });
    expect(asked).toEqual([]);
  });

  test.each([
    ['other pictures', facts, false, ReuseOutcome.MISS_MISMATCH],
    ['text alone after pictures', { conversationId: 'c' }, true, ReuseOutcome.MISS_MISMATCH],
    ['a link after pictures', { ...facts, media: undefined }, true, ReuseOutcome.MISS_UNSUPPORTED],
  ])('%s: the outcome is not that nothing was stored', async (_, sent, hasMedia, outcome) => {
    const { plan, memory, facts: own } = setUp({ owners: [], absent: MissReason.NEVER_STORED, facts: sent });
    expect(await plan()).toMatchObject({ outcome: ReuseOutcome.MISS_NEVER });
    memory.set(own, { prefillId: 'p1', decodeId: 'd1', noHandle: undefined, hasMedia });
    expect(await plan()).toEqual({ kind: 'cold', outcome, ownerId: 'd1' });
  });
});
