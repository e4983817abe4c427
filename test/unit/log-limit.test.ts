import { expect, test } from 'vitest';
import { createLogLimit } from '../../src/obs/log-limit.ts';

test('one event passes per interval and tells how many were held back', () => {
  let now = 5;
  const limit = createLogLimit(60, () => now);
  expect(limit.pass()).toBe(0);
  expect(limit.pass()).toBeUndefined();
  now = 64;
  expect(limit.pass()).toBeUndefined();
  now = 65;
  expect(limit.pass()).toBe(2);
  now = 124;
  expect(limit.pass()).toBeUndefined();
  now = 1000;
  expect(limit.pass()).toBe(1);
  now = 1060;
  expect(limit.pass()).toBe(0);
});

test('two limits do not count together', () => {
  const [a, b] = [createLogLimit(60, () => 0), createLogLimit(60, () => 0)];
  expect([a.pass(), b.pass(), a.pass()]).toEqual([0, 0, undefined]);
});
