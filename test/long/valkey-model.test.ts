import { afterAll, beforeAll, beforeEach, expect, test } from 'vitest';
import { BatonError } from '../../src/core/errors.ts';
import { MEMORY_BOUNDS, MemoryStore } from '../../src/stores/memory/store.ts';
import type { AtRevision, KvStore, StoreFilter, StoreKey } from '../../src/stores/store.ts';
import { openValkey } from '../../src/stores/valkey/store.ts';
import { callId, ids, limits, newEntry, proofOf, type TestTime } from '../support/kv-store.ts';
import { hasRedis, needsRedis, RedisServer } from '../support/redis.ts';
import { seeded, weighted } from '../support/seeded.ts';
import { valkeyOn } from '../support/store-backends.ts';

const LIMITS = limits({
  entriesPerKey: 3,
  entriesPerDerivedKey: 6,
  totalBytes: 9_000,
  tenantEntries: 9,
  tenantBytes: 8_000,
});
const BOUNDS = { ...MEMORY_BOUNDS, queueEntries: 6, tombstoneMs: 3_600_000 };
const SEEDS = Array.from({ length: 12 }, (_, index) => index + 1);
const STEPS = 500;

let redis: RedisServer;

beforeAll(async () => {
  if (hasRedis()) redis = await RedisServer.start();
});
afterAll(() => redis?.[Symbol.asyncDispose]());
beforeEach((context) => needsRedis(context));

/** One of the two stores, with names for what it calls by ids of its own. */
class Side {
  readonly store: KvStore;
  readonly entries: string[] = [];
  readonly claims: string[] = [];

  constructor(store: KvStore) {
    this.store = store;
  }

  /** What both stores must say alike: ids by the order in which they came up, no revisions. */
  named(value: unknown): unknown {
    if (typeof value === 'string') return this.#name(value);
    if (value instanceof Map) return [...value].toSorted(([a], [b]) => a - b);
    if (value instanceof Uint8Array) return [...value];
    if (Array.isArray(value)) return value.map((item) => this.named(item));
    if (typeof value !== 'object' || value === null) return value;
    return Object.fromEntries(
      Object.entries(value)
        .filter(([name, item]) => name !== 'revision' && item !== undefined)
        .toSorted(([a], [b]) => (a < b ? -1 : 1))
        .map(([name, item]) => [name, this.named(item)]),
    );
  }

  #name(text: string): string {
    const list = /^e-\w+-\w+$/.test(text) ? this.entries : /^c-\w+-\w+$/.test(text) ? this.claims : undefined;
    if (list === undefined) return text;
    if (!list.includes(text)) list.push(text);
    return `${list === this.entries ? 'entry' : 'claim'} ${list.indexOf(text)}`;
  }
}

