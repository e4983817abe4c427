import { afterEach, describe, expect, test } from 'vitest';
import type { JsonObject } from '../../src/sim/json.ts';
import type { Sim } from '../../src/sim/start-sim.ts';
import { at, chatBody, eventsOf, objectAt, outcome, post, prefill, sim, stopSims, textOf } from './sim-support.ts';

const chat = '/v1/chat/completions';
const completions = '/v1/completions';
const story = 'the router carries a baton from prefill to decode '.repeat(3);

afterEach(stopSims);

async function get(target: Sim, path: string): Promise<unknown> {
  const response = await fetch(target.url + path);
  expect(response.status).toBe(200);
  expect(response.headers.get('x-baton-sim')).toBe('1');
  return response.json();
}

test('models, version, load and health', async () => {
  const p = await sim({ models: ['m', { id: 'alias', root: 'm' }, { id: 'lora', root: '/adapter', parent: 'm' }] });
  const cards = await get(p, '/v1/models');
  expect(at(cards, 'data', 0)).toMatchObject({
    id: 'm',
    object: 'model',
    owned_by: 'vllm',
    root: 'm',
    parent: null,
    max_model_len: 8192,
  });
  expect(at(cards, 'data', 2)).toMatchObject({ id: 'lora', root: '/adapter', parent: 'm', max_model_len: null });
  expect(await get(p, '/version')).toEqual({ version: '0.33.0' });
  expect(await get(p, '/load')).toEqual({ server_load: 0 });
  const health = await fetch(`${p.url}/health`);
  expect([health.status, await health.text()]).toEqual([200, '']);
  expect((await fetch(`${p.url}/ping`, { method: 'POST' })).status).toBe(200);
  expect((await fetch(`${p.url}/v1/models`, { method: 'POST' })).status).toBe(405);
});

test('the name of a model is in the reply; aliases of one root answer alike, an adapter and a cache salt do not', async () => {
  const p = await sim({ models: ['m', { id: 'alias', root: 'm' }, { id: 'lora', root: '/adapter', parent: 'm' }] });
  const ask = async (more: JsonObject): Promise<string> =>
    textOf(await post(p, chat, chatBody(story, { ignore_eos: true, ...more })));
  const base = await ask({ model: 'm' });
  expect(await ask({ model: 'alias' })).toBe(base);
  expect(await ask({ model: 'lora' })).not.toBe(base);
  expect(await ask({ model: 'm', cache_salt: 'x' })).not.toBe(base);
  expect(at((await post(p, chat, chatBody('a', { model: 'alias' }))).json, 'model')).toBe('alias');
});

test('metrics have the names, labels and values of vLLM', async () => {
  const [p, d] = [await sim(), await sim({ models: ['quo"te'] })];
  const body = chatBody(story);
  await post(p, chat, body);
  const kv = await prefill(p, chat, body);
  const text = await (await fetch(`${p.url}/metrics`)).text();
  expect(text).toContain('vllm:cache_config_info{block_size="16",');
  expect(text).toContain('num_gpu_blocks="16384"} 1.0');
  expect(text).toContain(
    'vllm:prompt_tokens_by_source_total{engine="0",model_name="sim-model",source="local_cache_hit"} 144.0',
  );
  expect(text).toContain('vllm:prefix_cache_hits_total{engine="0",model_name="sim-model"} 144.0');
  expect(text).toMatch(/^process_start_time_seconds \d+\.?\d*$/m);
  expect(text).toMatch(/^vllm:kv_cache_usage_perc\{[^}]*\} 0\.0\d+$/m);
  await post(d, chat, { ...body, model: 'quo"te', kv_transfer_params: kv });
  const other = await (await fetch(`${d.url}/metrics`)).text();
  expect(other).toContain('model_name="quo\\"te",source="external_kv_transfer"} 0.0');
});

