// Loaded into the store's process by a benchmark, which talks to it over Node's channel between processes: tells the memory
// after a full collection, and how long the event loop and the garbage collector stood in the way since it was last asked.
// A turn of the loop is told twice: how long it took, and how much of that its thread was at work: the rest is what the
// machine gave to others.
import { createHistogram, PerformanceObserver } from 'node:perf_hooks';
import { setImmediate, setTimeout } from 'node:timers/promises';

const RESOLUTION_MS = 1;
const took = createHistogram();
const worked = createHistogram();
let longestPause = 0;
new PerformanceObserver((list) => {
  for (const { duration } of list.getEntries()) longestPause = Math.max(longestPause, duration);
}).observe({ entryTypes: ['gc'] });

let [at, cpu] = [performance.now(), cpuMs()];
setInterval(() => {
  const [now, nowCpu] = [performance.now(), cpuMs()];
  record(took, now - at - RESOLUTION_MS);
  record(worked, nowCpu - cpu);
  [at, cpu] = [now, nowCpu];
}, RESOLUTION_MS).unref();

process.on('message', (question) => void answer(question));
// The channel must not keep the process alive.
process.channel?.unref();

function cpuMs() {
  const { user, system } = process.threadCpuUsage();
  return (user + system) / 1000;
}

function record(histogram, ms) {
  histogram.record(Math.max(1, Math.round(ms * 1000)));
}

function told(histogram) {
  return { longestMs: histogram.max / 1000, p999Ms: histogram.percentile(99.9) / 1000 };
}

async function answer(question) {
  const loop = { took: told(took), worked: told(worked), longestPauseMs: longestPause };
  if (question === 'settle') {
    for (let round = 0; round < 8; round++) {
      globalThis.gc();
      await setImmediate();
    }
  }
  const memory = process.memoryUsage();
  // What the collection took is nobody's call, and is told late.
  await setTimeout(20 * RESOLUTION_MS);
  took.reset();
  worked.reset();
  longestPause = 0;
  process.send({ ...loop, ...memory });
}
