import { describe, expect, test } from 'vitest';
import { runBalance } from '../support/balance-run.ts';

/** 10,000 requests of skewed sizes through a router, in a time of its own: the same run every time. */
const run = (policy: Parameters<typeof runBalance>[0]['policy']) =>
  runBalance({ policy, requests: 10_000, instances: 10, perInstance: 40, seed: 1 });

describe('10,000 requests of skewed sizes over ten pairs', () => {
  test.each([
    ['power_of_two', 1.3],
    ['least_loaded', 1.3],
    ['consistent_hash', 1.25],
  ] as const)(
    '%s: no instance has more than %f times the mean in flight, at any moment',
    async (policy, most) => {
      for (const balance of Object.values(await run(policy))) {
        expect(balance.overall).toBeLessThanOrEqual(most);
        expect(balance.worst).toBeLessThanOrEqual(most);
      }
    },
    30_000,
  );

  test('round_robin: each instance gets the same number, whatever the sizes do', async () => {
    const { prefill, decode } = await run('round_robin');
    expect([prefill.spread, decode.spread]).toEqual([0, 0]);
    // What turns alone do to the load: the limits above are no matter of course.
    expect(prefill.worst).toBeGreaterThan(1.3);
  }, 30_000);
});
