import { expect, test } from 'vitest';
import { figuresOf } from '../../src/bench/figures.ts';
import { serveReport } from '../../src/bench/serve-report.ts';
import { serveResult } from '../../src/bench/serve-result.ts';
import { readServeSettings } from '../../src/bench/serve-settings.ts';
import { ascending, percentile, summarise } from '../../src/bench/stats.ts';
import { benchSample } from '../support/bench-sample.ts';

const SAMPLES = [
  benchSample({ firstTokenMs: 100, gapsMs: [10, 20], totalMs: 130, inputTokens: 50, outputTokens: 3, text: 'abc' }),
  benchSample({ startMs: 500, firstTokenMs: 200, gapsMs: [30], totalMs: 230, inputTokens: 51, outputTokens: 2 }),
  benchSample({ startMs: 1200, firstTokenMs: 900, totalMs: 900, inputTokens: 49, outputTokens: 1 }),
  benchSample({ startMs: 1300, error: 'status 503: busy', outputTokens: 0 }),
];

function settingsOf(flags: Readonly<Record<string, string>>) {
  const read = readServeSettings(flags, undefined);
  if (read.kind === 'error') throw new Error(JSON.stringify(read.problems));
  return read.settings;
}

test('the report of vllm bench serve, row for row', () => {
  const figures = figuresOf(SAMPLES, 2100, [50, 99.9]);
  const settings = settingsOf({
    'request-rate': '1.5',
    'max-concurrency': '8',
    'percentile-metrics': 'e2el,ttft,itl,tpot',
  });
  expect(
    serveReport(figures, settings)
      .split('\n')
      .map((line) => line.trimEnd()),
  ).toEqual([
    '============ Serving Benchmark Result ============',
    'Successful requests:                     3',
    'Failed requests:                         1',
    'Maximum request concurrency:             8',
    'Request rate configured (RPS):           1.50',
    'Benchmark duration (s):                  2.10',
    'Total input tokens:                      150',
    'Total generated tokens:                  6',
    'Request throughput (req/s):              1.43',
    'Output token throughput (tok/s):         2.86',
    'Peak output token throughput (tok/s):    5.00',
    'Peak concurrent requests:                2.00',
    'Total token throughput (tok/s):          74.29',
    '---------------Time to First Token----------------',
    'Mean TTFT (ms):                          400.00',
    'Median TTFT (ms):                        200.00',
    'P50 TTFT (ms):                           200.00',
    'P99.9 TTFT (ms):                         898.60',
    '-----Time per Output Token (excl. 1st token)------',
    'Mean TPOT (ms):                          22.50',
    'Median TPOT (ms):                        22.50',
    'P50 TPOT (ms):                           22.50',
    'P99.9 TPOT (ms):                         29.98',
    '---------------Inter-token Latency----------------',
    'Mean ITL (ms):                           20.00',
    'Median ITL (ms):                         20.00',
    'P50 ITL (ms):                            20.00',
    'P99.9 ITL (ms):                          29.98',
    '----------------End-to-end Latency----------------',
    'Mean E2EL (ms):                          420.00',
    'Median E2EL (ms):                        230.00',
    'P50 E2EL (ms):                           230.00',
    'P99.9 E2EL (ms):                         898.66',
    '==================================================',
    '',
  ]);
});

test('each row is as wide as that of vLLM', () => {
  const report = serveReport(figuresOf(SAMPLES, 2100, [99]), settingsOf({}));
  for (const line of report.trimEnd().split('\n')) expect(line.length, line).toBeGreaterThanOrEqual(50);
  expect(report).not.toMatch(/Request rate configured|Maximum request concurrency|E2EL/);
});

test('without one success the report has zeros', () => {
  const figures = figuresOf([benchSample({ error: 'no' })], 0, [99]);
  expect(figures).toMatchObject({ completed: 0, failed: 1, requestThroughput: 0, peakConcurrency: 0 });
  expect(serveReport(figures, settingsOf({}))).toMatch(/^P99 TTFT \(ms\): +0\.00 *$/m);
});

test('the JSON result has the keys of vLLM; times of requests are seconds', () => {
  const figures = figuresOf(SAMPLES, 2100, [99]);
  const input = {
    settings: settingsOf({}),
    model: 'm',
    figures,
    samples: SAMPLES,
    date: new Date(2026, 10, 30, 7, 8, 9),
  };
  const brief = serveResult({ ...input, save: { detailed: false, label: 'a' } });
  expect(brief).toMatchObject({
    date: '20261130-070809',
    label: 'a',
    model_id: 'm',
    num_prompts: 1000,
    request_rate: 'inf',
    burstiness: 1,
    max_concurrency: null,
    duration: 2.1,
    completed: 3,
    failed: 1,
    total_input_tokens: 150,
    total_output_tokens: 6,
    mean_ttft_ms: 400,
    median_ttft_ms: 200,
    p99_itl_ms: 29.8,
  });
  expect(brief).not.toHaveProperty('ttfts');
  expect(serveResult({ ...input, save: { detailed: true, label: 'a' } })).toMatchObject({
    ttfts: [0.1, 0.2, 0.9, 0.1],
    itls: [[0.01, 0.02], [0.03], [], []],
    output_lens: [3, 2, 1, 0],
    start_times: [0, 0.5, 1.2, 1.3],
    generated_texts: ['abc', '', '', ''],
    errors: ['', '', '', 'status 503: busy'],
  });
});

test('summaries and percentiles', () => {
  expect(summarise([])).toEqual({ count: 0, mean: 0, median: 0, std: 0 });
  expect(summarise([4, 2])).toEqual({ count: 2, mean: 3, median: 3, std: 1 });
  expect(percentile([], 50)).toBe(0);
  expect(percentile([7], 99)).toBe(7);
  expect(percentile(ascending([3, 1, 2]), 75)).toBe(2.5);
  expect(percentile([1, 2, 3], 100)).toBe(3);
});
