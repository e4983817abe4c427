import { expect, test } from 'vitest';
import { RetryBudget } from '../../src/services/retry-budget.ts';

/** Retries that `budget` gives at once. */
function takeAll(budget: RetryBudget): number {
  let taken = 0;
  while (taken < 1000 && budget.take()) taken += 1;
  return taken;
}

function earn(budget: RetryBudget, requests: number): void {
  for (let i = 0; i < requests; i += 1) budget.earn();
}

test('a quiet process may retry ten times at once', () => {
  expect(takeAll(new RetryBudget(20))).toBe(10);
});

test.each([
  [20, 5, 1],
  [20, 4, 0],
  [10, 10, 1],
  [10, 9, 0],
  [7, 100, 7],
  [100, 3, 3],
])('%i %% of %i requests are %i retries', (percent, requests, retries) => {
  const budget = new RetryBudget(percent);
  takeAll(budget);
  earn(budget, requests);
  expect(takeAll(budget)).toBe(retries);
});

test('more than the reserve is never saved', () => {
  const budget = new RetryBudget(50);
  earn(budget, 10_000);
  expect(takeAll(budget)).toBe(10);
});

test('0 % is no retry at all', () => {
  const budget = new RetryBudget(0);
  earn(budget, 1000);
  expect(budget.take()).toBe(false);
});
