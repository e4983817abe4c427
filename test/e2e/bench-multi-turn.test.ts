import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, expect, test } from 'vitest';
import { benchRun } from '../support/bench-run.ts';
import { type Harness, startHarness } from '../support/harness.ts';

const folder = mkdtempSync(join(tmpdir(), 'baton-bench-'));
const input = join(folder, 'input.json');
const CONVERSATIONS = 5;
const TURNS = 3;
let harness: Harness;

beforeAll(async () => {
  const message = (id: number, at: number) => ({
    role: at % 2 === 0 ? 'user' : 'assistant',
    content: `${id} ${at} ${'some words '.repeat(12)}`,
  });
  const conversation = (_: unknown, id: number) => ({
    id: `c${id}`,
    messages: Array.from({ length: TURNS * 2 }, (_none, at) => message(id, at)),
  });
  writeFileSync(input, JSON.stringify(Array.from({ length: CONVERSATIONS }, conversation)));
  const engine = { bidirectional: true, eosEvery: 0, recordRequests: true };
  harness = await startHarness({ prefill: 1, decode: 1, engine });
  await harness.ready();
});
afterAll(async () => {
  await harness?.[Symbol.asyncDispose]();
  rmSync(folder, { recursive: true });
});

/** Bodies of the turns that an engine was asked since a moment; the one message with which the client tries is left out. */
function bodiesSince(before: number): readonly { messages: readonly unknown[] }[] {
  return harness.decode
    .flatMap(({ requests }) => requests.slice(before))
    .filter(({ path }) => path === '/v1/chat/completions')
    .map(({ body }) => JSON.parse(body.toString()))
    .filter(({ messages }) => messages[0].content !== 'hello');
}

const run = (...words: readonly string[]) => benchRun(['multi-turn', '-i', input, '-u', harness.url, ...words]);
const before = () => harness.decode[0]?.requests.length ?? 0;

test('each turn is asked once with the answers so far, reuse is told, and no two runs have a name in common', async () => {
  const stats = join(folder, 'stats.json');
  const output = join(folder, 'output.json');
  const names = async () => {
    const from = before();
    const words = ['-p', '1', '--send-conversation-id', '--stats-json-output', stats, '-o', output];
    const { code, out, err } = await run(...words);
    expect({ code, err }).toMatchObject({ code: 0, err: expect.stringMatching(/15 of 15 requests, 0 failed/) });
    expect(out).toMatch(/^ttft_ms +15\.0 /m);
    for (const turn of [1, 2, 3]) expect(out).toMatch(new RegExp(`^${turn} +5\\.0 `, 'm'));
    const bodies = bodiesSince(from);
    expect(bodies.map(({ messages }) => messages.length).toSorted()).toEqual([
      1, 1, 1, 1, 1, 3, 3, 3, 3, 3, 5, 5, 5, 5, 5,
    ]);
    const told: { conversation_id: string; outcome: string; saved_tokens: number; turn: number }[] = JSON.parse(
      readFileSync(stats, 'utf8'),
    );
    const hits = told.filter(({ outcome }) => outcome === 'hit');
    expect(hits.length).toBeGreaterThanOrEqual(8);
    for (const { turn, saved_tokens } of hits) expect([turn > 1, saved_tokens > 64]).toEqual([true, true]);
    const saved = hits.reduce((sum, { saved_tokens }) => sum + saved_tokens, 0);
    expect(out).toContain(`hit ${hits.length}`);
    expect(out).toContain(`Prompt tokens saved by handles: ${saved} of `);
    const held = JSON.parse(readFileSync(output, 'utf8'));
    expect(held[0]).toMatchObject({ id: 'c0' });
    expect(held[0].messages).toHaveLength(TURNS * 2);
    return told.map(({ conversation_id }) => conversation_id);
  };
  const [first, second] = [await names(), await names()];
  expect([new Set(first).size, new Set(second).size, new Set([...first, ...second]).size]).toEqual([5, 5, 10]);
});

test('the name goes in the body and as a header where it is wanted', async () => {
  const words = ['multi-turn', '-i', input, '-u', harness.plain.url, '-n', '1'];
  await benchRun([...words, '--send-conversation-id']);
  await benchRun(words);
  const asked = harness.plain.requests
    .filter(({ method }) => method === 'POST')
    .map(({ headers, body }) => [headers['x-session-id'], JSON.parse(body.toString()).conversation_id]);
  expect(asked).toHaveLength(4);
  // The one message with which it tries has none.
  expect([asked[0], asked[2], asked[3]]).toEqual(Array.from({ length: 3 }, () => [undefined, undefined]));
  expect(asked[1]?.[0]).toMatch(/^c0-[0-9a-f]{8}$/);
  expect(asked[1]?.[1]).toBe(asked[1]?.[0]);
});

test('clients, a warm-up step and a limit of messages', async () => {
  const from = before();
  const { out } = await run('-p', '2', '-k', '4', '--warmup-step', '--max-turns', '4', '--no-early-stop');
  // The second turn of each is measured, the first is not, and there is no third.
  expect(out).toMatch(/^ttft_ms +5\.0 /m);
  expect(out).toMatch(/^warmup_runtime_sec = /m);
  expect(bodiesSince(from)).toHaveLength(10);
});

test('a limit of requests is one of all clients together', async () => {
  const { out } = await run('-p', '2', '-n', '6', '--conversation-sampling', 'random', '--seed', '3');
  expect(out).toMatch(/^ttft_ms +6\.0 /m);
});

test('answers that must be those of the file are not: repeated, and the conversation ends', async () => {
  const { code, out, err } = await run('--verify-output', '--max-retries', '0');
  expect({ code, out }).toEqual({ code: 1, out: '' });
  expect(err).toContain(`${CONVERSATIONS} failed: the answer is not that of the file\n`);
});

test('bad input ends it with a sentence', async () => {
  expect(await benchRun(['multi-turn', '-i', join(folder, 'none.json')])).toEqual({
    code: 1,
    out: '',
    err: `baton: ${join(folder, 'none.json')} does not exist\n`,
  });
  expect(await benchRun(['multi-turn', '-i', input, '-u', 'http://127.0.0.1:9'])).toMatchObject({
    code: 1,
    err: expect.stringMatching(/^baton: no endpoint answers at http:\/\/127\.0\.0\.1:9: /),
  });
  expect(await run('-m', 'other')).toMatchObject({ code: 1, err: expect.stringContaining('serves no model other') });
  expect(await run('-p', '9')).toMatchObject({
    code: 1,
    err: expect.stringContaining('5 conversations are too few for 9'),
  });
  expect(await benchRun(['multi-turn'])).toMatchObject({
    code: 2,
    err: expect.stringMatching(/^--input-file: is needed/),
  });
});

test('interrupted, it prints what it has', async () => {
  const { code, out, err } = await benchRun(
    ['multi-turn', '-i', input, '-u', harness.url, '--request-rate', '20'],
    (text) => text.includes(' of 15 requests'),
  );
  expect(code).toBe(1);
  const ended = Number(/interrupted: (\d+) requests had ended/.exec(err)?.[1]);
  expect(ended).toBeGreaterThan(0);
  expect(ended).toBeLessThan(15);
  expect(out).toMatch(new RegExp(`^ttft_ms +${ended}\\.0 `, 'm'));
});
