import { test } from 'vitest';
import { expectSoak } from './soak-run.ts';

const SEED = Number(process.env['BATON_SEED'] ?? Math.floor(Math.random() * 2 ** 31));
const TURNS = 50_000;

test(`${TURNS} turns over engines whose templates, adapters and pictures change (seed ${SEED})`, async () => {
  await expectSoak(TURNS, SEED);
});
