import type { Chance } from './chance.ts';
import { ascending, sum } from './stats.ts';

/** A mean of independent values. */
export interface Mean {
  readonly mean: number;
  /** Standard deviation, as an estimate for more values than were seen. */
  readonly std: number;
  readonly count: number;
}

/** From where to where a value likely is. */
export type Interval = readonly [low: number, high: number];

/** The normal quantile of a 95 % interval. */
const Z = 1.959_963_984_540_054;
const RESAMPLES = 2000;
const TAIL = 0.025;

/** Mean and deviation of values. */
export function meanOf(values: readonly number[]): Mean {
  const count = values.length;
  const mean = sum(values) / count;
  const std = count < 2 ? 0 : Math.sqrt(sum(values.map((value) => (value - mean) ** 2)) / (count - 1));
  return { mean, std, count };
}

/** The 95 % interval of a mean (Student). Undefined of fewer than two values. */
export function meanInterval({ mean, std, count }: Mean): Interval | undefined {
  if (count < 2) return undefined;
  const half = (student(count - 1) * std) / Math.sqrt(count);
  return [mean - half, mean + half];
}

/** The 95 % interval of the difference of two means (Welch). Undefined where one of them has fewer than two values. */
export function welch(before: Mean, after: Mean): Interval | undefined {
  if (before.count < 2 || after.count < 2) return undefined;
  const [a, b] = [before.std ** 2 / before.count, after.std ** 2 / after.count];
  const difference = after.mean - before.mean;
  if (a + b === 0) return [difference, difference];
  const freedom = (a + b) ** 2 / (a ** 2 / (before.count - 1) + b ** 2 / (after.count - 1));
  const half = student(freedom) * Math.sqrt(a + b);
  return [difference - half, difference + half];
}

/** Student's quantile of a 95 % interval, expanded around the normal one (Abramowitz and Stegun 26.7.5). */
function student(freedom: number): number {
  // The expansion is off by more than a percent below three.
  if (freedom < 1.5) return 12.706;
  if (freedom < 2.5) return 4.303;
  const n = freedom;
  return (
    Z +
    (Z ** 3 + Z) / (4 * n) +
    (5 * Z ** 5 + 16 * Z ** 3 + 3 * Z) / (96 * n ** 2) +
    (3 * Z ** 7 + 19 * Z ** 5 + 17 * Z ** 3 - 15 * Z) / (384 * n ** 3)
  );
}

/**
 * The 95 % interval of the difference of a figure of two samples, by the percentiles of its bootstrap: both are drawn
 * again with replacement, 2000 times. `figure` is given ascending values.
 */
export function bootstrap(
  before: readonly number[],
  after: readonly number[],
  figure: (sorted: readonly number[]) => number,
  chance: Chance,
): Interval {
  const again = (values: readonly number[]) =>
    figure(ascending(values.map(() => values[Math.floor(chance() * values.length)] ?? 0)));
  const differences = ascending(Array.from({ length: RESAMPLES }, () => again(after) - again(before)));
  const at = (share: number) => differences[Math.round(share * (RESAMPLES - 1))] ?? 0;
  return [at(TAIL), at(1 - TAIL)];
}
