import { expect } from 'vitest';

/** Waits until so many turns of this baton have left a handle: they are put off the client's path. */
export async function storedTurns(adminUrl: string, count: number): Promise<void> {
  const stored = async () => {
    const metrics = await (await fetch(`${adminUrl}/metrics`)).text();
    return Number(/^baton_decode_handles_total\{fate="stored"\} (\d+)/m.exec(metrics)?.[1] ?? 0);
  };
  await expect.poll(stored, { timeout: 10_000, interval: 2 }).toBe(count);
}
