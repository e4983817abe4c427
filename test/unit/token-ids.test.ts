import fc from 'fast-check';
import { expect, test } from 'vitest';
import { isSameIds, tokenIdsJson } from '../../src/core/token-ids.ts';

const text = (ids: readonly number[]) => new TextDecoder().decode(tokenIdsJson(ids));

test('token ids are written as JSON writes them', () => {
  const id = fc.oneof(fc.nat(300), fc.nat(200_000), fc.integer({ min: 0, max: Number.MAX_SAFE_INTEGER }));
  fc.assert(
    fc.property(fc.array(id), (ids) => {
      expect(text(ids)).toBe(JSON.stringify(ids));
    }),
  );
  const edges = Array.from({ length: 16 }, (_, i) => [10 ** i - 1, 10 ** i]).flat();
  expect(text(edges)).toBe(JSON.stringify(edges));
});

test('a list is written once', () => {
  const ids = [1, 2, 3];
  expect(tokenIdsJson(ids)).toBe(tokenIdsJson(ids));
  expect(text([1, 2, 3])).toBe('[1,2,3]');
});

test.each([
  [[1, 2], [1, 2], true],
  [[], [], true],
  [[1, 2], [1, 3], false],
  [[1], [1, 2], false],
  [[1, 2], [1], false],
  [undefined, [], false],
] as const)('%j and %j', (used, wanted, same) => {
  expect(isSameIds(used, wanted)).toBe(same);
});
