/** Draws numbers from 0 up to 1. */
export type Chance = () => number;

/** Draws that are the same for the same seed (mulberry32). */
export function seededChance(seed: number): Chance {
  let state = seed | 0;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

/** A whole number from `min` to `max`, both included. */
export function drawBetween(chance: Chance, min: number, max: number): number {
  return min + Math.floor(chance() * (max - min + 1));
}

/** A draw of the standard normal distribution (Box and Muller). */
export function drawNormal(chance: Chance): number {
  return Math.sqrt(-2 * Math.log(1 - chance())) * Math.cos(2 * Math.PI * chance());
}

/** A draw of the gamma distribution with scale 1 (Marsaglia and Tsang). */
export function drawGamma(chance: Chance, shape: number): number {
  if (shape < 1) return drawGamma(chance, shape + 1) * (1 - chance()) ** (1 / shape);
  const d = shape - 1 / 3;
  const c = 1 / Math.sqrt(9 * d);
  for (;;) {
    const x = drawNormal(chance);
    const v = (1 + c * x) ** 3;
    if (v > 0 && Math.log(1 - chance()) < 0.5 * x * x + d - d * v + d * Math.log(v)) return d * v;
  }
}

/** The elements in a drawn order. */
export function shuffled<T>(chance: Chance, all: readonly T[]): readonly T[] {
  return all
    .map((element) => ({ element, at: chance() }))
    .toSorted((a, b) => a.at - b.at)
    .map(({ element }) => element);
}
