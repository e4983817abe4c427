import { readFileSync } from 'node:fs';
import { afterEach, expect, test } from 'vitest';
import { isObject, type JsonObject } from '../../src/sim/json.ts';
import type { Sim } from '../../src/sim/start-sim.ts';
import { at, eventsOf, objectAt, post, prefill, prefillFlags, sim, stopSims } from './sim-support.ts';

// Key sets, key order and null members of replies recorded from real engines; values are replaced by their types.
const golden: unknown = JSON.parse(readFileSync(new URL('../fixtures/sim-shapes.json', import.meta.url), 'utf8'));

function shapeOf(value: unknown): unknown {
  if (value === null) return 'null';
  if (Array.isArray(value)) {
    if (value.length === 0) return [];
    if (value.every((item) => typeof item === 'number')) return ['number'];
    if (value.every((item) => Array.isArray(item))) return [shapeOf(value[0])];
    return value.map(shapeOf);
  }
  if (isObject(value)) return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, shapeOf(item)]));
  return typeof value;
}

/** As text, because the order of keys counts. */
function wholeShape(text: string): string {
  return JSON.stringify(shapeOf(JSON.parse(text)), null, 1);
}

function streamShape(text: string): string {
  const shapes: string[] = [];
  for (const event of eventsOf(text)) {
    const shape = event === '[DONE]' ? JSON.stringify(event) : JSON.stringify(shapeOf(JSON.parse(event)));
    if (shape !== shapes.at(-1)) shapes.push(shape);
  }
  return shapes.join('\n');
}

function recorded(name: string): string {
  const value = at(golden, 'replies', name);
  if (value === undefined) throw new Error(`no recorded reply ${name}`);
  return Array.isArray(value) ? value.map((event) => JSON.stringify(event)).join('\n') : JSON.stringify(value, null, 1);
}

afterEach(stopSims);

const chat = '/v1/chat/completions';
const completions = '/v1/completions';
const long = 'token block router cache '.repeat(8);
const chatBody = (more: JsonObject = {}): JsonObject => ({
  model: 'tiny',
  messages: [{ role: 'user', content: long }],
  max_tokens: 8,
  temperature: 0,
  ...more,
});
const textBody = (more: JsonObject = {}): JsonObject => ({
  model: 'tiny',
  prompt: long,
  max_tokens: 8,
  temperature: 0,
  ...more,
});
const withUsage = { stream: true, stream_options: { include_usage: true } };
const continuous = { stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };

function engine(more: object = {}): Promise<Sim> {
  return sim({ models: ['tiny'], eosEvery: 0, ...more });
}

test.each([
  ['v033-plain-chat', chat, chatBody()],
  ['v033-plain-chat-n2', chat, chatBody({ n: 2, temperature: 1 })],
  ['v033-plain-completion', completions, textBody()],
  ['v033-P-chat-for-nonstream', chat, chatBody({ max_tokens: 1, kv_transfer_params: prefillFlags })],
  [
    'v033-P-chat-logprobs',
    chat,
    chatBody({ max_tokens: 1, logprobs: true, top_logprobs: 2, kv_transfer_params: prefillFlags }),
  ],
  [
    'v033-P-chat-both-max-differ',
    chat,
    chatBody({ max_tokens: 1, max_completion_tokens: 9, kv_transfer_params: prefillFlags }),
  ],
  ['v033-P-completion-for-nonstream', completions, textBody({ max_tokens: 1, kv_transfer_params: prefillFlags })],
  [
    'v033-P-completion-two-prompts',
    completions,
    textBody({ prompt: [long, `x${long}`], max_tokens: 1, kv_transfer_params: prefillFlags }),
  ],
  ['v033-plain-chat-stream-nousage', chat, chatBody({ stream: true })],
  ['v033-plain-chat-stream-usage', chat, chatBody(withUsage)],
  ['v033-plain-chat-stream-continuous-usage', chat, chatBody(continuous)],
  ['v033-plain-completion-stream-usage', completions, textBody(withUsage)],
  ['v033-P-chat-streamed', chat, chatBody({ max_tokens: 1, stream: true, kv_transfer_params: prefillFlags })],
] as const)('one engine, as recorded: %s', async (name, path, body) => {
  const reply = await post(await engine(), path, body);
  expect(reply.status).toBe(200);
  expect(reply.json === undefined ? streamShape(reply.text) : wholeShape(reply.text)).toBe(recorded(name));
});

