import { setTimeout } from 'node:timers/promises';

/** Waits so many milliseconds; an abort ends the wait early. */
export async function pause(ms: number, signal?: AbortSignal): Promise<void> {
  await setTimeout(ms, undefined, signal === undefined ? {} : { signal }).catch(() => undefined);
}