describe('limits', () => {
  const ask = async (target: Sim, path: string, body: JsonObject): Promise<readonly [unknown, unknown]> => {
    const reply = await post(target, path, body);
    return [at(reply.json, 'usage', 'completion_tokens'), at(reply.json, 'choices', 0, 'finish_reason')];
  };

  test('max_completion_tokens wins, completions stop at 16, chat at its cap, and the window cuts both', async () => {
    const p = await sim({ eosEvery: 0, maxModelLen: 60, defaultMaxTokens: 20 });
    expect(await ask(p, chat, chatBody('a', { max_tokens: 1, max_completion_tokens: 5 }))).toEqual([5, 'length']);
    expect(await ask(p, completions, { prompt: 'a' })).toEqual([16, 'length']);
    expect(await ask(p, chat, { messages: [{ role: 'user', content: 'a' }] })).toEqual([20, 'length']);
    expect(await ask(p, completions, { prompt: 'a'.repeat(50), max_tokens: 4000 })).toEqual([10, 'length']);
  });

  test('EOS ends most answers, ignore_eos and min_tokens put it off', async () => {
    const p = await sim({ eosEvery: 4 });
    const [short, reason] = await ask(p, chat, chatBody('b', { max_tokens: 200 }));
    expect(short).toBeLessThan(200);
    expect(reason).toBe('stop');
    expect(await ask(p, chat, chatBody('b', { max_tokens: 200, ignore_eos: true }))).toEqual([200, 'length']);
    const [later] = await ask(p, chat, chatBody('b', { max_tokens: 200, min_tokens: 50 }));
    expect(later).toBeGreaterThan(50);
  });

  test('stop strings and stop tokens end the text and say why', async () => {
    const p = await sim({ eosEvery: 0 });
    const whole = textOf(await post(p, chat, chatBody(story)));
    const stop = whole.slice(5, 8);
    const reply = await post(p, chat, chatBody(story, { stop: ['never seen', stop] }));
    expect(textOf(reply)).toBe(whole.slice(0, whole.indexOf(stop)));
    expect(objectAt(reply.json, 'choices', 0)).toMatchObject({ finish_reason: 'stop', stop_reason: stop });
    const kept = await post(p, chat, chatBody(story, { stop, include_stop_str_in_output: true, stream: true }));
    expect(textOf(kept)).toBe(whole.slice(0, whole.indexOf(stop) + 3));
    const id = whole.charCodeAt(4);
    const byId = await post(p, chat, chatBody(story, { stop_token_ids: [id] }));
    expect(objectAt(byId.json, 'choices', 0)).toMatchObject({ finish_reason: 'stop', stop_reason: id });
  });
});

test('choices of a sampled request differ, a seed repeats them, greedy ones are equal', async () => {
  const p = await sim({ eosEvery: 0 });
  const texts = async (more: JsonObject): Promise<unknown[]> => {
    const reply = await post(p, chat, chatBody(story, { n: 2, ...more }));
    return [0, 1].map((index) => at(reply.json, 'choices', index, 'message', 'content'));
  };
  const sampled = await texts({ temperature: 1, seed: 3 });
  expect(sampled[0]).not.toBe(sampled[1]);
  expect(await texts({ temperature: 1, seed: 3 })).toEqual(sampled);
  expect(await texts({ temperature: 1, seed: 4 })).not.toEqual(sampled);
  const greedy = await texts({ temperature: 0 });
  expect(greedy[0]).toBe(greedy[1]);
});

test('several prompts and choices are numbered prompt by prompt, and only the first prompt has a handle', async () => {
  const p = await sim();
  const flags = { do_remote_decode: true, do_remote_prefill: false };
  const reply = await post(
    p,
    completions,
    { prompt: ['one', [116, 119, 111]], n: 2, max_tokens: 1, kv_transfer_params: flags },
    { id: 'x' },
  );
  expect([0, 1, 2, 3].map((index) => at(reply.json, 'choices', index, 'index'))).toEqual([0, 1, 2, 3]);
  expect(at(reply.json, 'kv_transfer_params', 'remote_request_id')).toMatch(/^1_cmpl-x-0-[0-9a-f]{8}$/);
  expect(at(reply.json, 'usage', 'prompt_tokens')).toBe(6);
  expect(p.state().pins).toBe(4);
});

