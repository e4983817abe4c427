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
    clearTimeout(handle as NodeJS.Timeout);
  },
};

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
