import { test } from 'vitest';
import { runChaos } from './chaos-run.ts';

const SEED = Number(process.env['BATON_SEED'] ?? Math.floor(Math.random() * 2 ** 31));

test(`200 conversations while engines fail, stop, leave and come for 10 minutes (seed ${SEED})`, async () => {
  await runChaos(600_000, SEED);
});