test('token ids are those of the tokenizer, whole and streamed', async () => {
  const p = await sim({ eosEvery: 6 });
  const body = chatBody(story, { return_token_ids: true, max_tokens: 60 });
  const tokens = at((await post(p, '/tokenize', { messages: body['messages'] })).json, 'tokens');
  const reply = await post(p, chat, body);
  expect(at(reply.json, 'prompt_token_ids')).toEqual(tokens);
  const ids = at(reply.json, 'choices', 0, 'token_ids');
  expect(at((await post(p, '/detokenize', { tokens: ids })).json, 'prompt')).toBe(`${textOf(reply)}</s>`);
  const events = eventsOf((await post(p, chat, { ...body, stream: true })).text)
    .slice(0, -1)
    .map((event): unknown => JSON.parse(event));
  expect(at(events[0], 'prompt_token_ids')).toEqual(tokens);
  expect(events.flatMap((event) => at(event, 'choices', 0, 'token_ids') ?? [])).toEqual(ids);
  expect(at(events.at(-1), 'choices', 0)).toMatchObject({
    delta: { content: '' },
    finish_reason: 'stop',
    token_ids: [257],
  });
  const text = await post(p, completions, { prompt: 'abc', return_token_ids: true, max_tokens: 2 });
  expect(objectAt(text.json, 'choices', 0)).toMatchObject({ prompt_token_ids: [97, 98, 99] });
});

test('a chat request can bring its prompt as ids, and tokenize overlooks what chat honours', async () => {
  const p = await sim();
  const body = chatBody(story);
  const tokens = at((await post(p, '/tokenize', { messages: body['messages'] })).json, 'tokens');
  const kv = { do_remote_decode: true, do_remote_prefill: false, prompt_token_ids: tokens };
  const byIds = await post(p, chat, chatBody('something else', { kv_transfer_params: kv }));
  expect(textOf(byIds)).toBe(textOf(await post(p, chat, body)));
  const bad = await post(p, chat, { ...body, kv_transfer_params: { ...kv, prompt_token_ids: [] } });
  expect([bad.status, at(bad.json, 'error', 'param')]).toEqual([400, 'kv_transfer_params.prompt_token_ids']);
  const cut = await post(p, chat, { ...body, truncate_prompt_tokens: 8 });
  expect(at(cut.json, 'usage', 'prompt_tokens')).toBe(8);
  const counted = await post(p, '/tokenize', { messages: body['messages'], truncate_prompt_tokens: 8 });
  expect(at(counted.json, 'count')).toBe(Array.isArray(tokens) ? tokens.length : 0);
});

describe('tools', () => {
  const tools = ['alpha', 'beta'].map((name) => ({ type: 'function', function: { name, parameters: {} } }));

  test.each([
    ['required', 'tool_calls'],
    [{ type: 'function', function: { name: 'beta' } }, 'stop'],
  ] as const)('a choice of %j is a call, the same whole and streamed', async (tool_choice, finish) => {
    const p = await sim();
    const body = chatBody(story, { tools, tool_choice, max_tokens: 200 });
    const reply = await post(p, chat, body);
    const call = objectAt(reply.json, 'choices', 0, 'message', 'tool_calls', 0);
    expect(at(reply.json, 'choices', 0, 'finish_reason')).toBe(finish);
    const text = at(call, 'function', 'arguments');
    expect(JSON.parse(String(text))).toEqual({ input: expect.stringMatching(/^[a-z]{8}$/) });
    const events = eventsOf((await post(p, chat, { ...body, stream: true })).text).slice(0, -1);
    const deltas = events.flatMap((event) => at(JSON.parse(event), 'choices', 0, 'delta', 'tool_calls', 0) ?? []);
    expect(deltas[0]).toMatchObject({
      id: call['id'],
      type: 'function',
      index: 0,
      function: { name: at(call, 'function', 'name') },
    });
    expect(deltas.map((delta) => String(at(delta, 'function', 'arguments'))).join('')).toBe(text);
    expect(at(JSON.parse(events.at(-1) ?? ''), 'choices', 0, 'finish_reason')).toBe(finish);
  });

  test('auto is text', async () => {
    const reply = await post(await sim(), chat, chatBody(story, { tools }));
    expect(at(reply.json, 'choices', 0, 'message', 'tool_calls')).toBeUndefined();
  });
});

