import { describe, expect, test } from 'vitest';
import { BatonError } from '../../src/core/errors.ts';
import { AgingMap } from '../../src/stores/aging-map.ts';
import { joinUnambiguously, sizeOf } from '../../src/stores/entry.ts';
import { Families } from '../../src/stores/memory/families.ts';
import { Heap } from '../../src/stores/memory/heap.ts';
import { PutAnswers } from '../../src/stores/memory/put-answers.ts';
import { RowIndex } from '../../src/stores/memory/row-index.ts';
import { Rows } from '../../src/stores/memory/rows.ts';
import { Sequence } from '../../src/stores/memory/sequence.ts';
import { MEMORY_BOUNDS, MemoryStore } from '../../src/stores/memory/store.ts';
import { ShardedMap } from '../../src/stores/sharded-map.ts';
import { callId, ids, KEY, limits, newEntry, proofOf, type TestTime } from '../support/kv-store.ts';

describe('heap', () => {
  test('gives the smallest, whatever came and went', () => {
    interface Item {
      readonly priority: number;
      place: number;
    }
    const heap = new Heap<Item>({
      priority: ({ priority }) => priority,
      place: ({ place }) => place,
      setPlace: (item, place) => {
        item.place = place;
      },
    });
    const items: Item[] = [];
    let state = 7;
    for (let step = 0; step < 5000; step++) {
      state = (state * 48_271) % 2_147_483_647;
      if (state % 3 === 0 && items.length > 0) {
        const [item] = items.splice(state % items.length, 1);
        if (item !== undefined) heap.remove(item);
      } else {
        const item = { priority: state % 1000, place: -1 };
        heap.push(item);
        items.push(item);
      }
      expect(heap.size).toBe(items.length);
      if (step % 50 === 0) expect(heap.peek()?.priority).toBe(Math.min(...items.map(({ priority }) => priority)));
    }
    const left: number[] = [];
    for (let next = heap.peek(); next !== undefined; next = heap.peek()) {
      left.push(next.priority);
      heap.remove(next);
    }
    expect(left).toEqual(items.map(({ priority }) => priority).sort((a, b) => a - b));
  });
});

describe('rows', () => {
  test('hold what was written, and are used again', () => {
    const rows = new Rows(3);
    const used = Array.from({ length: 3000 }, () => rows.acquire());
    expect(new Set(used).size).toBe(3000);
    for (const row of used) for (const column of [0, 1, 2]) rows.set(row, column, row * 1e9 + column);
    rows.release(5);
    rows.release(2000);
    expect([rows.acquire(), rows.acquire(), rows.acquire()]).toEqual([2000, 5, 3000]);
    for (const row of used.filter((row) => row !== 5 && row !== 2000)) {
      expect([0, 1, 2].map((column) => rows.get(row, column))).toEqual([0, 1, 2].map((column) => row * 1e9 + column));
    }
  });

  test('are found by a hash that several share, newest first', () => {
    const rows = new Rows(2);
    const index = new RowIndex(rows, 1);
    const [a, b, c, d] = [rows.acquire(), rows.acquire(), rows.acquire(), rows.acquire()];
    for (const row of [a, b, c]) index.add(-7, row);
    index.add(8, d);
    expect([[...index.of(-7)], [...index.of(8)], [...index.of(9)]]).toEqual([[c, b, a], [d], []]);
    index.delete(-7, b);
    expect([...index.of(-7)]).toEqual([c, a]);
    index.delete(-7, c);
    index.delete(8, d);
    expect([[...index.of(-7)], [...index.of(8)]]).toEqual([[a], []]);
    index.delete(-7, a);
    index.add(-7, d);
    expect([...index.of(-7)]).toEqual([d]);
  });
});

test('families are kept while they have a member', () => {
  const { owner, connector } = newEntry();
  const family = { tenant: 't', model: 'm', adapter: '', owner, connector };
  const families = new Families();
  const first = families.join(family);
  expect(families.join({ ...family, owner: { ...owner } })).toBe(first);
  const other = families.join({ ...family, owner: { ...owner, life: { ...owner.life, generation: 2 } } });
  expect(other).not.toBe(first);
  families.leave(first);
  expect(families.get(first)).toEqual(family);
  families.leave(first);
  expect(() => families.get(first)).toThrow('not kept');
  expect(families.join({ ...family, tenant: 'u' })).toBe(first);
  expect([families.get(first).tenant, families.get(other).owner.life.generation]).toEqual(['u', 2]);
});

