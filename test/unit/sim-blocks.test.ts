import fc from 'fast-check';
import { expect, test } from 'vitest';
import { BlockPool } from '../../src/sim/blocks.ts';
import { createManualClock } from '../../src/sim/clock.ts';
import { PinTable } from '../../src/sim/pins.ts';

test('any order of takes and releases keeps every block either free or owned, and never hands out an owned one', () => {
  fc.assert(
    fc.property(fc.array(fc.tuple(fc.boolean(), fc.nat(5))), (steps) => {
      const pool = new BlockPool(12, 4);
      const owned: number[][] = [];
      for (const [takes, size] of steps) {
        if (takes) {
          const blocks = pool.take([], size);
          if (blocks !== undefined) owned.push(blocks);
        } else {
          const blocks = owned.splice(size % Math.max(1, owned.length), 1)[0];
          if (blocks !== undefined) pool.release(blocks);
        }
        const held = owned.flat();
        expect(new Set(held).size).toBe(held.length);
        expect(held.every((id) => pool.isBlock(id))).toBe(true);
        expect(pool.freeCount).toBe(11 - held.length);
      }
    }),
  );
});

test('without prefix caching nothing is found again', () => {
  const pool = new BlockPool(4, 2, false);
  const [id = 0] = pool.take([], 1) ?? [];
  pool.file(id, 100);
  expect(pool.findPrefix([100], 1)).toEqual([]);
});

test('a cached prefix survives its release until the block is used again, tails first', () => {
  const pool = new BlockPool(4, 2);
  const blocks = pool.take([], 3) ?? [];
  expect(blocks).toEqual([1, 2, 3]);
  for (const [index, id] of blocks.entries()) pool.file(id, 100 + index);
  pool.release(blocks);
  expect(pool.findPrefix([100, 101, 102], 3)).toEqual([1, 2, 3]);
  expect(pool.take([], 1)).toEqual([3]);
  expect(pool.findPrefix([100, 101, 102], 3)).toEqual([1, 2]);
  expect(pool.findPrefix([100, 101, 102], 1)).toEqual([1]);
  expect(pool.findPrefix([101], 1)).toEqual([2]);
});

test('hits that lie in the free list do not count as free for the rest', () => {
  const pool = new BlockPool(4, 2);
  const blocks = pool.take([], 2) ?? [];
  for (const [index, id] of blocks.entries()) pool.file(id, index);
  pool.release(blocks);
  expect(pool.take(blocks, 2)).toBeUndefined();
  expect(pool.freeCount).toBe(3);
  expect(pool.take(blocks, 1)).toEqual([1, 2, 3]);
  expect(pool.usage).toBe(1);
});

test('content stays after a release and goes only when it is overwritten', () => {
  const pool = new BlockPool(3, 2);
  const [id = 0] = pool.take([], 1) ?? [];
  pool.write(id, 1, 65, 7, 99);
  pool.release([id]);
  expect([pool.tokens[id * 2 + 1], pool.positions[id * 2 + 1], pool.cells[id * 2 + 1]]).toEqual([65, 7, 99]);
});

test('a block that is released twice is a defect of the simulator', () => {
  const pool = new BlockPool(3, 2);
  const blocks = pool.take([], 1) ?? [];
  pool.release(blocks);
  expect(() => pool.release(blocks)).toThrow('released twice');
});

test('a pin ends by notice, by its deadline, which a heartbeat may move, or never', () => {
  const clock = createManualClock();
  const pool = new BlockPool(8, 2);
  let freed = 0;
  const pins = new PinTable(pool, clock, () => {
    freed += 1;
  });
  const add = (requestId: string, kind: 'lease' | 'ttl' | 'leak', ms: number | undefined): void =>
    pins.add({
      requestId,
      kind,
      tokens: 2,
      blocks: pool.take([], 1) ?? [],
      deadline: ms === undefined ? undefined : clock.now() + ms,
    });
  add('a', 'lease', 100);
  add('b', 'lease', 100);
  add('c', 'ttl', 100);
  add('d', 'leak', undefined);
  expect(pins.free('a')).toBe(true);
  expect(pins.free('a')).toBe(false);
  expect(pins.extend('b', clock.now() + 250)).toBe(true);
  expect(pins.extend('c', clock.now() + 250)).toBe(false);
  clock.advance(100);
  expect(pins.list().map((pin) => pin.requestId)).toEqual(['b', 'd']);
  clock.advance(150);
  expect(pins.free('d')).toBe(false);
  clock.advance(1_000_000);
  expect(pins.list().map((pin) => pin.requestId)).toEqual(['d']);
  expect([pins.expired, freed, pool.freeCount]).toEqual([2, 3, 6]);
});
