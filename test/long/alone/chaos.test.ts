import { test } from 'vitest';
import { runChaos } from '../chaos-run.ts';

/** `BATON_SEED=n` repeats what happens to the engines; `BATON_SECONDS=n` makes it shorter or longer. */
const SEED = Number(process.env['BATON_SEED'] ?? Math.floor(Math.random() * 2 ** 31));
const SECONDS = Number(process.env['BATON_SECONDS'] ?? 60);

test(`200 conversations while engines fail, stop, leave and come for ${SECONDS} s (seed ${SEED})`, async () => {
  await runChaos(SECONDS * 1000, SEED);
});