test.each(SEEDS)('memory and valkey answer alike, seed %i', async (seed) => {
  const random = seeded(seed);
  const pick = <T>(list: readonly [T, ...T[]]): T => list[Math.floor(random() * list.length)] ?? list[0];
  const time: TestTime = { now: 1_000_000 };
  const options = { now: () => time.now, limits: LIMITS };
  await using valkey = await openValkey(
    { ...options, valkey: valkeyOn(redis, `model${seed}`, () => time.now) },
    BOUNDS,
  );
  await using memory = new MemoryStore({ ...options, runId: 'memory' }, BOUNDS);
  const sides = [new Side(memory), new Side(valkey)] as const;
  const words = new Map<string, number>();

  const keyOf = (): StoreKey => ({
    tenant: pick(['t', 'u']),
    model: 'm',
    adapter: '',
    cacheSalt: '',
    conversationId: pick(['a', 'b', 'c']),
  });
  const tokensOf = (): number[] => {
    const [branch, at] = [pick([0, 0, 0, 1, 2]), pick([0, 3, 64, 70, 130])];
    const length = pick([20, 64, 100, 128, 190, 192, 250]);
    return ids(length).map((id) => (branch > 0 && id >= at ? id + 1000 * branch : id));
  };
  /** Does the same on both, and compares what they say. */
  const both = async (what: string, call: (side: Side) => Promise<unknown>) => {
    const [a, b] = await Promise.all(
      sides.map(async (side) => {
        try {
          return side.named(await call(side));
        } catch (error) {
          if (!(error instanceof BatonError)) throw error;
          words.set(error.reason, (words.get(error.reason) ?? 0) + 1);
          return side.named({ reason: error.reason, ...error.metadata, revision: undefined });
        }
      }),
    );
    expect(b, `${what} at step ${step}`).toEqual(a);
  };
  /** An index that both sides know, or one that neither does. */
  const known = (list: 'entries' | 'claims'): number =>
    Math.floor(random() * (sides[0][list].length + 1)) - (random() < 0.9 ? 1 : 0);
  const entryOf = (side: Side, index: number): string => side.entries[index] ?? `e-${side.store.runId}-000000000zzz`;
  const revisionOf = async (side: Side, index: number, isRight: boolean): Promise<AtRevision> => {
    const entryId = entryOf(side, index);
    const [entry] = (await side.store.get({ kind: 'entry', entryId, tenant: undefined })).entries;
    return { entryId, revision: isRight ? (entry?.revision ?? 1n) : 999_999_999n };
  };
  const recent = (): number => sides[0].entries.length - 1 - Math.floor(random() * 4);

  let step = 0;
  let last: (() => Promise<void>) | undefined;
  const operations: readonly [number, () => Promise<void>][] = [
    [
      30,
      async () => {
        const tokens = random() < 0.1 ? null : tokensOf();
        const entry = newEntry({
          key: keyOf(),
          tokens,
          storedTokens: Math.max(1, (tokens?.length ?? 100) + pick([-1, 0, 0, 2])),
          instanceId: pick(['d1', 'd2', 'd3']),
          generation: pick([1, 1, 2]),
          compatGroup: pick(['', '', 'x', 'y']),
          handle: Uint8Array.of(step % 256, step >> 8),
          // Every expiry is another one, so that "next to expire" is one entry.
          ttlMs: pick([1000, 20_000, 90_000, 450_000]) + step,
          afterHit: random() < 0.4,
        });
        const [id, derivedKey] = [callId(), random() < 0.2];
        const [index, isRight, kind] = [recent(), random() < 0.7, random()];
        last = () =>
          both('put', async (side) => {
            const at = kind < 0.15 ? await revisionOf(side, index, isRight) : undefined;
            const precondition = kind > 0.9 ? ('absent' as const) : at;
            return side.store.put({ id, entry, derivedKey, ...(precondition === undefined ? {} : { precondition }) });
          });
        await last();
      },
    ],
    [
      30,
      async () => {
        const key = keyOf();
        const prompt = random() < 0.1 ? undefined : proofOf(tokensOf(), key);
        const rest = {
          minTokens: pick([1, 64, 64, 100]),
          compatGroup: pick(['', '', 'x']),
          deadlineMs: pick([500, 5000, 120_000]),
        };
        const id = callId();
        const [index, isRight, hasCondition] = [recent(), random() < 0.7, random() < 0.15];
        last = () =>
          both('take', async (side) => {
            const precondition = hasCondition ? await revisionOf(side, index, isRight) : undefined;
            return side.store.take({
              id,
              key,
              ...rest,
              ...(prompt === undefined ? {} : { prove: prompt }),
              ...(precondition === undefined ? {} : { precondition }),
            });
          });
        await last();
      },
    ],
    [
      20,
      async () => {
        const [index, how, owner] = [
          known('claims'),
          pick(['commit', 'release', 'release']),
          pick(['t', 'u', 'any', 'any']),
        ];
        const mayEnd = ({ tenant }: { readonly tenant: string }) => owner === 'any' || owner === tenant;
        await both(how, (side) => {
          const claimId = side.claims[index] ?? `c-${side.store.runId}-zzz`;
          return how === 'commit' ? side.store.commit(claimId, mayEnd) : side.store.release(claimId, mayEnd);
        });
      },
    ],
    [
      8,
      async () => {
        const call = {
          id: callId(),
          instanceId: pick(['d1', 'd2', 'd3']),
          max: pick([1, 2, 5]),
          queuedOnly: random() < 0.5,
          spareAfterHitMs: pick([0, 2000, 60_000, 1_000_000]),
          deadlineMs: pick([500, 60_000]),
        };
        last = () => both('free', (side) => side.store.takeForRelease(call));
        await last();
      },
    ],
    [
      6,
      async () => {
        const [id, index, tenant] = [callId(), known('entries'), pick([undefined, 't'])];
        last = () =>
          both('delete', (side) =>
            side.store.delete({ id, entryId: entryOf(side, index), tenant, revision: undefined }),
          );
        await last();
      },
    ],
    [
      2,
      async () => {
        const [id, instanceId, keep] = [callId(), pick(['d1', 'd2', 'd3']), pick([1, 2])];
        last = () =>
          both('invalidate', (side) =>
            side.store.invalidateOwner({ id, instanceId, keep: ({ generation }) => generation === keep }),
          );
        await last();
      },
    ],
    [4, async () => last?.()],
    [
      10,
      async () => {
        time.now += pick([1, 300, 700, 5000, 30_000]);
      },
    ],
    [
      6,
      async () => {
        const [key, index, tenant] = [keyOf(), known('entries'), pick([undefined, 't'])];
        await both('look', (side) => side.store.get({ kind: 'key', key }));
        await both('look', (side) => side.store.get({ kind: 'entry', entryId: entryOf(side, index), tenant }));
      },
    ],
    [
      4,
      async () => {
        const filter = pick<StoreFilter>([
          {},
          { tenant: 't' },
          { instanceId: 'd1' },
          { tenant: 'u', conversationId: 'a' },
        ]);
        const inOrder = <T extends { readonly instanceId: string }>(owners: readonly T[]) =>
          owners.toSorted((x, y) => (x.instanceId < y.instanceId ? -1 : 1));
        await both('stats', async (side) => {
          const stats = await side.store.stats(filter);
          return { ...stats, owners: inOrder(stats.owners) };
        });
        await both('list', (side) => side.store.list({ filter, after: undefined, size: 1000 }));
      },
    ],
  ];
  const draw = weighted(random, operations);
  for (step = 1; step <= STEPS; step++) await draw()();
  await both('stats', async (side) => ({ ...(await side.store.stats({})), owners: [] }));
  expect(sides[0].entries.length).toBeGreaterThan(30);
  expect(words.size).toBeGreaterThan(3);
});
