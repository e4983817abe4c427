/** What many values come to. */
export interface Summary {
  readonly count: number;
  readonly mean: number;
  readonly median: number;
  /** Standard deviation of the values themselves, not an estimate for more. */
  readonly std: number;
}

/** Sums values up. */
export function sum(values: readonly number[]): number {
  return values.reduce((total, value) => total + value, 0);
}

/** Mean, median and standard deviation; 0 of none, as vLLM's benchmark has it. */
export function summarise(values: readonly number[]): Summary {
  const count = values.length;
  if (count === 0) return { count, mean: 0, median: 0, std: 0 };
  const mean = sum(values) / count;
  const variance = sum(values.map((value) => (value - mean) ** 2)) / count;
  return { count, mean, median: percentile(ascending(values), 50), std: Math.sqrt(variance) };
}

/** Values in ascending order. */
export function ascending(values: readonly number[]): readonly number[] {
  return values.toSorted((a, b) => a - b);
}

/** A percentile of ascending values, between neighbours in proportion; 0 of none. */
export function percentile(sorted: readonly number[], percent: number): number {
  const position = ((sorted.length - 1) * percent) / 100;
  const [below, above] = [sorted[Math.floor(position)], sorted[Math.ceil(position)]];
  return below === undefined || above === undefined ? 0 : below + (above - below) * (position % 1);
}
