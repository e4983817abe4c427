import { createServer } from 'node:http';
import type { AddressInfo } from 'node:net';
import { expect, onTestFinished, test } from 'vitest';
import { runBench } from '../../src/launch/bench.ts';
import { formatBench, percentile } from '../../src/launch/bench-report.ts';

test('figures of known samples', () => {
  const samples = [100, 200, 300, 1000].map((firstTokenMs) => ({
    firstTokenMs,
    totalMs: 2000,
    inputTokens: 50,
    outputTokens: 10,
  }));
  expect(formatBench({ durationMs: 4000, samples, errors: ['x'] })).toBe(
    [
      'Successful requests:                4',
      'Failed requests:                    1',
      'Benchmark duration (s):             4.00',
      'Total input tokens:                 200',
      'Total generated tokens:             40',
      'Output token throughput (tok/s):    10.00',
      'Total token throughput (tok/s):     60.00',
      'Mean TTFT (ms):                     400.00',
      'Median TTFT (ms):                   250.00',
      'P99 TTFT (ms):                      979.00',
      '',
    ].join('\n'),
  );
});

test('percentiles', () => {
  expect(percentile([], 50)).toBeUndefined();
  expect(percentile([7], 99)).toBe(7);
  expect(percentile([1, 2], 50)).toBe(1.5);
  expect(percentile([1, 2, 3], 100)).toBe(3);
});

test('requests are streamed completions of the served model; a failed one is told and the others count', async () => {
  const bodies: Record<string, unknown>[] = [];
  const server = createServer((request, response) => {
    if (request.url === '/v1/models') return void response.end('{"data":[{"id":"m"}]}');
    let text = '';
    request.on('data', (chunk) => {
      text += String(chunk);
    });
    request.on('end', () => {
      bodies.push(JSON.parse(text));
      if (bodies.length === 2) return void response.writeHead(503).end('{"error":{"message":"busy"}}');
      response.write('data: {"choices":[{"text":""}]}\n\ndata: {"choices":[{"text":"a"}],"usage":null}\n\n');
      response.end('data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":4}}\n\ndata: [DONE]\n\n');
    });
  }).listen(0, '127.0.0.1');
  onTestFinished(() => void server.close());
  await new Promise((resolve) => server.once('listening', resolve));
  const { port } = server.address() as AddressInfo;
  const bench = { prompts: 3, inputWords: 5, outputTokens: 4, rate: 0 };
  const result = await runBench(`http://127.0.0.1:${port}`, bench, new AbortController().signal);
  expect(result.samples).toHaveLength(2);
  expect(result.samples[0]).toMatchObject({ inputTokens: 9, outputTokens: 4 });
  expect(result.errors).toEqual([expect.stringMatching(/^status 503: .*busy/)]);
  for (const body of bodies) {
    expect(body).toMatchObject({ model: 'm', max_tokens: 4, ignore_eos: true, stream: true });
    expect(String(body['prompt']).split(' ')).toHaveLength(5);
  }
  expect(new Set(bodies.map(({ prompt }) => prompt)).size).toBe(3);
});

test('a benchmark that is stopped sends no more and waits for nothing', async () => {
  let asked = 0;
  const stop = new AbortController();
  const server = createServer((request, response) => {
    if (request.url === '/v1/models') return void response.end('{"data":[{"id":"m"}]}');
    asked += 1;
    // The stop comes while a request has no answer yet and the others are not sent.
    stop.abort();
  }).listen(0, '127.0.0.1');
  onTestFinished(() => void server.close());
  await new Promise((resolve) => server.once('listening', resolve));
  const { port } = server.address() as AddressInfo;
  // One request a day: only the first is ever sent here.
  const bench = { prompts: 3, inputWords: 5, outputTokens: 4, rate: 1 / 86_400 };
  const result = await runBench(`http://127.0.0.1:${port}`, bench, stop.signal);
  expect(asked).toBe(1);
  expect(result.samples).toEqual([]);
});
