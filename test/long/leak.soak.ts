import { test } from 'vitest';
import { runRequests } from './leak-run.ts';

const REQUESTS = Number(process.env['BATON_SOAK_REQUESTS'] ?? 2_000_000);

test(`${REQUESTS} requests, of which clients leave one in ten, leave nothing in memory (BATON_SOAK_REQUESTS)`, async () => {
  await runRequests(REQUESTS);
});
