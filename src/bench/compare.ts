import { seededChance } from './chance.ts';
import { bootstrap, type Interval, welch } from './intervals.ts';
import { COMPARED, type SavedResult, type Series } from './saved-result.ts';
import { ascending, percentile } from './stats.ts';

/** One row: a figure of both runs, and how sure their difference is. */
interface Row {
  readonly label: string;
  readonly before: number;
  readonly after: number;
  readonly interval?: Interval | undefined;
}

const SEED = 1;
const PERCENTS = [
  [50, 'Median'],
  [99, 'P99'],
] as const;

const METHOD = `Intervals hold the difference b - a with 95 % confidence: of means by Welch's t, of medians and percentiles (only with
the times of each request) by the percentiles of 2000 bootstrap samples. Both take the requests of a run as independent.
What the runs themselves differ in (another load on the machine, warm caches) they do not know: repeat the runs.
`;

/** The figures of two runs beside each other, with the intervals of their differences. */
export function compareReport(before: SavedResult, after: SavedResult): string {
  const rows = [
    ...COMPARED.flatMap((name) => {
      const [a, b] = [before.series[name], after.series[name]];
      return a === undefined || b === undefined ? [] : rowsOf(name, a, b);
    }),
    ...[...before.rates].flatMap(([label, value]) => {
      const other = after.rates.get(label);
      return other === undefined ? [] : [{ label, before: value, after: other }];
    }),
  ];
  const cells = [['', 'a', 'b', 'b - a', 'from', 'to', 'change', ''], ...rows.map(cellsOf)];
  const widths = (cells[0] ?? []).map((_, column) => Math.max(...cells.map((row) => row[column]?.length ?? 0)));
  const lines = cells.map((row) =>
    row
      .map((cell, at) =>
        at === 0 || at === row.length - 1 ? cell.padEnd(widths[at] ?? 0) : cell.padStart(widths[at] ?? 0),
      )
      .join('  ')
      .trimEnd(),
  );
  return `a: ${before.file}\nb: ${after.file}\n\n${lines.join('\n')}\n\n${METHOD}`;
}

function rowsOf(name: string, a: Series, b: Series): readonly Row[] {
  const mean = { label: `Mean ${name} (ms)`, before: a.mean.mean, after: b.mean.mean, interval: welch(a.mean, b.mean) };
  const [before, after] = [a.values, b.values];
  if (before === undefined || after === undefined) return [mean];
  return [
    mean,
    ...PERCENTS.map(([percent, word]) => {
      const figure = (sorted: readonly number[]) => percentile(sorted, percent);
      return {
        label: `${word} ${name} (ms)`,
        before: figure(ascending(before)),
        after: figure(ascending(after)),
        interval: bootstrap(before, after, figure, seededChance(SEED)),
      };
    }),
  ];
}

function cellsOf({ label, before, after, interval }: Row): readonly string[] {
  const change = before === 0 ? '-' : `${signed((100 * (after - before)) / before, 1)} %`;
  return [
    label,
    before.toFixed(2),
    after.toFixed(2),
    signed(after - before, 2),
    interval === undefined ? '' : signed(interval[0], 2),
    interval === undefined ? '' : signed(interval[1], 2),
    change,
    interval === undefined ? '' : verdict(interval),
  ];
}

/** Less than this, in milliseconds, shows as 0.00: rounding of times makes as much. */
const LEAST_MS = 0.005;

function verdict([low, high]: Interval): string {
  if (low >= LEAST_MS) return 'longer';
  return high <= -LEAST_MS ? 'shorter' : 'no difference shown';
}

function signed(value: number, digits: number): string {
  return `${value > 0 ? '+' : ''}${value.toFixed(digits)}`;
}
