import { expect, test } from 'vitest';
import { CellPool } from '../../src/stores/memory/cell-pool.ts';
import { seeded } from '../support/seeded.ts';

/** Bytes that differ between strings and along each one. */
function bytesOf(length: number, kind: number): Uint8Array {
  return Uint8Array.from({ length }, (_, index) => (index * 31 + kind * 7 + (index >> 8)) % 251);
}

const LENGTHS = [0, 1, 255, 256, 257, 511, 512, 513, 3000, 70_000];

test('gives any range of what was written back, however it was cut into parts', () => {
  const pool = new CellPool();
  const kept = LENGTHS.map((length, kind) => {
    const bytes = bytesOf(length, kind);
    const third = Math.floor(length / 3);
    return { bytes, first: pool.write([bytes.subarray(0, third), new Uint8Array(0), bytes.subarray(third)]) };
  });
  for (const { bytes, first } of kept) {
    expect(pool.read(first, 0, bytes.length)).toEqual(bytes);
    for (const offset of [1, 200, 256, 300, 600]) {
      const length = Math.max(0, bytes.length - offset - 5);
      if (length > 0) expect(pool.read(first, offset, length)).toEqual(bytes.subarray(offset, offset + length));
    }
  }
});

test('uses the cells again that were given up, and no others', () => {
  const pool = new CellPool();
  const beside = pool.write([bytesOf(1000, 1)]);
  const cut = pool.write([bytesOf(5000, 2)]);
  expect(pool.cut(cut, 600)).toBe(cut);
  const later = [3, 4, 5].map((kind) => ({ kind, first: pool.write([bytesOf(1200, kind)]) }));
  expect(pool.read(beside, 0, 1000)).toEqual(bytesOf(1000, 1));
  expect(pool.read(cut, 0, 600)).toEqual(bytesOf(5000, 2).subarray(0, 600));
  for (const { kind, first } of later) expect(pool.read(first, 0, 1200)).toEqual(bytesOf(1200, kind));
  const highest = Math.max(...later.map(({ first }) => first));
  for (const { first } of later) expect(pool.cut(first, 0)).toBe(-1);
  // 24 cells were used in all: nothing that comes now needs a new one.
  for (let round = 0; round < 100; round++) {
    const first = pool.write([bytesOf(1200, round)]);
    expect(first).toBeLessThanOrEqual(Math.max(highest, 24));
    pool.cut(first, 0);
  }
  expect(pool.read(beside, 0, 1000)).toEqual(bytesOf(1000, 1));
});

test('compares and reads texts as a copy of their bytes would', () => {
  const pool = new CellPool();
  const random = seeded(11);
  const letters = ['a', 'é', '漢', '🎽'];
  for (let round = 0; round < 300; round++) {
    const draw = (most: number) =>
      Array.from({ length: Math.floor(random() * most) }, () => letters[Math.floor(random() * 4)]).join('');
    const parts = [draw(60), draw(120)].map((text) => Buffer.from(text));
    const [one = Buffer.alloc(0), other = Buffer.alloc(0)] = parts;
    const first = pool.write([...parts, bytesOf(round, 1)]);
    const wanted = Buffer.concat(parts);
    expect(pool.text(first, 0, one.length)).toBe(one.toString());
    expect(pool.text(first, one.length, other.length)).toBe(other.toString());
    expect(pool.startsWith(first, wanted)).toBe(true);
    if (wanted.length === 0) continue;
    const at = Math.floor(random() * wanted.length);
    wanted[at] = (wanted[at] ?? 0) ^ 1;
    expect(pool.startsWith(first, wanted)).toBe(wanted.equals(pool.read(first, 0, wanted.length)));
    expect(pool.startsWith(first, wanted)).toBe(false);
  }
});
