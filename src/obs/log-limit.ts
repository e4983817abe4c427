/** Lets one event through per interval. */
export interface LogLimit {
  /** How many events were held back since the last that passed; undefined where this one is held back as well. */
  pass(): number | undefined;
}

/** Makes a limit of one event every `intervalMs`; the first passes. `now` is a clock in milliseconds that only grows. */
export function createLogLimit(intervalMs: number, now: () => number): LogLimit {
  let nextAt = Number.NEGATIVE_INFINITY;
  let held = 0;
  return {
    pass() {
      const at = now();
      if (at < nextAt) {
        held++;
        return undefined;
      }
      nextAt = at + intervalMs;
      const before = held;
      held = 0;
      return before;
    },
  };
}
