import type { ServeFigures } from './figures.ts';
import { METRICS, type Metric, type ServeSettings } from './serve-settings.ts';

/** What of the settings a report shows. */
export type ReportSettings = Pick<ServeSettings, 'maxConcurrency' | 'rate' | 'metrics'>;

const WIDTH = 50;
const LABEL_WIDTH = 40;
const VALUE_WIDTH = 10;

const NAMES: Readonly<Record<Metric, readonly [short: string, long: string]>> = {
  ttft: ['TTFT', 'Time to First Token'],
  tpot: ['TPOT', 'Time per Output Token (excl. 1st token)'],
  itl: ['ITL', 'Inter-token Latency'],
  e2el: ['E2EL', 'End-to-end Latency'],
};

/** The report of `vllm bench serve`, row for row. */
export function serveReport(figures: ServeFigures, { maxConcurrency, rate, metrics }: ReportSettings): string {
  const lines = [
    heading(' Serving Benchmark Result ', '='),
    row('Successful requests:', String(figures.completed)),
    row('Failed requests:', String(figures.failed)),
    ...(maxConcurrency === undefined ? [] : [row('Maximum request concurrency:', String(maxConcurrency))]),
    ...(Number.isFinite(rate) ? [row('Request rate configured (RPS):', rate)] : []),
    row('Benchmark duration (s):', figures.durationS),
    row('Total input tokens:', String(figures.inputTokens)),
    row('Total generated tokens:', String(figures.outputTokens)),
    row('Request throughput (req/s):', figures.requestThroughput),
    row('Output token throughput (tok/s):', figures.outputThroughput),
    row('Peak output token throughput (tok/s):', figures.peakOutputThroughput),
    row('Peak concurrent requests:', figures.peakConcurrency),
    row('Total token throughput (tok/s):', figures.totalThroughput),
    ...METRICS.filter((metric) => metrics.includes(metric)).flatMap((metric) => metricRows(figures, metric)),
    '='.repeat(WIDTH),
  ];
  return `${lines.join('\n')}\n`;
}

function metricRows(figures: ServeFigures, metric: Metric): readonly string[] {
  const { mean, median, percentiles } = figures.metrics[metric];
  const [short, long] = NAMES[metric];
  return [
    heading(long, '-'),
    row(`Mean ${short} (ms):`, mean),
    row(`Median ${short} (ms):`, median),
    ...percentiles.map(([percent, value]) => row(`P${percent} ${short} (ms):`, value)),
  ];
}

function row(label: string, value: string | number): string {
  const text = typeof value === 'number' ? value.toFixed(2) : value;
  return `${label.padEnd(LABEL_WIDTH)} ${text.padEnd(VALUE_WIDTH)}`;
}

function heading(text: string, fill: string): string {
  return text.padStart(text.length + Math.floor((WIDTH - text.length) / 2), fill).padEnd(WIDTH, fill);
}
