import { expect, test } from 'vitest';
import { expectSoak, runSoak } from './soak-run.ts';

/** `BATON_SEED=n` repeats what clients say and what is done to the engines; `BATON_TURNS=n` makes it shorter or longer. */
const SEED = Number(process.env['BATON_SEED'] ?? Math.floor(Math.random() * 2 ** 31));
const TURNS = Number(process.env['BATON_TURNS'] ?? 1500);

test(`${TURNS} turns over engines whose templates, adapters and pictures change (seed ${SEED})`, async () => {
  await expectSoak(TURNS, SEED);
});

test(`without the guard the same turns are answered wrongly (seed ${SEED})`, async () => {
  const flags = { 'reuse-guard': 'off', 'unsafe-reuse': 'true' };
  const { wrong } = await runSoak(Math.min(TURNS, 600), SEED, { flags });
  expect(wrong.length).toBeGreaterThan(0);
});
