import { type ChildProcess, fork } from 'node:child_process';
import { once } from 'node:events';
import { join } from 'node:path';
import { expect } from 'vitest';
import { createLogger } from '../../src/obs/log.ts';
import { startBaton } from '../../src/roles.ts';
import { metricOf } from '../e2e/ladder-support.ts';
import { configOf } from '../support/harness.ts';
import { memoryInUse } from '../support/heap.ts';

/** What the process with the clients is told: so many requests, from so many clients at a time. */
export interface LoadOrder {
  readonly url: string;
  readonly requests: number;
  readonly clients: number;
}

/** How requests ended for their clients. */
export interface LoadCounts {
  readonly whole: number;
  /** Clients that left by themselves. */
  readonly left: number;
  /** Told to come again: an engine that gets no processor for long, as on a busy machine, is given up. */
  readonly refused: number;
  readonly other: number;
}

const PARTS = 20;
/** Parts after which what is filled once, like connections and compiled code, is there. */
const WARM_PARTS = 5;
/** Bytes of the live heap that a request may leave; one kept request is some thousand. */
const MOST_BYTES = 32;

interface Sample {
  readonly requests: number;
  readonly heap: number;
}

/** Bytes that the live heap grows by with each request: the slope of the line that fits the samples best. */
export function slopeOf(samples: readonly Sample[]): number {
  const mean = (read: (sample: Sample) => number) =>
    samples.reduce((sum, sample) => sum + read(sample), 0) / samples.length;
  const [x, y] = [mean(({ requests }) => requests), mean(({ heap }) => heap)];
  const covariance = samples.reduce((sum, { requests, heap }) => sum + (requests - x) * (heap - y), 0);
  return covariance / samples.reduce((sum, { requests }) => sum + (requests - x) ** 2, 0);
}

/**
 * Sends so many requests, one in ten of which its client leaves, and looks whether baton keeps something of them; `tell` hears
 * how far it is, twenty times.
 */
export async function runRequests(requests: number, tell: (far: string) => void = () => undefined): Promise<void> {
  await using stack = new AsyncDisposableStack();
  const load = fork(join(import.meta.dirname, 'leak-load.ts'), { execArgv: [] });
  stack.defer(() => void load.disconnect());
  const [{ prefill, decode }] = await once(load, 'message');
  const log = createLogger({ level: 'info', format: 'json', destination: { write: () => undefined } });
  const baton = await startBaton(configOf({ prefill: [prefill], decode: [decode] }), { log });
  stack.defer(() => baton.stop());
  const url = `http://${baton.addresses.facade}`;
  const adminUrl = `http://${baton.addresses.admin}`;
  await expect.poll(async () => (await fetch(`${url}/readiness`)).status, { timeout: 20_000 }).toBe(200);

  const samples: Sample[] = [];
  const total = { whole: 0, left: 0, refused: 0, other: 0 };
  const beganAt = performance.now();
  const seconds = () => ((performance.now() - beganAt) / 1000).toFixed(0);
  const megabytes = (bytes: number) => (bytes / 2 ** 20).toFixed(1);
  for (let part = 1; part <= PARTS; part += 1) {
    const counts = await send(load, { url, requests: Math.ceil(requests / PARTS), clients: 24 });
    for (const key of ['whole', 'left', 'refused', 'other'] as const) total[key] += counts[key];
    const inFlight = () => metricOf({ adminUrl }, 'baton_requests_in_flight{api="completions"}');
    await expect.poll(inFlight, { timeout: 20_000 }).toBe(0);
    const sample = { requests: total.whole + total.left + total.refused + total.other, heap: memoryInUse().heap };
    samples.push(sample);
    tell(`${sample.requests} requests in ${seconds()} s, live heap ${megabytes(sample.heap)} MiB`);
  }
  const slope = slopeOf(samples.slice(WARM_PARTS));
  process.stdout.write(
    `${total.whole} whole, ${total.left} left and ${total.refused} refused of ${samples.at(-1)?.requests} requests in ${seconds()} s; ` +
      `${slope.toFixed(1)} bytes of heap a request; live heap ${samples.map(({ heap }) => megabytes(heap)).join(' ')} MiB; ` +
      `resident ${megabytes(process.memoryUsage.rss())} MiB\n`,
  );
  expect(total.other).toBe(0);
  expect(total.refused).toBe(0);
  expect(total.left).toBeGreaterThan(requests / 20);
  expect(await metricOf({ adminUrl }, 'baton_queue_depth')).toBe(0);
  expect(slope).toBeLessThan(MOST_BYTES);
}

async function send(load: ChildProcess, order: LoadOrder): Promise<LoadCounts> {
  load.send(order);
  const [counts] = await once(load, 'message');
  return counts;
}
