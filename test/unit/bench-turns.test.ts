import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, describe, expect, test } from 'vitest';
import { seededChance } from '../../src/bench/chance.ts';
import { makeUp, readConversations } from '../../src/bench/conversations.ts';
import { readDistribution } from '../../src/bench/distribution.ts';
import type { MultiTurnOutcome } from '../../src/bench/multi-turn.ts';
import { type MultiTurnSettings, readMultiTurnSettings } from '../../src/bench/multi-turn-settings.ts';
import { summarise } from '../../src/bench/stats.ts';
import { turnFigures, turnReport } from '../../src/bench/turn-report.ts';
import { formatProblem } from '../../src/config/problem.ts';
import { benchSample } from '../support/bench-sample.ts';

const folder = mkdtempSync(join(tmpdir(), 'baton-bench-'));
afterAll(() => rmSync(folder, { recursive: true }));

function fileOf(name: string, content: unknown): string {
  const path = join(folder, name);
  writeFileSync(path, typeof content === 'string' ? content : JSON.stringify(content));
  return path;
}

function settingsOf(flags: Readonly<Record<string, string>>): MultiTurnSettings {
  const read = readMultiTurnSettings({ 'input-file': 'x', ...flags }, {});
  if (read.kind === 'error') throw new Error(JSON.stringify(read.problems));
  return read.settings;
}

/** Two conversations of two turns. */
const OUTCOME: MultiTurnOutcome = {
  model: 'm',
  conversations: 2,
  errors: [],
  held: [],
  warmupMs: undefined,
  busy: 0,
  turns: [
    { conversation: 'a-1', client: 0, turn: 1, messages: 1, historyTokens: 0, sample: sampleOf(0, 100, 40, 'none', 0) },
    {
      conversation: 'b-1',
      client: 1,
      turn: 1,
      messages: 1,
      historyTokens: 0,
      sample: sampleOf(10, 200, 60, 'none', 0),
    },
    {
      conversation: 'a-1',
      client: 0,
      turn: 2,
      messages: 3,
      historyTokens: 50,
      sample: sampleOf(500, 30, 90, 'hit', 50),
    },
    {
      conversation: 'b-1',
      client: 1,
      turn: 2,
      messages: 3,
      historyTokens: 70,
      sample: sampleOf(600, 90, 110, 'miss_taken', 64),
    },
  ],
};

function sampleOf(startMs: number, firstTokenMs: number, inputTokens: number, outcome: string, matched: number) {
  return benchSample({
    startMs,
    firstTokenMs,
    gapsMs: [10, 30],
    totalMs: firstTokenMs + 40,
    inputTokens,
    outputTokens: 5,
    plan: `mode=prefill_decode; reason=x; outcome=${outcome}; matched=${matched}`,
  });
}

test('the table of the multi-turn client, and what reuse saved', () => {
  expect(turnReport(settingsOf({ 'num-clients': '2' }), OUTCOME).split('\n')).toEqual([
    '-'.repeat(100),
    'Parameters:',
    'model=m',
    'num_clients=2',
    'num_conversations=2',
    'active_conversations=2',
    'seed=0',
    '-'.repeat(100),
    'Statistics summary:',
    'runtime_sec = 0.730',
    'requests_per_sec = 5.479',
    '-'.repeat(100),
    '                   count   mean    std   min    25%    50%    75%    90%    max',
    'ttft_ms              4.0  105.0  70.47  30.0   75.0   95.0  125.0  170.0  200.0',
    'tpot_ms              4.0   10.0   0.00  10.0   10.0   10.0   10.0   10.0   10.0',
    'latency_ms           4.0  145.0  70.47  70.0  115.0  135.0  165.0  210.0  240.0',
    'input_num_turns      4.0    2.0   1.15   1.0    1.0    2.0    3.0    3.0    3.0',
    'input_num_tokens     4.0   75.0  31.09  40.0   55.0   75.0   95.0  104.0  110.0',
    'output_num_tokens    4.0    5.0   0.00   5.0    5.0    5.0    5.0    5.0    5.0',
    'output_num_chunks    4.0    2.0   0.00   2.0    2.0    2.0    2.0    2.0    2.0',
    '-'.repeat(100),
    'TTFT by turn (ms), and tokens of a request:',
    'turn  count   mean    50%    90%    max  input_num_tokens  saved_tokens',
    '1       2.0  150.0  150.0  190.0  200.0              50.0           0.0',
    '2       2.0   60.0   60.0   84.0   90.0             100.0          25.0',
    '-'.repeat(100),
    'Reuse outcomes: none 2, hit 1, miss_taken 1',
    'Prompt tokens saved by handles: 50 of 300 (16.7 %)',
    '',
  ]);
});