test('a sharded map is a map', () => {
  const map = new ShardedMap<string | number, number>();
  const keys = Array.from({ length: 500 }, (_, index) => (index % 2 === 0 ? `key-${index}` : -index));
  for (const [index, key] of keys.entries()) map.set(key, index);
  for (const key of keys.slice(100, 200)) map.delete(key);
  map.delete('never there');
  map.set('key-0', 1000);
  expect(map.size).toBe(400);
  expect(keys.map((key) => map.get(key))).toEqual(
    keys.map((_, index) => (index === 0 ? 1000 : index >= 100 && index < 200 ? undefined : index)),
  );
});

describe('aging map', () => {
  test('forgets at the end of the lifetime, and at its bounds the oldest', () => {
    const forgotten: number[] = [];
    const map = new AgingMap<string, number>({
      lifetimeMs: 100,
      maxCount: 3,
      maxBytes: 10,
      onForgotten: (value) => forgotten.push(value),
    });
    map.set('a', 1, 0, 2);
    map.set('b', 2, 10, 2);
    expect([map.get('a', 99), map.get('a', 100), map.get('b', 100)]).toEqual([1, undefined, 2]);
    map.set('b', 3, 20, 2);
    map.set('c', 4, 30, 2);
    map.set('d', 5, 30, 2);
    expect(['a', 'b', 'c', 'd'].map((key) => map.get(key, 40))).toEqual([undefined, 3, 4, 5]);
    map.set('e', 6, 40, 7);
    expect(['b', 'c', 'd', 'e'].map((key) => map.get(key, 40))).toEqual([undefined, undefined, 5, 6]);
    map.trim(1000, 1);
    expect(map.size).toBe(1);
    map.set('f', 7, 2000);
    expect([map.size, map.get('f', 2000)]).toEqual([1, 7]);
    expect(forgotten).toEqual([2, 1, 3, 4, 5, 6]);
  });
});

describe('answers of puts', () => {
  const answer = (seq: number, at: number, displaced: readonly string[] = []) => ({
    seq,
    revision: 2 * seq,
    at,
    displaced,
  });

  test('are told again to the same request alone, and forgotten with age and number', () => {
    const answers = new PutAnswers({ lifetimeMs: 100, maxCount: 3, maxBytes: 1000 });
    const id = (key: string, request = key, scope = 's') => callId(key, request, scope);
    answers.remember(id('a'), answer(1, 0, ['e-1', 'e-2']));
    answers.remember(id('b'), answer(2, 10));
    expect(answers.find(id('a'), 99)).toEqual(answer(1, 0, ['e-1', 'e-2']));
    expect(answers.find(id('a', 'a', 'other'), 99)).toBeUndefined();
    expect(() => answers.find(id('b', 'another request'), 99)).toThrow(BatonError);
    expect([answers.find(id('a'), 100), answers.find(id('b'), 100)]).toEqual([undefined, answer(2, 10)]);
    // Its row may be there still: the newer answer counts.
    answers.remember(id('a'), answer(3, 50));
    expect(answers.find(id('a'), 60)).toEqual(answer(3, 50));
    answers.remember(id('c'), answer(4, 60));
    answers.remember(id('d'), answer(5, 60));
    expect(['a', 'b', 'c', 'd'].map((key) => answers.find(id(key), 70)?.seq)).toEqual([3, undefined, 4, 5]);
    answers.trim(1000, 10);
    answers.remember(id('e'), answer(6, 1000));
    expect(['a', 'c', 'd', 'e'].map((key) => answers.find(id(key), 1000)?.seq)).toEqual([
      undefined,
      undefined,
      undefined,
      6,
    ]);
  });

  test('take no more than their bound with what they displaced', () => {
    const answers = new PutAnswers({ lifetimeMs: 1e9, maxCount: 1e6, maxBytes: 1000 });
    const calls = Array.from({ length: 50 }, () => callId());
    for (const [index, call] of calls.entries()) answers.remember(call, answer(index, index, ['x'.repeat(100)]));
    expect(calls.map((call) => answers.find(call, 50)?.seq ?? -1).filter((seq) => seq >= 0)).toEqual(
      Array.from({ length: 10 }, (_, index) => 40 + index),
    );
  });
});

describe('sequence', () => {
  test('goes on after any number, over gaps', () => {
    const sequence = new Sequence();
    const numbers = [1, 2, 1023, 1024, 1025, 5000, 900_000];
    for (const number of numbers) sequence.add(number, number);
    sequence.delete(1024);
    sequence.delete(77);
    expect([...sequence.after(0)]).toEqual([1, 2, 1023, 1025, 5000, 900_000]);
    expect([...sequence.after(2)]).toEqual([1023, 1025, 5000, 900_000]);
    expect([...sequence.after(1023)]).toEqual([1025, 5000, 900_000]);
    expect([...sequence.after(900_000)]).toEqual([]);
    expect([1, 1024, 5000, 5001].map((number) => sequence.get(number))).toEqual([1, undefined, 5000, undefined]);
  });
});

