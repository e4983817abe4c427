import type { Candidate } from '../core/policy.ts';

/** A reading older than this says nothing any more, milliseconds. */
const READING_MAX_AGE_MS = 30_000;
/** Use of the KV blocks above which new requests soon have to wait or push others out. */
const KV_HIGH = 0.8;

/**
 * How much an instance has to do, in legs for each unit of weight. The own count rules, it is the newest; the engine's
 * reading adds what others sent, counts what waits there twice, and doubles it all where the KV blocks are used up.
 */
export function loadOf({ inFlight, weight, reading }: Candidate, now: number): number {
  if (reading === undefined || now - reading.at > READING_MAX_AGE_MS) return inFlight / weight;
  const { foreign, waiting, kvUsage } = reading;
  const full = Math.max(0, kvUsage - KV_HIGH) / (1 - KV_HIGH);
  return ((inFlight + foreign + waiting) * (1 + full) + full) / weight;
}
