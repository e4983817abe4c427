import { describe, expect, test } from 'vitest';
import { AgingMap } from '../../src/stores/aging-map.ts';
import { Heap, type HeapNode } from '../../src/stores/heap.ts';
import { MEMORY_BOUNDS, MemoryStore } from '../../src/stores/memory.ts';
import { joinUnambiguously } from '../../src/stores/memory-slots.ts';
import { Sequence } from '../../src/stores/sequence.ts';
import { callId, ids, KEY, limits, newEntry, proofOf, type TestTime } from '../support/kv-store.ts';

describe('heap', () => {
  test('gives the smallest, whatever came and went', () => {
    const heap = new Heap<number>();
    const nodes: HeapNode<number>[] = [];
    let state = 7;
    for (let step = 0; step < 5000; step++) {
      state = (state * 48_271) % 2_147_483_647;
      if (state % 3 === 0 && nodes.length > 0) {
        const [node] = nodes.splice(state % nodes.length, 1);
        if (node !== undefined) heap.remove(node);
      } else nodes.push(heap.push(step, state % 1000));
      expect(heap.size).toBe(nodes.length);
      if (step % 50 === 0) expect(heap.peek()?.priority).toBe(Math.min(...nodes.map(({ priority }) => priority)));
    }
    const left: number[] = [];
    for (let next = heap.peek(); next !== undefined; next = heap.peek()) {
      left.push(next.priority);
      heap.remove(next);
    }
    expect(left).toEqual(nodes.map(({ priority }) => priority).sort((a, b) => a - b));
  });
});

describe('aging map', () => {
  test('forgets at the end of the lifetime, and at its bounds the oldest', () => {
    const map = new AgingMap<number>({ lifetimeMs: 100, maxCount: 3, maxBytes: 10 });
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
  });
});

describe('sequence', () => {
  test('goes on after any number, over gaps', () => {
    const sequence = new Sequence<number>();
    const numbers = [1, 2, 1023, 1024, 1025, 5000, 900_000];
    for (const number of numbers) sequence.add(number, number);
    sequence.delete(1024);
    sequence.delete(77);
    expect([...sequence.after(0)]).toEqual([1, 2, 1023, 1025, 5000, 900_000]);
    expect([...sequence.after(2)]).toEqual([1023, 1025, 5000, 900_000]);
    expect([...sequence.after(1023)]).toEqual([1025, 5000, 900_000]);
    expect([...sequence.after(900_000)]).toEqual([]);
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
    const store = new MemoryStore({ now, limits: limits({ totalBytes: 1e9 }) }, { ...MEMORY_BOUNDS, sweep: 4 });
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
    // 3,000 are due; the take cleared 4 and what it looked at, each look below clears 4 * 256.
    const left: number[] = [];
    do {
      steps += 1;
      left.push((await store.stats({})).entries);
    } while (left.at(-1) !== 0 && steps < 10);
    expect(left).toEqual([3000 - 5 - 1024, 3000 - 5 - 2048, 0]);
  });

  test('claims that are over make room before a put is refused', async () => {
    const time: TestTime = { now: 0 };
    const store = new MemoryStore(
      { now: () => time.now, limits: limits({ totalBytes: 9000 }) },
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
