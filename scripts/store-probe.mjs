// Loaded into the store's process by a benchmark, which talks to it over Node's channel between processes: tells the memory
// after a full collection, and how long the event loop and the garbage collector stood in the way since it was last asked.
import { monitorEventLoopDelay, PerformanceObserver } from 'node:perf_hooks';
import { setImmediate, setTimeout } from 'node:timers/promises';

const RESOLUTION_MS = 1;
const delay = monitorEventLoopDelay({ resolution: RESOLUTION_MS });
delay.enable();
let longestPause = 0;
new PerformanceObserver((list) => {
  for (const { duration } of list.getEntries()) longestPause = Math.max(longestPause, duration);
}).observe({ entryTypes: ['gc'] });

process.on('message', (question) => void answer(question));
// The channel must not keep the process alive.
process.channel?.unref();

async function answer(question) {
  const loop = {
    longestMs: Math.max(0, delay.max / 1e6 - RESOLUTION_MS),
    p999Ms: Math.max(0, delay.percentile(99.9) / 1e6 - RESOLUTION_MS),
    longestPauseMs: longestPause,
  };
  if (question === 'settle') {
    for (let round = 0; round < 8; round++) {
      globalThis.gc();
      await setImmediate();
    }
  }
  const memory = process.memoryUsage();
  // What the collection took is nobody's call, and is told late.
  await setTimeout(20 * RESOLUTION_MS);
  delay.reset();
  longestPause = 0;
  process.send({ ...loop, ...memory });
}