test('samples that are left out as warm-up, and an endpoint that tells no plan', () => {
  const plain = OUTCOME.turns.map((record) => ({
    ...record,
    sample: { ...record.sample, plan: undefined, cachedTokens: 15 },
  }));
  const report = turnReport(settingsOf({ 'warmup-percentages': '0%,50%' }), {
    ...OUTCOME,
    turns: plain,
    warmupMs: 250,
  });
  expect(report).toMatch(/summary \(assuming 0% warmup samples\):\nruntime_sec = 0\.730\n/);
  expect(report).toMatch(/summary \(assuming 50% warmup samples\):\nruntime_sec = 0\.230\n/);
  expect(report).toMatch(/warmup_runtime_sec = 0\.250\ntotal_runtime_incl_warmup_sec = 0\.980\n/);
  expect(report).toMatch(/^ttft_ms +2\.0 +60\.0 /m);
  expect(report).toContain('Reuse outcomes: the endpoint tells none (x-baton-plan)\n');
  expect(report).toContain('Prompt tokens the engine had cached: 60 of 300 (20.0 %)\n');
});

test('figures of one turn have the keys of the client', () => {
  const [, , third] = OUTCOME.turns;
  expect(third && turnFigures(third)).toEqual({
    ttft_ms: 30,
    tpot_ms: 10,
    latency_ms: 70,
    start_time_ms: 500,
    input_num_turns: 3,
    input_num_tokens: 90,
    output_num_tokens: 5,
    output_num_chunks: 2,
    output_num_first_chunk_tokens: 1,
    approx_cached_percent: (100 * 50) / 90,
    conversation_id: 'a-1',
    client_id: 0,
    turn: 2,
    outcome: 'hit',
    saved_tokens: 50,
    cached_tokens: null,
  });
});

describe('settings', () => {
  test('the defaults are those of the client', () => {
    expect(settingsOf({})).toMatchObject({
      baseUrl: 'http://localhost:8000',
      clients: 1,
      activeConversations: 1,
      earlyStop: true,
      maxTokens: 0,
      rate: 0,
      maxRetries: 0,
      sampling: 'round_robin',
      timeoutMs: 120_000,
      warmups: [0],
    });
    expect(settingsOf({ 'limit-max-tokens': '-1', 'limit-min-tokens': '-1' }).maxTokens).toBeUndefined();
    const env = { MULTITURN_BENCH_MAX_RETRIES: '3', OPENAI_API_KEY: 'k' };
    expect(readMultiTurnSettings({ 'input-file': 'x' }, env)).toMatchObject({
      settings: { maxRetries: 3, headers: { authorization: 'Bearer k' } },
    });
  });

  test.each([
    [{ 'input-file': '' }, '--input-file: expected a text, got ""'],
    [
      { 'num-clients': '3', 'max-active-conversations': '2' },
      '--max-active-conversations: is smaller than --num-clients',
    ],
    [{ 'num-clients': '3', 'max-num-requests': '2' }, '--max-num-requests: is smaller than --num-clients'],
    [{ 'limit-max-tokens': '5' }, '--limit-min-tokens: goes together with --limit-max-tokens'],
    [{ 'limit-max-tokens': '5', 'limit-min-tokens': '6' }, '--limit-min-tokens: is larger than --limit-max-tokens'],
    [
      { 'warmup-step': 'true', 'warmup-percentages': '5%' },
      '--warmup-percentages: cannot be combined with --warmup-step',
    ],
    [{ 'warmup-percentages': '5%,x' }, '--warmup-percentages: expected percentages like 0%,25%, got x'],
  ])('refuses %j', (flags, message) => {
    const read = readMultiTurnSettings({ 'input-file': 'x', ...flags }, {});
    expect(read.kind === 'error' ? read.problems.map(formatProblem) : []).toContain(message);
  });
});

