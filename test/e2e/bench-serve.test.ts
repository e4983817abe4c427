import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, expect, test } from 'vitest';
import { type Sim, startSim } from '../../src/sim/start-sim.ts';
import { benchRun } from '../support/bench-run.ts';
import { type Harness, startHarness } from '../support/harness.ts';

const folder = mkdtempSync(join(tmpdir(), 'baton-bench-'));
let sim: Sim;
let harness: Harness;

beforeAll(async () => {
  const engine = { eosEvery: 0, recordRequests: true };
  sim = await startSim({ ...engine, role: 'both', connector: 'none' });
  harness = await startHarness({ prefill: 1, decode: 1, engine });
  await harness.ready();
});
afterAll(async () => {
  await sim?.close();
  await harness?.[Symbol.asyncDispose]();
  rmSync(folder, { recursive: true });
});

function numberIn(report: string, label: string): number {
  return Number(new RegExp(`^${label.replaceAll(/[()/]/g, '\\$&')} +(\\S+) *$`, 'm').exec(report)?.[1]);
}

const COUNTS = ['--num-prompts', '12', '--random-input-len', '300', '--random-output-len', '6'];

test.each([
  ['closed loop', ['--max-concurrency', '3']],
  ['open loop', ['--request-rate', '100', '--burstiness', '4']],
  ['chat', ['--endpoint', '/v1/chat/completions', '--max-concurrency', '4']],
])('counts are those of the engine: %s', async (_, words) => {
  const before = sim.requests.length;
  const { code, out, err } = await benchRun(['serve', '--base-url', sim.url, ...COUNTS, ...words]);
  expect({ code, err }).toMatchObject({ code: 0, err: expect.stringMatching(/12 of 12 requests, 0 failed/) });
  expect(numberIn(out, 'Successful requests:')).toBe(12);
  expect(numberIn(out, 'Total generated tokens:')).toBe(72);
  const prompts = sim.requests.slice(before).filter(({ path }) => path.endsWith('completions'));
  // Two that found out how words count there.
  expect(prompts).toHaveLength(14);
  // Words are not tokens, but their number is fitted.
  expect(numberIn(out, 'Total input tokens:') / 3600).toBeCloseTo(1, 1);
});

test('through baton, warmed up, with a result file whose figures are those of the report', async () => {
  const file = join(folder, 'result.json');
  const save = ['--save-result', '--save-detailed', '--result-filename', file, '--num-warmups', '2', '--seed', '5'];
  const { code, out, err } = await benchRun(['serve', '--base-url', harness.url, ...COUNTS, ...save]);
  expect({ code, err }).toMatchObject({ code: 0, err: expect.stringContaining(`result: ${file}`) });
  const result = JSON.parse(readFileSync(file, 'utf8'));
  expect(result).toMatchObject({ completed: 12, failed: 0, total_output_tokens: 72, model_id: 'sim-model' });
  expect(result.ttfts).toHaveLength(12);
  expect(result.itls.every((gaps: readonly number[]) => gaps.length === 5)).toBe(true);
  expect(numberIn(out, 'Mean TTFT (ms):')).toBeCloseTo(result.mean_ttft_ms, 1);
  expect(numberIn(out, 'Total input tokens:')).toBe(result.total_input_tokens);
  const mean = result.ttfts.reduce((sum: number, ttft: number) => sum + ttft, 0) / 12;
  expect(mean * 1000).toBeCloseTo(result.mean_ttft_ms, 6);
});

test('a file of prompts is sent as it is', async () => {
  const path = join(folder, 'prompts.jsonl');
  writeFileSync(path, '{"prompt":"one"}\n{"prompt":"two","output_tokens":2}\n');
  const words = [
    '--dataset-name',
    'custom',
    '--dataset-path',
    path,
    '--custom-output-len',
    '4',
    '--num-prompts',
    '2',
    '--max-concurrency',
    '1',
  ];
  const { code, out } = await benchRun(['serve', '--base-url', sim.url, ...words, '--ignore-eos']);
  expect(code).toBe(0);
  expect(numberIn(out, 'Total generated tokens:')).toBe(6);
  const bodies = sim.requests.slice(-2).map(({ body }): unknown => JSON.parse(body.toString()));
  expect(bodies).toEqual([
    expect.objectContaining({ prompt: 'one', max_tokens: 4, stream: true, ignore_eos: true }),
    expect.objectContaining({ prompt: 'two', max_tokens: 2 }),
  ]);
});

test.each([
  ['no endpoint', () => ['--port', '9'], /^baton: no endpoint answers at http:\/\/127\.0\.0\.1:9: .*ECONNREFUSED/],
  [
    'another model',
    () => ['--base-url', sim.url, '--model', 'other'],
    /^baton: \S+ serves no model other \(--model\), only sim-model\n$/,
  ],
  [
    'a path that is none',
    () => ['--base-url', sim.url, '--endpoint', '/v2/completions'],
    /^baton: the first request failed: status 404/,
  ],
  [
    'a malformed line of a file',
    () => {
      const path = join(folder, 'bad.jsonl');
      writeFileSync(path, '{"prompt":"one"}\n{"prompt":2}\n');
      return ['--base-url', sim.url, '--dataset-name', 'custom', '--dataset-path', path];
    },
    /^baton: \S+bad\.jsonl:2: expected \{"prompt": "a text"\}\n$/,
  ],
])('%s ends it with a sentence', async (_, words, message) => {
  const ran = await benchRun(['serve', ...words()]);
  expect(ran).toEqual({ code: 1, out: '', err: expect.stringMatching(message) });
});

test('a flag that is wrong is a mistake in the command line', async () => {
  expect(await benchRun(['serve', '--num-prompts', 'many'])).toMatchObject({ code: 2, out: '' });
  expect(await benchRun(['serve', '--num-prompt', '3'])).toMatchObject({
    code: 2,
    err: expect.stringContaining('did you mean --num-prompts?'),
  });
});

test('interrupted, it prints what it has', async () => {
  const words = [
    '--num-prompts',
    '1000',
    '--request-rate',
    '200',
    '--random-input-len',
    '20',
    '--random-output-len',
    '2',
  ];
  // The first line of progress comes after a tenth.
  const { code, out, err } = await benchRun(['serve', '--base-url', sim.url, ...words], (text) =>
    /^1\d\d of/m.test(text),
  );
  expect(code).toBe(1);
  const ended = Number(/interrupted: (\d+) of 1000 requests had ended/.exec(err)?.[1]);
  expect(ended).toBeGreaterThanOrEqual(100);
  expect(ended).toBeLessThan(1000);
  expect(numberIn(out, 'Successful requests:')).toBe(ended);
  expect(numberIn(out, 'Failed requests:')).toBe(0);
});
