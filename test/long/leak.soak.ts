import { test } from 'vitest';
import { runRequests } from './leak-run.ts';

const REQUESTS = Number(process.env['BATON_SOAK_REQUESTS'] ?? 2_000_000);

/** Two million take an hour where nothing else runs. */
const TIMEOUT_MS = 6 * 3_600_000;

test(`${REQUESTS} requests, of which clients leave one in ten, leave nothing in memory (BATON_SOAK_REQUESTS)`, {
  timeout: TIMEOUT_MS,
}, async () => {
  await runRequests(REQUESTS, (far) => process.stderr.write(`${far}\n`));
});
