// Measures what hostile clients cost others: the times of one client's requests, one after the other, and the memory of the
// process, right before each kind of them comes and while it is there. baton, the hostile clients, and the engines with
// the measured client are three processes. Argument: idle connections (default 10000).
import { fork } from 'node:child_process';
import { once } from 'node:events';
import { join } from 'node:path';
import { setTimeout } from 'node:timers/promises';
import { startBatonProcess } from '../test/support/baton-process.ts';
import { quantile, timesOf } from '../test/support/hostile.ts';
import { sayByRequest, startStubEngine } from '../test/support/stub-engine.ts';
import { machine } from './store-process.mjs';

const idle = Number(process.argv[2] ?? 10_000);
const REQUESTS = 500;
const EVENTS = 20_000;
/** For what comes once with new connections, and for what closed ones leave. */
const SETTLE_MS = 3000;

await using stack = new globalThis.AsyncDisposableStack();
const engine = async () => stack.use(await startStubEngine(sayByRequest(EVENTS)));
const [prefill, decode] = [await engine(), await engine()];
const baton = stack.use(await startBatonProcess(['--prefill', prefill.url, '--decode', decode.url]));

/** Megabytes of the process, as its own metrics tell them. */
async function memory() {
  const metrics = await (await fetch(`${baton.adminUrl}/metrics`)).text();
  const value = (name) => Number(new RegExp(`^${name} (\\S+)$`, 'm').exec(metrics)?.[1]) / 2 ** 20;
  return value('process_resident_memory_bytes');
}

async function measure() {
  const times = await timesOf(baton.url, REQUESTS);
  return { p50: quantile(times, 0.5), p99: quantile(times, 0.99), megabytes: await memory() };
}

async function beside(kind, count) {
  const args = [kind, new URL(baton.url).port, String(count)];
  const crowd = fork(join(import.meta.dirname, 'hostile-crowd.mjs'), args, { execArgv: [] });
  await once(crowd, 'message');
  await setTimeout(SETTLE_MS);
  const measured = await measure();
  crowd.send('open');
  const [open] = await once(crowd, 'message');
  const ended = once(crowd, 'exit');
  crowd.disconnect();
  await ended;
  await setTimeout(SETTLE_MS);
  return { ...measured, open };
}

for (let ready = 0; ready !== 200; await setTimeout(100)) ready = (await fetch(`${baton.url}/readiness`)).status;
for (const _ of [1, 2, 3]) await timesOf(baton.url, REQUESTS);
console.log(`${machine}; ${REQUESTS} requests each\n`);
console.log(
  '| others | connections | p50 ms, quiet → beside | p99 ms, quiet → beside | MiB, quiet → beside | afterwards |',
);
console.log('|---|---:|---:|---:|---:|---:|');
for (const [what, kind, count] of [
  ['idle connections', 'idlers', idle],
  ['heads a byte at a time (slow-loris)', 'dribblers', 1000],
  ['streams that nobody reads', 'nonReaders', 200],
  ['heads of 31 KiB without a pause', 'headFloods', 16],
]) {
  const quiet = await measure();
  const { open, ...loud } = await beside(kind, count);
  const after = await memory();
  const cell = (key, digits) => `${quiet[key].toFixed(digits)} → ${loud[key].toFixed(digits)}`;
  const cells = [what, open, cell('p50', 1), cell('p99', 1), cell('megabytes', 0), after.toFixed(0)];
  console.log(`| ${cells.join(' | ')} |`);
}
