/** Random numbers from 0 to 1 that are the same for the same seed. */
export function seeded(seed: number): () => number {
  let state = seed;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4_294_967_296;
  };
}

/** Draws one of `choices` at a time, each as often as its weight says. */
export function weighted<T>(random: () => number, choices: readonly (readonly [weight: number, choice: T])[]): () => T {
  const total = choices.reduce((sum, [weight]) => sum + weight, 0);
  return () => {
    let at = random() * total;
    for (const [weight, choice] of choices) {
      at -= weight;
      if (at < 0) return choice;
    }
    throw new Error('no choice has a weight');
  };
}