test('log probabilities go with the tokens, echo brings the prompt along', async () => {
  const p = await sim({ eosEvery: 0 });
  const reply = await post(p, completions, {
    prompt: 'ab',
    max_tokens: 3,
    echo: true,
    logprobs: 2,
    prompt_logprobs: 1,
  });
  const text = textOf(reply);
  expect(text.startsWith('ab')).toBe(true);
  const logprobs = objectAt(reply.json, 'choices', 0, 'logprobs');
  expect(Object.keys(logprobs)).toEqual(['text_offset', 'token_logprobs', 'tokens', 'top_logprobs']);
  expect(logprobs['tokens']).toEqual([...text]);
  expect(logprobs['text_offset']).toEqual([0, 1, 2, 3, 4]);
  expect(at(logprobs, 'token_logprobs', 0)).toBeNull();
  expect(at(reply.json, 'choices', 0, 'prompt_logprobs', 0)).toBeNull();
  expect(at(reply.json, 'choices', 0, 'prompt_logprobs', 1, '98', 'decoded_token')).toBe('b');
});

test('more log probabilities than an engine allows are refused, and it lives on', async () => {
  const p = await sim();
  for (const [path, body] of [
    [chat, chatBody(story, { logprobs: true, top_logprobs: 99 })],
    [completions, { prompt: 'ab', logprobs: 99 }],
  ] as const) {
    const reply = await post(p, path, body);
    expect([reply.status, at(reply.json, 'error', 'param')]).toEqual([400, 'logprobs']);
  }
  const most = await post(p, chat, chatBody(story, { logprobs: true, top_logprobs: 20, max_tokens: 1 }));
  expect(at(most.json, 'choices', 0, 'logprobs', 'content', 0, 'top_logprobs')).toHaveLength(20);
});

test('several tokens in one event', async () => {
  const one = await sim({ eosEvery: 0 });
  const four = await sim({ eosEvery: 0, tokensPerEvent: 4 });
  const body = chatBody(story, { stream: true, max_tokens: 10 });
  const [a, b] = [await post(one, chat, body), await post(four, chat, body)];
  expect(textOf(b)).toBe(textOf(a));
  expect([eventsOf(a.text).length, eventsOf(b.text).length]).toEqual([12, 5]);
});

test('an answer that is read back may have other tokens with the pairs tokenizer', async () => {
  const p = await sim({ tokenizer: 'pairs', eosEvery: 0 });
  const reply = await post(p, completions, { prompt: 'abcd', max_tokens: 200, return_token_ids: true });
  expect(at(reply.json, 'usage', 'prompt_tokens')).toBe(2);
  const again = await post(p, '/tokenize', { prompt: textOf(reply) });
  expect(at(again.json, 'tokens')).not.toEqual(at(reply.json, 'choices', 0, 'token_ids'));
});

test('api keys guard only /v1, and a wrong content type is refused', async () => {
  const p = await sim({ apiKey: 'k' });
  const reply = await post(p, chat, chatBody('a'));
  expect([reply.status, reply.json]).toEqual([401, { error: 'Unauthorized' }]);
  expect((await fetch(`${p.url}/health`)).status).toBe(200);
  expect((await fetch(`${p.url}/v1/models`, { headers: { authorization: 'Bearer k' } })).status).toBe(200);
  const other = await sim();
  const plain = await fetch(other.url + chat, {
    method: 'POST',
    headers: { 'content-type': 'text/plain' },
    body: '{}',
  });
  expect(plain.status).toBe(400);
  expect(await outcome(post(other, completions, { prompt: '' }))).toBe(400);
});
