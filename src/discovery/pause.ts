import { setTimeout } from 'node:timers/promises';

/** Waits so many milliseconds, or until the signal aborts. */
export async function pauseUntil(ms: number, signal: AbortSignal): Promise<void> {
  await setTimeout(ms, undefined, { signal }).catch(() => undefined);
}
