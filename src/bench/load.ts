import { setTimeout as sleep } from 'node:timers/promises';
import { ascending, percentile } from './stats.ts';

/** Many requests: when they are sent, and how many at a time. */
export interface LoadOptions {
  /** When each is sent, milliseconds after the start, ascending. */
  readonly arrivalsMs: readonly number[];
  /** Absent: as many as there are. */
  readonly maxConcurrency: number | undefined;
  /** Ends it early: the others are not sent. */
  readonly signal: AbortSignal;
}

/** What became of them. */
export interface Load<T> {
  /** In the order of sending; those that were cut off or not sent are not among them. */
  readonly done: readonly T[];
  readonly durationMs: number;
  /** Part of the time that the event loop of this process was busy, 0 to 1. */
  readonly busy: number;
  /** How late requests were sent for want of time in this process: the 99th percentile, milliseconds. */
  readonly lateMs: number;
}

/** Runs `start` for each of the arrivals; it resolves with undefined for what was cut off. */
export async function runLoad<T>(
  options: LoadOptions,
  start: (index: number) => Promise<T | undefined>,
): Promise<Load<T>> {
  const { arrivalsMs, maxConcurrency = Number.POSITIVE_INFINITY, signal } = options;
  const loop = performance.eventLoopUtilization();
  const startMs = performance.now();
  const done = new Map<number, T>();
  const running = new Set<Promise<void>>();
  let onFree: (() => void) | undefined;
  const lateMs: number[] = [];
  for (const [index, arrivalMs] of arrivalsMs.entries()) {
    const waitMs = startMs + arrivalMs - performance.now();
    if (waitMs > 0) {
      await sleep(waitMs, undefined, { signal }).catch(() => undefined);
      lateMs.push(performance.now() - startMs - arrivalMs);
    }
    if (running.size >= maxConcurrency && !signal.aborted) {
      await new Promise<void>((resolve) => {
        onFree = resolve;
      });
    }
    if (signal.aborted) break;
    const one = start(index).then((result) => {
      running.delete(one);
      onFree?.();
      if (result !== undefined) done.set(index, result);
    });
    running.add(one);
  }
  await Promise.all(running);
  return {
    done: [...done].toSorted(([a], [b]) => a - b).map(([, result]) => result),
    durationMs: performance.now() - startMs,
    busy: performance.eventLoopUtilization(loop).utilization,
    lateMs: percentile(ascending(lateMs), 99),
  };
}

const MOST_BUSY = 0.8;
const MOST_LATE_MS = 25;

/** Says that this process itself is the limit of what was measured; undefined when it is not. */
export function clientLimit({ busy, lateMs }: Pick<Load<unknown>, 'busy' | 'lateMs'>): string | undefined {
  const signs = [
    busy > MOST_BUSY ? `its event loop was busy ${Math.round(busy * 100)} % of the time` : '',
    lateMs > MOST_LATE_MS ? `one in a hundred requests was sent ${Math.round(lateMs)} ms late or more` : '',
  ].filter((sign) => sign !== '');
  if (signs.length === 0) return undefined;
  return `the benchmark itself is the limit: ${signs.join(', and ')}; times are too long, so send less, or from several processes`;
}
