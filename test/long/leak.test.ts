import { expect, test } from 'vitest';
import { runRequests, slopeOf } from './leak-run.ts';

test('50,000 requests, of which clients leave one in ten, leave nothing in memory', { timeout: 900_000 }, async () => {
  await runRequests(50_000);
});

test('a slope is found among samples that go up and down', () => {
  const noise = [3000, -2000, 500, -1500, 0, 2500, -2500];
  const samples = noise.map((off, index) => ({ requests: 1000 * index, heap: 1e6 + 40_000 * index + off }));
  expect(slopeOf(samples)).toBeCloseTo(40, 0);
});
