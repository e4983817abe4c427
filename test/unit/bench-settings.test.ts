import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, describe, expect, test } from 'vitest';
import { arrivalsOf } from '../../src/bench/arrivals.ts';
import { seededChance } from '../../src/bench/chance.ts';
import { type Dataset, makePrompts } from '../../src/bench/dataset.ts';
import { clientLimit } from '../../src/bench/load.ts';
import { createBar } from '../../src/bench/progress-bar.ts';
import { readServeSettings } from '../../src/bench/serve-settings.ts';
import { summarise } from '../../src/bench/stats.ts';
import { fitWords, ONE_EACH } from '../../src/bench/words.ts';
import { formatProblem } from '../../src/config/problem.ts';

const folder = mkdtempSync(join(tmpdir(), 'baton-bench-'));
afterAll(() => rmSync(folder, { recursive: true }));

function fileOf(name: string, text: string): string {
  const path = join(folder, name);
  writeFileSync(path, text);
  return path;
}

describe('settings', () => {
  test('the defaults are those of vllm bench serve', () => {
    expect(readServeSettings({}, undefined)).toMatchObject({
      kind: 'ok',
      save: undefined,
      settings: {
        baseUrl: 'http://127.0.0.1:8000',
        endpoint: '/v1/completions',
        dataset: { name: 'random', inputTokens: 1024, outputTokens: 128, rangeRatio: 0, prefixTokens: 0 },
        prompts: 1000,
        rate: Number.POSITIVE_INFINITY,
        burstiness: 1,
        seed: 0,
        warmups: 0,
        headers: {},
      },
    });
  });

  test('addresses, headers and the key of the variables', () => {
    const given = { 'base-url': 'https://host/llm/v1/', header: ['a=1', 'B: two'] };
    expect(readServeSettings(given, 'k')).toMatchObject({
      settings: { baseUrl: 'https://host/llm', headers: { authorization: 'Bearer k', a: '1', b: 'two' } },
    });
    expect(readServeSettings({ host: '::1', port: '7' }, undefined)).toMatchObject({
      settings: { baseUrl: 'http://[::1]:7' },
    });
  });

  test.each([
    [{ 'num-prompts': '0' }, '--num-prompts: expected a whole number from 1 to 10000000, got "0"'],
    [{ 'base-url': 'host:8000' }, '--base-url: expected a URL like http://127.0.0.1:8000, got host:8000'],
    [
      { endpoint: '/v1/embeddings' },
      '--endpoint: expected /v1/completions or /v1/chat/completions, got /v1/embeddings',
    ],
    [{ 'dataset-name': 'custom' }, '--dataset-path: --dataset-name custom needs a file'],
    [{ 'dataset-path': 'x' }, '--dataset-path: is for --dataset-name sharegpt or custom'],
    [
      { 'percentile-metrics': 'ttft,x' },
      '--percentile-metrics: expected some of ttft, tpot, itl, e2el with commas, got x',
    ],
    [{ 'metric-percentiles': '50,101' }, '--metric-percentiles: expected a number from 0 to 100, got "101"'],
    [{ 'save-detailed': 'true' }, '--save-detailed: is only for --save-result'],
    [{ header: ['x'] }, '--header: expected name=value, got x'],
  ])('refuses %j', (flags, message) => {
    const read = readServeSettings(flags, undefined);
    expect(read.kind === 'error' ? read.problems.map(formatProblem) : []).toEqual([message]);
  });
});

