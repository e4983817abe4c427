import { test } from 'vitest';
import { FUZZED } from './fuzz-targets.ts';

const SEED = Number(process.env['BATON_SEED'] ?? Math.floor(Math.random() * 2 ** 31));

test.each(FUZZED)(`%s: anything for 10 minutes (seed ${SEED})`, async (what, fuzz) => {
  const sent = await fuzz(600, SEED);
  process.stderr.write(`${what}: ${sent} sent\n`);
});
