/** Time source of a simulated engine; `now` is milliseconds, handles are opaque. */
export interface SimClock {
  now(): number;
  setTimeout(callback: () => void, ms: number): unknown;
  clearTimeout(handle: unknown): void;
}

/** The process clock; its timers do not keep the process alive. */
export const realClock: SimClock = {
  now: () => Date.now(),
  setTimeout: (callback, ms) => setTimeout(callback, ms).unref(),
  clearTimeout: (handle) => {
    if (handle instanceof Object && Symbol.toPrimitive in handle) clearTimeout(Number(handle));
  },
};

/** A clock that stands still until `advance` moves it; due timers run in order of their time. */
export interface ManualClock extends SimClock {
  advance(ms: number): void;
}

/** Makes a clock for tests, starting at `start` milliseconds. */
export function createManualClock(start = 1_700_000_000_000): ManualClock {
  let now = start;
  const timers = new Set<{ readonly at: number; readonly callback: () => void }>();
  return {
    now: () => now,
    setTimeout: (callback, ms) => {
      const timer = { at: now + ms, callback };
      timers.add(timer);
      return timer;
    },
    clearTimeout: (handle) => {
      for (const timer of timers) if (timer === handle) timers.delete(timer);
    },
    advance: (ms) => {
      const end = now + ms;
      for (;;) {
        const due = [...timers].filter((timer) => timer.at <= end).sort((a, b) => a.at - b.at)[0];
        if (due === undefined) break;
        timers.delete(due);
        now = Math.max(now, due.at);
        due.callback();
      }
      now = end;
    },
  };
}

/** Waits `ms` on the clock, or until the signal aborts; 0 or less returns at once. */
export function sleepOn(clock: SimClock, ms: number, signal?: AbortSignal): Promise<void> {
  if (ms <= 0 || signal?.aborted === true) return Promise.resolve();
  return new Promise((resolve) => {
    const finish = (): void => {
      clock.clearTimeout(handle);
      signal?.removeEventListener('abort', finish);
      resolve();
    };
    const handle = clock.setTimeout(finish, ms);
    signal?.addEventListener('abort', finish);
  });
}