describe('prompts', () => {
  const random: Dataset = { name: 'random', inputTokens: 40, outputTokens: 8, rangeRatio: 0, prefixTokens: 0 };
  const make = (dataset: Dataset, count: number, seed = 0) => makePrompts(dataset, count, seed, ONE_EACH);

  test('random ones are the same for the same seed, and differ from each other', () => {
    const some = make(random, 20, 7);
    expect(make(random, 20, 7)).toEqual(some);
    expect(make(random, 20, 8)).not.toEqual(some);
    expect(new Set(some.map(({ text }) => text)).size).toBe(20);
    for (const { text, outputTokens } of some) expect([text.split(' ').length, outputTokens]).toEqual([40, 8]);
  });

  test('random lengths differ as told, and a prefix is shared', () => {
    const some = make({ ...random, rangeRatio: 0.5, prefixTokens: 10 }, 200);
    const lengths = some.map(({ text }) => text.split(' ').length - 10);
    expect([Math.min(...lengths), Math.max(...lengths)]).toEqual([20, 60]);
    expect(new Set(some.map(({ text }) => text.split(' ').slice(0, 10).join(' '))).size).toBe(1);
  });

  test('words are as many as come to the tokens that are wanted', () => {
    // 16 words are 105 tokens there and 48 are 297: 6 each and 9 besides.
    expect(fitWords([105, 297])).toEqual({ each: 6, besides: 9 });
    const [one] = makePrompts({ ...random, inputTokens: 609 }, 1, 0, { each: 6, besides: 9 });
    expect(one?.text.split(' ')).toHaveLength(100);
    expect(fitWords([0, 0])).toEqual(ONE_EACH);
  });

  test('ShareGPT: questions that have an answer, answers as long as theirs', () => {
    const turn = (value: string) => ({ from: 'x', value });
    const path = fileOf(
      'sharegpt.json',
      JSON.stringify([
        { conversations: [turn('a long enough question'), turn('y'.repeat(40)), turn('more')] },
        { conversations: [turn('a question without an answer')] },
      ]),
    );
    const prompt = { text: 'a long enough question', outputTokens: 10 };
    expect(make({ name: 'sharegpt', path, outputTokens: undefined }, 2)).toEqual([prompt, prompt]);
    expect(make({ name: 'sharegpt', path, outputTokens: 3 }, 1)).toEqual([{ ...prompt, outputTokens: 3 }]);
  });

  test('a file of prompts is taken in its order, and again from its start', () => {
    const path = fileOf('ok.jsonl', '{"prompt":"a"}\n\n{"prompt":"b","output_tokens":5}\n');
    expect(make({ name: 'custom', path, outputTokens: 9 }, 3)).toEqual([
      { text: 'a', outputTokens: 9 },
      { text: 'b', outputTokens: 5 },
      { text: 'a', outputTokens: 9 },
    ]);
  });

  test.each([
    ['{"prompt":"a"}\n{"text":"b"}', /bad\.jsonl:2: expected \{"prompt": "a text"\}$/],
    ['{"prompt":"a"}\n\n{"prompt"', /bad\.jsonl:3: no JSON: /],
    ['{"prompt":"a","output_tokens":-1}', /bad\.jsonl:1: output_tokens: expected a whole number from 1$/],
    ['\n', /bad\.jsonl has no prompt \(--dataset-path\)$/],
  ])('a malformed file %j is refused with its line', (text, message) => {
    const path = fileOf('bad.jsonl', text);
    expect(() => make({ name: 'custom', path, outputTokens: 9 }, 1)).toThrow(message);
  });

  test('other files that are not as they should be', () => {
    const sharegpt = (path: string) => () => make({ name: 'sharegpt', path, outputTokens: undefined }, 1);
    expect(sharegpt(join(folder, 'none.json'))).toThrow(/none\.json does not exist/);
    expect(sharegpt(fileOf('one.json', '{}'))).toThrow(/one\.json: expected a list of conversations/);
    expect(sharegpt(fileOf('two.json', '[{"conversations":[]},{}]'))).toThrow(/two\.json: entry 2: expected/);
  });
});

describe('times of sending', () => {
  const gapsOf = (times: readonly number[]) => times.map((time, i) => time - (times[i - 1] ?? 0));

  test('all of them together take as long as the rate says', () => {
    for (const burstiness of [0.3, 1, 100, Number.POSITIVE_INFINITY]) {
      expect(arrivalsOf(50, 5, burstiness, seededChance(1)).at(-1)).toBeCloseTo(10_000, 6);
    }
    expect(arrivalsOf(3, Number.POSITIVE_INFINITY, 1, seededChance(1))).toEqual([0, 0, 0]);
  });

  test('the times between have the spread of their gamma distribution', () => {
    // Its coefficient of variation is 1 / sqrt(shape).
    for (const burstiness of [0.25, 1, 100]) {
      const { mean, std } = summarise(gapsOf(arrivalsOf(20_000, 10, burstiness, seededChance(3))));
      expect((std / mean) * Math.sqrt(burstiness)).toBeCloseTo(1, 1);
    }
    expect(summarise(gapsOf(arrivalsOf(9, 3, Number.POSITIVE_INFINITY, seededChance(3)))).std).toBeCloseTo(0, 6);
  });
});

test('the client says when it is the limit itself', () => {
  expect(clientLimit({ busy: 0.5, lateMs: 2 })).toBeUndefined();
  expect(clientLimit({ busy: 0.95, lateMs: 2 })).toMatch(/limit: its event loop was busy 95 % of the time;/);
  expect(clientLimit({ busy: 0.9, lateMs: 80 })).toMatch(/90 % .*, and one in a hundred requests was sent 80 ms late/);
});

test('progress: a bar that moves on a terminal, lines of tenths elsewhere', () => {
  const shown = (terminal: boolean) => {
    const written: string[] = [];
    const bar = createBar({ terminal, total: 40, write: (text) => written.push(text) });
    for (let i = 0; i < 40; i++) bar.step(i === 0);
    bar.end();
    return written;
  };
  const lines = shown(false);
  expect(lines).toHaveLength(10);
  expect(lines[0]).toMatch(/^4 of 40 requests, 1 failed, \d\.\d s\n$/);
  expect(lines.join('')).not.toContain('\r');
  const drawn = shown(true);
  expect(drawn[0]).toContain(`\r\u001b[K[${'.'.repeat(30)}] 0 of 40 `);
  expect(drawn.at(-2)).toMatch(/\[#{30}\] 40 of 40 requests, 1 failed/);
  expect(drawn.at(-1)).toBe('\n');
});
