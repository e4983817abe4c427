import { describe, expect, test } from 'vitest';
import { BatonError } from '../../src/core/errors.ts';
import { AgingMap } from '../../src/stores/aging-map.ts';
import { joinUnambiguously, sizeOf } from '../../src/stores/entry.ts';
import { AgingRows } from '../../src/stores/memory/aging-rows.ts';
import { ClaimTable } from '../../src/stores/memory/claims.ts';
import { familyIdOf } from '../../src/stores/memory/families.ts';
import { Heap } from '../../src/stores/memory/heap.ts';
import { NumberLists } from '../../src/stores/memory/number-lists.ts';
import { ReplayWindow } from '../../src/stores/memory/replay-window.ts';
import { RowIndex } from '../../src/stores/memory/row-index.ts';
import { Rows } from '../../src/stores/memory/rows.ts';
import { Sequence } from '../../src/stores/memory/sequence.ts';
import { Shared } from '../../src/stores/memory/shared.ts';
import { MEMORY_BOUNDS, MemoryStore } from '../../src/stores/memory/store.ts';
import { ShardedMap } from '../../src/stores/sharded-map.ts';
import { callId, ids, KEY, limits, newEntry, proofOf, type TestTime } from '../support/kv-store.ts';
import { seeded } from '../support/seeded.ts';

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
    const index = new RowIndex(rows, { hash: 0, next: 1 });
    const row = (hash: number) => {
      const added = rows.acquire();
      rows.set(added, 0, hash);
      index.add(added);
      return added;
    };
    const [a, b, c, d] = [row(-7), row(-7), row(-7), row(8)];
    const found = (...hashes: readonly number[]) => hashes.map((hash) => [...index.of(hash)]);
    expect(found(-7, 8, 9)).toEqual([[c, b, a], [d], []]);
    index.delete(b);
    expect(found(-7)).toEqual([[c, a]]);
    index.delete(c);
    index.delete(d);
    expect(found(-7, 8)).toEqual([[a], []]);
    index.delete(a);
    expect(found(-7)).toEqual([[]]);
  });

  test('are found while the index grows, whatever their hashes have in common', () => {
    const rows = new Rows(2);
    const index = new RowIndex(rows, { hash: 0, next: 1 });
    const known = new Map<number, number[]>();
    const hashes: number[] = [];
    const random = seeded(5);
    for (let step = 0; step < 20_000; step++) {
      // Some hashes are equal, some share their low bits, and some have all 32.
      const hash = step % 3 === 0 ? (step % 64) * 4096 : Math.floor(random() * 2 ** 32) - 2 ** 31;
      const row = rows.acquire();
      rows.set(row, 0, hash);
      index.add(row);
      known.set(hash, [row, ...(known.get(hash) ?? [])]);
      hashes.push(hash);
      if (step % 4 > 0) continue;
      const other = hashes[Math.floor(random() * hashes.length)] ?? 0;
      const [gone, ...left] = known.get(other) ?? [];
      if (gone === undefined) continue;
      index.delete(gone);
      rows.release(gone);
      known.set(other, left);
    }
    expect(known.size).toBeGreaterThan(13_000);
    const wrong = [...known].filter(([hash, expected]) => [...index.of(hash)].join() !== expected.join());
    expect(wrong).toEqual([]);
  });
});

test('lists of numbers are kept, and their rows used again', () => {
  const lists = new NumberLists();
  const kept = [[], [7], [1.5, 2 ** 50, -3]];
  const numbers = kept.map((list) => lists.write(list));
  expect(numbers.map((number) => lists.read(number))).toEqual(kept);
  lists.free(numbers[2] ?? -1);
  const again = lists.write([4, 5, 6]);
  expect(again).toBeLessThan(4);
  expect([lists.read(again), lists.read(numbers[1] ?? -1)]).toEqual([[4, 5, 6], [7]]);
});

