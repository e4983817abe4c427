import type { BenchResult } from './bench.ts';

/** Writes the figures of a benchmark, one a line. */
export function formatBench(result: BenchResult): string {
  const { samples, errors, durationMs } = result;
  const seconds = durationMs / 1000;
  const input = sum(samples.map(({ inputTokens }) => inputTokens));
  const output = sum(samples.map(({ outputTokens }) => outputTokens));
  const firsts = samples.map(({ firstTokenMs }) => firstTokenMs).toSorted((a, b) => a - b);
  const rows: readonly (readonly [string, string])[] = [
    ['Successful requests:', String(samples.length)],
    ['Failed requests:', String(errors.length)],
    ['Benchmark duration (s):', seconds.toFixed(2)],
    ['Total input tokens:', String(input)],
    ['Total generated tokens:', String(output)],
    ['Output token throughput (tok/s):', rate(output, seconds)],
    ['Total token throughput (tok/s):', rate(input + output, seconds)],
    ['Mean TTFT (ms):', ms(firsts.length === 0 ? undefined : sum(firsts) / firsts.length)],
    ['Median TTFT (ms):', ms(percentile(firsts, 50))],
    ['P99 TTFT (ms):', ms(percentile(firsts, 99))],
  ];
  return rows.map(([label, value]) => `${label.padEnd(36)}${value}\n`).join('');
}

/** A percentile of ascending values, between neighbours in proportion; undefined of none. */
export function percentile(sorted: readonly number[], percent: number): number | undefined {
  const position = ((sorted.length - 1) * percent) / 100;
  const [below, above] = [sorted[Math.floor(position)], sorted[Math.ceil(position)]];
  return below === undefined || above === undefined ? undefined : below + (above - below) * (position % 1);
}

function sum(values: readonly number[]): number {
  return values.reduce((total, value) => total + value, 0);
}

function rate(count: number, seconds: number): string {
  return seconds === 0 ? '-' : (count / seconds).toFixed(2);
}

function ms(value: number | undefined): string {
  return value === undefined ? '-' : value.toFixed(2);
}
