import { expect, test } from 'vitest';
import { runSoak } from './soak-run.ts';

const SEED = Number(process.env['BATON_SEED'] ?? Math.floor(Math.random() * 2 ** 31));
const TURNS = 50_000;

test(`${TURNS} turns over engines whose templates, adapters and pictures change (seed ${SEED})`, async () => {
  const { wrong, unexcused, outcomes } = await runSoak(TURNS, SEED);
  expect(wrong).toEqual([]);
  expect(unexcused).toEqual([]);
  for (const outcome of ['hit', 'hit_cut']) expect(outcomes['all']?.[outcome]).toBeGreaterThan(TURNS / 50);
});