test('families are kept while they have a member', () => {
  const { owner, connector } = newEntry();
  const family = { tenant: 't', model: 'm', adapter: '', owner, connector };
  const families = new Shared(familyIdOf);
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

describe('aging map and aging rows', () => {
  const bounds = { lifetimeMs: 100, maxCount: 3, maxBytes: 10 };
  const keyOf = (name: string) => [name === 'e' ? 1 : 2, name.charCodeAt(0), -5];
  /** Of names and values, whatever keeps them. */
  const kinds: Record<string, (forgotten: number[]) => Pick<AgingMap<string, number>, 'get' | 'set' | 'trim'>> = {
    map: (forgotten) => new AgingMap({ ...bounds, onForgotten: (value) => forgotten.push(value) }),
    rows: (forgotten) => {
      const rows = new AgingRows(
        { key: 3, value: 2 },
        { ...bounds, onForgotten: ([half = 0, other]) => forgotten.push(other === half ? 2 * half : -1) },
      );
      return {
        get: (key, now) => rows.get(keyOf(key), now)?.reduce((sum, half) => sum + half, 0),
        set: (key, value, now, bytes = 0) => rows.set(keyOf(key), [value / 2, value / 2], now, bytes),
        trim: (now, batch) => rows.trim(now, batch),
      };
    },
  };

  test.each(Object.entries(kinds))('forget at the end of the lifetime, and at its bounds the oldest: %s', (_, open) => {
    const forgotten: number[] = [];
    const map = open(forgotten);
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
    expect(forgotten).toEqual([2, 1, 3, 4, 5]);
    map.set('f', 7, 2000);
    expect([map.get('e', 2000), map.get('f', 2000)]).toEqual([undefined, 7]);
    expect(forgotten).toEqual([2, 1, 3, 4, 5, 6]);
    // Larger than all that is allowed: nothing is kept.
    map.set('g', 8, 2000, 11);
    expect([map.get('f', 2000), map.get('g', 2000)]).toEqual([undefined, undefined]);
  });
});

describe('replay window', () => {
  test('tells an answer again to the same request alone', () => {
    const forgotten: (readonly number[])[] = [];
    const answers = new ReplayWindow({
      lifetimeMs: 100,
      maxCount: 3,
      onForgotten: (answer) => void forgotten.push(answer),
    });
    const id = (key: string, request = key, scope = 's') => callId(key, request, scope);
    expect(answers.remember(id('a'), [1, 2, 3, 4, 5], 0)).toEqual([1, 2, 3, 4, 5]);
    answers.remember(id('b'), [], 10);
    expect([answers.find(id('a'), 99), answers.find(id('b'), 99)]).toEqual([[1, 2, 3, 4, 5], []]);
    expect(answers.find(id('a', 'a', 'other'), 99)).toBeUndefined();
    expect(() => answers.find(id('b', 'another request'), 99)).toThrow(BatonError);
    expect(answers.find(id('a'), 100)).toBeUndefined();
    // One that is too old may be there still: the newer counts.
    answers.remember(id('a'), [6], 100);
    expect([answers.find(id('a'), 150), forgotten]).toEqual([[6], [[1, 2, 3, 4, 5]]]);
    answers.trim(120, 5);
    expect(forgotten).toEqual([[1, 2, 3, 4, 5], []]);
  });

  test('holds no more than its bound with what its answers hold elsewhere', () => {
    const answers = new ReplayWindow({ lifetimeMs: 1e9, maxCount: 1e6, maxBytes: 100_000 });
    const calls = Array.from({ length: 50 }, () => callId());
    for (const [index, call] of calls.entries()) answers.remember(call, [index], index, 9000);
    const kept = calls.flatMap((call) => answers.find(call, 50) ?? []);
    expect(kept).toEqual(Array.from({ length: 10 }, (_, index) => 40 + index));
  });
});

test('a claim is known while it is open and for a while after, and told as long as its answer is', () => {
  const claims = new ClaimTable('r', { lifetimeMs: 100, maxCount: 10 });
  const open = (seq: number, deadline: number) =>
    claims.add({
      tenant: `t${seq % 3}`,
      seq,
      slotRow: 10 * seq,
      forRelease: seq % 2 === 0,
      deadline,
      revision: 7,
      matchedTokens: 64,
    });
  const [first, second, third] = [open(1, 300), open(2, 100), open(3, 200)];
  expect([first.id, second.id, claims.open, claims.next()?.seq]).toEqual(['c-r-1', 'c-r-2', 3, 2]);
  for (const stranger of ['c-r-4', 'c-r-01', 'c-r-1 ', 'c-r-', 'c-r-1.5', 'c-x-1', 'c-r--1', '']) {
    expect(claims.find(stranger, 0)).toBeUndefined();
  }
  claims.end(second, 'committed', 50);
  expect([claims.open, claims.next()?.seq, claims.find('c-r-2', 149)?.state]).toEqual([2, 3, 'committed']);
  expect(claims.find('c-r-2', 150)).toBeUndefined();
  expect(claims.find('c-r-1', 1e9)).toMatchObject({
    tenant: 't1',
    seq: 1,
    slotRow: 10,
    forRelease: false,
    deadline: 300,
  });
  claims.trim(150, 10);
  // Nobody can name it, and its answer tells what it was.
  expect(claims.at(second.row)).toMatchObject({ id: 'c-r-2', tenant: 't2', state: 'committed', matchedTokens: 64 });
  claims.letGo(second);
  const fourth = open(4, 400);
  expect([fourth.row, fourth.id]).toEqual([second.row, 'c-r-4']);
  claims.letGo(third);
  expect(claims.find('c-r-3', 150)).toMatchObject({ seq: 3, state: 'open', revision: 7 });
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
