import { type Chance, drawGamma } from './chance.ts';

/**
 * When each of `count` requests is sent, milliseconds after the start, as vLLM's benchmark does: the times between them are
 * of a gamma distribution, and all of them together take `count / rate` seconds.
 */
export function arrivalsOf(count: number, rate: number, burstiness: number, chance: Chance): readonly number[] {
  if (rate === Number.POSITIVE_INFINITY) return Array.from({ length: count }, () => 0);
  let sum = 0;
  const times = Array.from({ length: count }, () => {
    sum += burstiness === Number.POSITIVE_INFINITY ? 1 : drawGamma(chance, burstiness);
    return sum;
  });
  return times.map((time) => (time / sum) * (count / rate) * 1000);
}