describe('distributions', () => {
  const mean = (data: object) => summarise(readDistribution(data)(seededChance(4), 20_000)).mean;

  test.each([
    [{ distribution: 'constant', value: 7 }, 7],
    [{ distribution: 'uniform', min: 2, max: 8 }, 5],
    [{ distribution: 'poisson', alpha: 12 }, 12],
    [{ distribution: 'lognormal', average: 100 }, 100],
    [{ distribution: 'lognormal', mean: 3, sigma: 0.5 }, Math.exp(3.125)],
    // zeta(3) / zeta(4).
    [{ distribution: 'zipf', alpha: 4 }, 1.2021 / 1.0823],
  ])('%j has its mean', (data, expected) => {
    expect(mean(data) / expected).toBeCloseTo(1, 1);
  });

  test('no draw is above the most that is wanted', () => {
    for (const data of [
      { distribution: 'poisson', alpha: 12, max: 13 },
      { distribution: 'zipf', alpha: 1.2, max: 13 },
      { distribution: 'lognormal', average: 10, max: 13 },
    ]) {
      expect(Math.max(...readDistribution(data)(seededChance(1), 1000))).toBe(13);
    }
  });
});

describe('input files', () => {
  const user = (content: string) => ({ role: 'user', content });
  const assistant = (content: string) => ({ role: 'assistant', content });

  test('conversations', () => {
    const path = fileOf('list.json', [{ id: 'a', messages: [user('q'), assistant('y'.repeat(12)), user('r')] }]);
    expect(readConversations(path)).toEqual({
      kind: 'list',
      conversations: [
        {
          id: 'a',
          turns: [
            { question: 'q', answer: 'y'.repeat(12), answerTokens: 3 },
            { question: 'r', answer: undefined, answerTokens: undefined },
          ],
        },
      ],
    });
  });

  const one = (messages: unknown) => [{ id: 'a', messages }];
  test.each([
    ['{', /in\.json: no JSON: /],
    [{}, /in\.json: expected a list of conversations, or \{"filetype"/],
    [[], /in\.json has no conversation/],
    [[{ messages: [] }], /conversation 1: expected an id/],
    [[...one([user('q')]), ...one([user('q')])], /conversation 2: the id a is there twice/],
    [one([assistant('q')]), /conversation 1: message 1: expected \{"role": "user"/],
    [one([user('q'), user('q')]), /conversation 1: message 2: expected \{"role": "assistant"/],
    [{ filetype: 'generate_conversations' }, /num_conversations: expected a whole number from 1/],
    [{ filetype: 'generate_conversations', num_conversations: 1, text_files: [] }, /text_files: expected names/],
    [
      { filetype: 'generate_conversations', num_conversations: 1, text_files: ['none.txt'] },
      /none\.txt does not exist/,
    ],
  ])('%j is refused', (content, message) => {
    expect(() => readConversations(fileOf('in.json', content))).toThrow(message);
  });

  const plan = (own: object) =>
    fileOf('plan.json', {
      filetype: 'generate_conversations',
      num_conversations: 3,
      text_files: [fileOf('text.txt', 'lorem ipsum '.repeat(20))],
      prompt_input: {
        num_turns: { distribution: 'constant', value: 4 },
        common_prefix_num_tokens: { distribution: 'constant', value: 10 },
        prefix_num_tokens: { distribution: 'constant', value: 20 },
        num_tokens: { distribution: 'constant', value: 40 },
        ...own,
      },
      prompt_output: { num_tokens: { distribution: 'constant', value: 6 } },
    });

  test('conversations that are made up', () => {
    const input = readConversations(plan({}));
    if (input.kind !== 'made-up') throw new Error('not a plan');
    const made = makeUp(input.plan, 0, 4);
    expect(made.map(({ id, turns }) => [id, turns.length])).toEqual([
      ['CONV_ID_0', 2],
      ['CONV_ID_1', 2],
      ['CONV_ID_2', 2],
    ]);
    expect(makeUp(input.plan, 0, 4)).toEqual(made);
    const firsts = made.map(({ turns }) => turns[0]?.question ?? '');
    // 10 tokens that all share, 20 and 40 of its own, four characters each.
    expect(firsts.map(({ length }) => length)).toEqual([280, 280, 280]);
    expect(new Set(firsts.map((text) => text.slice(0, 40))).size).toBe(1);
    expect(new Set(firsts).size).toBe(3);
    expect(made[1]?.turns[1]).toMatchObject({ answerTokens: 6, answer: undefined });
    expect(made[1]?.turns[1]?.question).toHaveLength(160);
  });

  test.each([
    [{ num_turns: { distribution: 'normal' } }, /prompt_input\.num_turns: expected \{"distribution": one of constant/],
    [{ num_tokens: { distribution: 'uniform', min: 4 } }, /prompt_input\.num_tokens: max: expected a number from 4/],
    [{ prefix_num_tokens: undefined }, /prompt_input\.prefix_num_tokens: expected/],
  ])('a plan with %j is refused', (own, message) => {
    expect(() => readConversations(plan(own))).toThrow(message);
  });
});
