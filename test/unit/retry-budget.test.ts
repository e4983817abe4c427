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
  expect(takeAll(new RetryBudget({ budgetPercent: 20 }, () => 0))).toBe(10);
});

test.each([
  [20, 5, 1],
  [20, 4, 0],
  [10, 10, 1],
  [10, 9, 0],
  [7, 100, 7],
  [100, 3, 3],
])('%i %% of %i requests are %i retries', (percent, requests, retries) => {
  const budget = new RetryBudget({ budgetPercent: percent }, () => 0);
  takeAll(budget);
  earn(budget, requests);
  expect(takeAll(budget)).toBe(retries);
});

test('a busy process saves what it earned lately and no more', () => {
  let now = 0;
  const budget = new RetryBudget({ budgetPercent: 20 }, () => now);
  for (; now < 100_000; now += 10) earn(budget, 1);
  // 100 requests a second: 20 retries a second, of at most two windows of 10 s.
  const saved = takeAll(budget);
  expect(saved).toBeGreaterThanOrEqual(200);
  expect(saved).toBeLessThanOrEqual(400);
});

test('what was saved shrinks to the reserve when there is no traffic any more', () => {
  let now = 0;
  const budget = new RetryBudget({ budgetPercent: 50 }, () => now);
  earn(budget, 10_000);
  now = 60_000;
  earn(budget, 1);
  expect(takeAll(budget)).toBe(10);
});

test('0 % is no retry at all', () => {
  const budget = new RetryBudget({ budgetPercent: 0 }, () => 0);
  earn(budget, 1000);
  expect(budget.take()).toBe(false);
});