test.each([
  ['v033-D-chat-nonstream', chat, chatBody()],
  ['v033-D-completion-nonstream', completions, textBody()],
  ['v033-D-chat-stream-nousage', chat, chatBody({ stream: true })],
  ['v033-D-chat-stream-usage', chat, chatBody(withUsage)],
  ['v033-D-completion-stream-nousage', completions, textBody({ stream: true })],
  ['v033-D-completion-stream-usage', completions, textBody(withUsage)],
] as const)('decode leg of a bidirectional pair, as recorded: %s', async (name, path, body) => {
  const [p, d] = [await engine({ bidirectional: true }), await engine({ bidirectional: true })];
  const kv = await prefill(p, path, body);
  const reply = await post(d, path, { ...body, kv_transfer_params: kv });
  expect(reply.json === undefined ? streamShape(reply.text) : wholeShape(reply.text)).toBe(recorded(name));
});

test('the second turn on the prefill engine reads from the decode engine, as recorded', async () => {
  const [p, d] = [await engine({ bidirectional: true }), await engine({ bidirectional: true })];
  const body = chatBody({ max_tokens: 80 });
  const first = await post(d, chat, { ...body, kv_transfer_params: await prefill(p, chat, body) });
  const messages = [
    { role: 'user', content: long },
    { role: 'assistant', content: at(first.json, 'choices', 0, 'message', 'content') },
    { role: 'user', content: 'and then?' },
  ];
  const turn = { ...body, messages, max_tokens: 1, kv_transfer_params: objectAt(first.json, 'kv_transfer_params') };
  const second = await post(p, chat, turn);
  expect(wholeShape(second.text)).toBe(recorded('v033-turn2-P-chat-with-D-blocks'));
  expect(p.state().pulls).toBe(1);
  expect(p.state().mismatchedPulls).toBe(0);
  expect(d.state().pins).toBe(0);
});

test.each([
  ['v032-plain-chat', chat, chatBody()],
  ['v032-plain-completion', completions, textBody()],
  ['v032-P-chat-for-nonstream', chat, chatBody({ max_tokens: 1, kv_transfer_params: prefillFlags })],
  ['v032-D-chat-stream-nousage', chat, chatBody({ stream: true })],
  ['v032-D-chat-stream-usage', chat, chatBody(withUsage)],
  ['v032-D-completion-stream-nousage', completions, textBody({ stream: true })],
  ['v032-plain-chat-stream-continuous-usage', chat, chatBody(continuous)],
] as const)('the wire of 0.32, as recorded: %s', async (name, path, body) => {
  const reply = await post(await engine({ version: '0.32.0' }), path, body);
  expect(reply.json === undefined ? streamShape(reply.text) : wholeShape(reply.text)).toBe(recorded(name));
});

test('a load failure in a chat stream is a role chunk, an error event and the end, as recorded', async () => {
  const [p, d] = [await engine(), await engine()];
  const kv = { ...(await prefill(p, chat, chatBody())), remote_engine_id: '00000000-0000-0000-0000-000000000000' };
  const reply = await post(d, chat, chatBody({ stream: true, kv_transfer_params: kv }));
  expect(reply.status).toBe(200);
  expect(streamShape(reply.text)).toBe(recorded('v032-D-wrong-engine-id-stream'));
  expect(eventsOf(reply.text)[1]).toBe(
    '{"error": {"message": "Internal server error", "type": "InternalServerError", "param": null, "code": 500}}',
  );
});

const tooLong = 'x'.repeat(9000);
const aTool = { type: 'function', function: { name: 'f', parameters: {} } };

test.each([
  ['P-err-404-path', '/v1/nothing', chatBody()],
  ['P-err-bad-model', chat, chatBody({ model: 'nope' })],
  ['P-err-bad-temperature', chat, chatBody({ temperature: -1 })],
  ['P-err-empty-messages', chat, chatBody({ messages: [] })],
  ['P-err-max-tokens-0', chat, chatBody({ max_tokens: 0 })],
  ['P-err-no-messages', chat, { model: 'tiny' }],
  ['P-err-not-json', chat, '{not json'],
  ['P-err-too-long', chat, chatBody({ messages: [{ role: 'user', content: tooLong }] })],
  ['P-err-too-long-completion', completions, textBody({ prompt: tooLong })],
  ['P-err-tools-not-enabled', chat, chatBody({ tools: [aTool], tool_choice: 'auto' })],
  ['P-chat-kv-not-object', chat, chatBody({ kv_transfer_params: 'x' })],
  ['P-chat-min-tokens-over-max', chat, chatBody({ max_tokens: 1, min_tokens: 5 })],
  ['P-chat-stream-options-without-stream', chat, chatBody({ stream: false, stream_options: { include_usage: true } })],
] as const)('the error is the recorded one: %s', async (name, path, body) => {
  const reply = await post(await engine({ autoToolChoice: false }), path, body);
  expect({ status: reply.status, body: reply.json }).toEqual(at(golden, 'errors', name));
});
