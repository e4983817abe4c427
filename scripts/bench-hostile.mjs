// Measures what hostile clients cost others: requests of one client, one after the other, and the memory of the process,
// while nothing else is there and while each kind of them is. baton and the engines are processes of their own.
// Argument: idle connections (default 10000).
import { readFileSync } from 'node:fs';
import { setTimeout } from 'node:timers/promises';
import { startBatonProcess } from '../test/support/baton-process.ts';
import { dribblers, headFloods, idlers, nonReaders, quantile, timesOf } from '../test/support/hostile.ts';
import { sayByRequest, startStubEngine } from '../test/support/stub-engine.ts';

const idle = Number(process.argv[2] ?? 10_000);
const REQUESTS = 400;
const EVENTS = 20_000;

const engine = await startStubEngine(sayByRequest(EVENTS));
const args = ['--prefill', engine.url, '--decode', engine.url];
const baton = await startBatonProcess(args);
const port = Number(new URL(baton.url).port);

/** Megabytes of the process, as its own metrics tell them. */
async function memory() {
  const metrics = await (await fetch(`${baton.adminUrl}/metrics`)).text();
  return Number(/^process_resident_memory_bytes (\S+)$/m.exec(metrics)?.[1]) / 2 ** 20;
}

function row(what, count, times, megabytes) {
  const cell = (share) => quantile(times, share).toFixed(1);
  console.log(`| ${what} | ${count} | ${cell(0.5)} | ${cell(0.99)} | ${megabytes.toFixed(0)} |`);
}

const [model] = /model name\s*: (.*)/.exec(readFileSync('/proc/cpuinfo', 'utf8'))?.slice(1) ?? [process.arch];
console.log(`${model}, Node ${process.version}\n`);
console.log('| others | connections | p50 ms | p99 ms | MiB |\n|---|---|---|---|---|');
for (let ready = 0; ready !== 200; await setTimeout(100)) ready = (await fetch(`${baton.url}/readiness`)).status;
await timesOf(baton.url, REQUESTS);
row('none', 0, await timesOf(baton.url, REQUESTS), await memory());
for (const [what, come, count] of [
  ['idle connections', idlers, idle],
  ['heads a byte at a time', dribblers, 1000],
  ['streams that nobody reads', nonReaders, 200],
  ['heads of 31 KiB without a pause', headFloods, 16],
]) {
  const crowd = await come(port, count);
  await setTimeout(2000);
  const times = await timesOf(baton.url, REQUESTS);
  row(what, crowd.open(), times, await memory());
  await crowd[Symbol.asyncDispose]();
}
await setTimeout(5000);
row('none, afterwards', 0, await timesOf(baton.url, REQUESTS), await memory());
await baton[Symbol.asyncDispose]();
await engine[Symbol.asyncDispose]();