test('joined parts differ wherever the parts do', () => {
  const lists = [['a', 'b'], ['ab', ''], ['', 'ab'], ['1:a', 'b'], ['a1:b', ''], ['a', '1:b'], ['a'], []];
  expect(new Set(lists.map(joinUnambiguously)).size).toBe(lists.length);
});

describe('bounded work', () => {
  test('a call clears no more than its share of what is due, and sees none of it', async () => {
    const time: TestTime = { now: 0 };
    let steps = 0;
    const now = () => time.now;
    const store = new MemoryStore({ now, limits: limits({ totalBytes: 1e9 }) }, { ...MEMORY_BOUNDS, sweep: 32 });
    for (let index = 0; index < 3000; index++) {
      await store.put({
        id: callId(),
        entry: newEntry({ key: { conversationId: `c${index}` }, tokens: ids(64), ttlMs: 1000 + index / 10_000 }),
        derivedKey: false,
      });
    }
    time.now = 2000;
    const key = { ...KEY, conversationId: 'c2999' };
    const call = { key, prove: proofOf(ids(64), key), minTokens: 1, compatGroup: '', deadlineMs: 1000 };
    expect(await store.take({ ...call, id: callId() })).toMatchObject({ kind: 'miss' });
    // 3,000 are due; the take cleared 32 and what it looked at, each look below clears 32 * 32.
    const left: number[] = [];
    do {
      steps += 1;
      left.push((await store.stats({})).entries);
    } while (left.at(-1) !== 0 && steps < 10);
    expect(left).toEqual([3000 - 33 - 1024, 3000 - 33 - 2048, 0]);
  });

  test('claims that are over make room before a put is refused', async () => {
    const time: TestTime = { now: 0 };
    const store = new MemoryStore(
      { now: () => time.now, limits: limits({ totalBytes: 4.5 * sizeOf(newEntry({ tokens: null })) }) },
      { ...MEMORY_BOUNDS, sweep: 0 },
    );
    const put = (conversationId: string) =>
      store.put({ id: callId(), entry: newEntry({ key: { conversationId }, tokens: null }), derivedKey: false });
    for (const conversationId of ['a', 'b', 'c', 'd']) {
      await put(conversationId);
      const key = { ...KEY, conversationId };
      await store.take({ id: callId(), key, minTokens: 1, compatGroup: '', deadlineMs: 1000 });
    }
    await expect(put('e')).rejects.toMatchObject({ reason: 'LIMIT_EXCEEDED' });
    time.now = 1000;
    expect((await put('e')).displaced).toEqual([]);
  });

  test('what is remembered of the dead, of answers and of claims has bounds', async () => {
    const time: TestTime = { now: 0 };
    const bounds = { ...MEMORY_BOUNDS, tombstones: 10, replays: 10, endedClaims: 10, queueEntries: 10 };
    const store = new MemoryStore({ now: () => time.now, limits: limits() }, bounds);
    const claims: string[] = [];
    const take = (index: number, id = callId()) => {
      const key = { ...KEY, conversationId: `c${index}` };
      return store.take({ id, key, minTokens: 1, compatGroup: '', deadlineMs: 1000 });
    };
    const first = callId();
    for (let index = 0; index < 30; index++) {
      const key = { conversationId: `c${index}` };
      await store.put({ id: callId(), entry: newEntry({ key }), derivedKey: false });
      const result = await take(index, index === 0 ? first : callId());
      if (result.kind === 'taken') claims.push(result.taken.claimId);
      await store.commit(claims.at(-1) ?? '', () => true);
    }
    expect(claims).toHaveLength(30);
    const reasons = await Promise.all([0, 19, 20, 29].map(async (index) => take(index)));
    expect(reasons.map((result) => (result.kind === 'miss' ? result.reason : 0))).toEqual([1, 1, 3, 3]);
    await expect(store.commit(claims[19] ?? '', () => true)).rejects.toMatchObject({ reason: 'CLAIM_NOT_FOUND' });
    await store.commit(claims[20] ?? '', () => true);
    // The first answer is forgotten: its key begins a new call, which finds nothing, and no claim comes back.
    expect(await take(0, first)).toMatchObject({ kind: 'miss' });
    for (let index = 100; index < 130; index++) {
      const key = { conversationId: `c${index}` };
      const { entry } = await store.put({ id: callId(), entry: newEntry({ key }), derivedKey: false });
      await store.delete({ id: callId(), entryId: entry.entryId, tenant: undefined, revision: undefined });
    }
    expect((await store.stats({})).releaseQueue).toBe(10);
  });
});
