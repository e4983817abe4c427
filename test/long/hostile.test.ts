import { afterAll, beforeAll, expect, test } from 'vitest';
import { memoryInUse } from '../support/heap.ts';
import { dribblers, type Hostile, headFloods, idlers, nonReaders, quantile, timesOf } from '../support/hostile.ts';
import { type Stubbed, sayByRequest, startStubbed } from '../support/stub-engine.ts';

const REQUESTS = 60;
/** How much slower the others may get, with clients and engines in the same process; a quiet one is taken for no quicker than this. */
const SLOWER = 15;
const QUIET_MS = 4;
/** Both sides of a connection, in the same process. */
const KEPT = 64 * 1024;
/** What waits of a stream, on its way through an engine, baton and two sockets. */
const STREAM = 2 * 1024 * 1024;

let baton: Stubbed;
let quiet: number;
beforeAll(async () => {
  baton = await startStubbed({ yaml: 'facade: {header_timeout: 3s}\n' });
  for (const engine of [baton.p, baton.d]) engine.answer = sayByRequest(20_000);
  await timesOf(baton.url, REQUESTS);
  quiet = Math.max(QUIET_MS, quantile(await timesOf(baton.url, REQUESTS), 0.5));
});
afterAll(() => baton?.[Symbol.asyncDispose]());

const inUse = () => {
  const { heap, buffers } = memoryInUse();
  return heap + buffers;
};

test.each<[string, (port: number, count: number) => Promise<Hostile>, number, number]>([
  ['connections that are kept and idle', idlers, 1000, KEPT],
  ['heads that come a byte at a time', dribblers, 200, KEPT],
  ['streams that nobody reads', nonReaders, 40, STREAM],
  ['heads without a pause', headFloods, 8, STREAM],
])('%s: others are served, and memory is bounded', async (_what, come, count, each) => {
  const forget = () => {
    baton.forgetLog();
    for (const engine of [baton.p, baton.d]) engine.requests.length = 0;
  };
  forget();
  const before = inUse();
  const crowd = await come(baton.port, count);
  try {
    expect(quantile(await timesOf(baton.url, REQUESTS), 0.5)).toBeLessThan(SLOWER * quiet);
    expect(crowd.open()).toBeGreaterThan(count / 2);
    forget();
    expect((inUse() - before) / count).toBeLessThan(each);
  } finally {
    await crowd[Symbol.asyncDispose]();
  }
  forget();
  await expect.poll(() => (inUse() - before) / count, { timeout: 20_000, interval: 500 }).toBeLessThan(8 * 1024);
  expect(quantile(await timesOf(baton.url, REQUESTS), 0.5)).toBeLessThan(SLOWER * quiet);
});
