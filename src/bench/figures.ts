import type { Sample } from './send.ts';
import type { Metric } from './serve-settings.ts';
import { ascending, percentile, type Summary, sum, summarise } from './stats.ts';

/** The distribution of one metric. */
export interface MetricFigures extends Summary {
  /** Each with its percent. */
  readonly percentiles: readonly (readonly [number, number])[];
}

/** What all requests came to; times of metrics are milliseconds. */
export interface ServeFigures {
  readonly completed: number;
  readonly failed: number;
  readonly durationS: number;
  readonly inputTokens: number;
  readonly outputTokens: number;
  readonly requestThroughput: number;
  readonly outputThroughput: number;
  readonly totalThroughput: number;
  /** Of whole seconds from the first request on. */
  readonly peakOutputThroughput: number;
  readonly peakConcurrency: number;
  readonly metrics: Readonly<Record<Metric, MetricFigures>>;
}

/** Makes the figures as vLLM's benchmark does. */
export function figuresOf(all: readonly Sample[], durationMs: number, percents: readonly number[]): ServeFigures {
  const samples = all.filter(({ error }) => error === undefined);
  const durationS = durationMs / 1000;
  const inputTokens = sum(samples.map((sample) => sample.inputTokens ?? 0));
  const outputTokens = sum(samples.map((sample) => sample.outputTokens));
  const rate = (count: number) => (durationS > 0 ? count / durationS : 0);
  const figures = (values: readonly number[]): MetricFigures => {
    const sorted = ascending(values);
    return { ...summarise(values), percentiles: percents.map((percent) => [percent, percentile(sorted, percent)]) };
  };
  return {
    completed: samples.length,
    failed: all.length - samples.length,
    durationS,
    inputTokens,
    outputTokens,
    requestThroughput: rate(samples.length),
    outputThroughput: rate(outputTokens),
    totalThroughput: rate(inputTokens + outputTokens),
    ...peaksOf(samples),
    metrics: {
      ttft: figures(samples.map(({ firstTokenMs }) => firstTokenMs)),
      tpot: figures(samples.flatMap(msPerToken)),
      itl: figures(samples.flatMap(({ gapsMs }) => gapsMs)),
      e2el: figures(samples.map(({ totalMs }) => totalMs)),
    },
  };
}

/** Per token behind the first; none where there is no other. */
export function msPerToken({ totalMs, firstTokenMs, outputTokens }: Sample): readonly number[] {
  return outputTokens > 1 ? [(totalMs - firstTokenMs) / (outputTokens - 1)] : [];
}

/** The most events with tokens, and the most requests, in one second. */
function peaksOf(samples: readonly Sample[]) {
  const beginMs = Math.min(...samples.map(({ startMs }) => startMs));
  const tokens = new Map<number, number>();
  const requests = new Map<number, number>();
  const count = (of: Map<number, number>, second: number) => of.set(second, (of.get(second) ?? 0) + 1);
  const secondOf = (ms: number) => Math.floor((ms - beginMs) / 1000);
  for (const { startMs, firstTokenMs, gapsMs, totalMs } of samples) {
    let at = startMs + firstTokenMs;
    count(tokens, secondOf(at));
    for (const gap of gapsMs) {
      at += gap;
      count(tokens, secondOf(at));
    }
    const last = secondOf(startMs + totalMs);
    for (let second = secondOf(startMs); second <= last; second++) count(requests, second);
  }
  return { peakOutputThroughput: Math.max(0, ...tokens.values()), peakConcurrency: Math.max(0, ...requests.values()) };
}
