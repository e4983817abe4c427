import { expect, test } from 'vitest';
import { beginsWithIds, isSameIds, tokenIdsJson } from '../../src/core/token-ids.ts';

const text = (ids: readonly number[]) => new TextDecoder().decode(tokenIdsJson(ids));

test('a list is written once', () => {
  const ids = [1, 2, 3];
  expect(tokenIdsJson(ids)).toBe(tokenIdsJson(ids));
  expect(text([1, 2, 4294967295])).toBe('[1,2,4294967295]');
  expect(text([])).toBe('[]');
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

test.each([
  [[1, 2, 3], [1, 2, 4], 2, true],
  [[1, 2], [1, 2], 2, true],
  [[1, 2, 3], [1, 2, 4], 3, false],
  [[1], [1, 2], 2, false],
  [[1, 2, 3], [1, 2], 3, false],
  [undefined, [1], 1, false],
] as const)('%j begins with those of %j, %i of them', (used, wanted, count, begins) => {
  expect(beginsWithIds(used, wanted, count)).toBe(begins);
});
