import { performance } from 'node:perf_hooks';

/** Monotonic time and timers; tests put their own in. */
export interface Clock {
  /** Milliseconds since some fixed moment; never goes back. */
  now(): number;
  /** Calls `run` once after `delayMs`; the returned function prevents that. */
  setTimer(run: () => void, delayMs: number): () => void;
}

/** The process's own clock. */
export const SYSTEM_CLOCK: Clock = {
  now: () => performance.now(),
  setTimer: (run, delayMs) => {
    const timer = setTimeout(run, delayMs);
    return () => clearTimeout(timer);
  },
};
