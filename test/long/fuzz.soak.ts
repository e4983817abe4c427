import { test } from 'vitest';
import { FUZZED } from './fuzz-targets.ts';

/** `BATON_SEED=n` repeats what is sent; `BATON_SECONDS=n` makes each shorter or longer. */
const SEED = Number(process.env['BATON_SEED'] ?? Math.floor(Math.random() * 2 ** 31));
const SECONDS = Number(process.env['BATON_SECONDS'] ?? 600);

test.each(FUZZED)(`%s: anything for ${SECONDS} s (seed ${SEED})`, async (what, fuzz) => {
  const sent = await fuzz(SECONDS, SEED);
  process.stderr.write(`${what}: ${sent} sent\n`);
});
