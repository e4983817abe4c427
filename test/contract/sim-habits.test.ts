import { mkdtemp, rm, writeFile } from 'node:fs/promises';
import { createServer } from 'node:http';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, describe, expect, onTestFinished, test } from 'vitest';
import type { JsonObject } from '../../src/sim/json.ts';
import type { Sim } from '../../src/sim/start-sim.ts';
import { at, chatBody, eventsOf, post, prefill, sim, stopSims, textOf } from './sim-support.ts';

const chat = '/v1/chat/completions';
const story = 'the router carries a baton from prefill to decode '.repeat(3);

afterEach(stopSims);

const tokens = async (target: Sim, body: unknown) => at((await post(target, '/tokenize', body)).json, 'tokens');
const say = async (target: Sim, more: JsonObject = {}): Promise<string> =>
  textOf(await post(target, chat, chatBody(story, { ignore_eos: true, ...more })));

describe('a model that thinks', () => {
  const messages = [{ role: 'user', content: story }];
  const body = { model: 'sim-model', messages, max_tokens: 60, ignore_eos: true, return_token_ids: true };

  test('thought and answer are apart, in whole replies and in streams, and both are in the tokens', async () => {
    const p = await sim({ reasoning: true });
    const whole = (await post(p, chat, body)).json;
    const thought = String(at(whole, 'choices', 0, 'message', 'reasoning'));
    const answer = String(at(whole, 'choices', 0, 'message', 'content'));
    expect(thought.length).toBeGreaterThan(1);
    const ids = at(whole, 'choices', 0, 'token_ids');
    // One of 60 ends the thought.
    expect([thought.length + answer.length, Array.isArray(ids) && ids.length]).toEqual([59, 60]);
    const deltas = eventsOf((await post(p, chat, { ...body, stream: true })).text)
      .filter((e) => e !== '[DONE]')
      .map((e) => JSON.parse(e) as unknown)
      .map((e) => at(e, 'choices', 0, 'delta'));
    const joined = (member: string) => deltas.map((delta) => at(delta, member) ?? '').join('');
    expect([joined('reasoning'), joined('content')]).toEqual([thought, answer]);
    const cut = (await post(p, chat, { ...body, max_tokens: 2 })).json;
    expect(at(cut, 'choices', 0, 'message', 'content')).toBeNull();
  });

  test('the template leaves out thoughts of earlier turns, and keeps those of calls that are not answered yet', async () => {
    const p = await sim({ reasoning: true });
    const call = { id: 'a', type: 'function', function: { name: 'look', arguments: '{}' } };
    const said = (reasoning: string) => ({ role: 'assistant', content: 'Yes.', reasoning, tool_calls: [call] });
    const result = { role: 'tool', tool_call_id: 'a', content: 'seen' };
    const more = { role: 'user', content: 'go on' };
    const of = (reasoning: string, ...rest: unknown[]) =>
      tokens(p, { messages: [...messages, said(reasoning), result, ...rest] });
    expect(await of('long ago', more)).toEqual(await of('', more));
    expect(await of('just now')).not.toEqual(await of(''));
  });
});

test('data parallel ranks: each request another one, unless it names one; handles tell which', async () => {
  const [p, d] = [await sim({ dataParallel: 2 }), await sim({ dataParallel: 3 })];
  const plain = await sim({ connector: 'none' });
  const body = chatBody(story);
  const ids = new Set<unknown>();
  for (let i = 0; i < 4; i += 1) {
    const kv = await prefill(p, chat, body);
    ids.add(kv['remote_engine_id']);
    expect(textOf(await post(d, chat, { ...body, kv_transfer_params: kv }))).toBe(
      textOf(await post(plain, chat, body)),
    );
  }
  expect([...ids]).toEqual([0, 1].map((rank) => `${p.engineId.replace(/_dp0$/, '')}_dp${rank}`).toReversed());
  expect([p.state().rankRequests, d.state().pulls]).toEqual([[2, 2], 4]);
  const named = (rank: string) =>
    fetch(p.url + chat, {
      method: 'POST',
      body: JSON.stringify(body),
      headers: { 'content-type': 'application/json', 'x-data-parallel-rank': rank },
    });
  for (const [rank, status] of [
    ['1', 200],
    ['2', 400],
    ['one', 200],
  ] as const) {
    expect((await named(rank)).status).toBe(status);
  }
  const text = await (await fetch(`${p.url}/metrics`)).text();
  expect(text.match(/^vllm:cache_config_info\{/gm)).toHaveLength(2);
});

test('adapters come, are replaced and go; the routes are there only where that is allowed', async () => {
  const [fixed, p] = [await sim(), await sim({ runtimeAdapters: true })];
  const folder = await mkdtemp(join(tmpdir(), 'baton-sim-'));
  onTestFinished(() => rm(folder, { recursive: true, force: true }));
  const path = join(folder, 'adapter');
  const load = (more: JsonObject = {}) =>
    post(p, '/v1/load_lora_adapter', { lora_name: 'style', lora_path: path, ...more });
  const statusOf = async (target: Sim) => (await fetch(`${target.url}/v1/load_lora_adapter`)).status;
  expect([await statusOf(fixed), await statusOf(p)]).toEqual([404, 405]);
  expect((await load()).status).toBe(404);
  await writeFile(path, 'one');
  expect((await load()).status).toBe(200);
  expect(at((await (await fetch(`${p.url}/v1/models`)).json()) as unknown, 'data', 1)).toMatchObject({
    id: 'style',
    root: path,
    parent: 'sim-model',
  });
  const before = await say(p, { model: 'style' });
  expect(before).not.toBe(await say(p));
  expect((await load()).status).toBe(400);
  expect((await load({ load_inplace: true })).status).toBe(200);
  expect(await say(p, { model: 'style' })).toBe(before);
  await writeFile(path, 'two');
  expect((await load({ load_inplace: true })).status).toBe(200);
  expect(await say(p, { model: 'style' })).not.toBe(before);
  const unload = () => post(p, '/v1/unload_lora_adapter', { lora_name: 'style' });
  expect([(await unload()).status, (await unload()).status]).toEqual([200, 404]);
  expect((await post(p, chat, chatBody(story, { model: 'style' }))).status).toBe(404);
});

test('linked pictures are fetched for each request; an answer follows from what they show, the tokens do not', async () => {
  let content = 'one';
  const server = createServer((_, response) => void response.writeHead(content === '' ? 404 : 200).end(content));
  await new Promise<void>((resolve) => void server.listen(0, '127.0.0.1', resolve));
  onTestFinished(() => void server.close());
  const address = server.address();
  const port = typeof address === 'object' ? address?.port : undefined;
  const p = await sim();
  const parts = [
    { type: 'text', text: story },
    { type: 'image_url', image_url: { url: `http://127.0.0.1:${port}/it.png` } },
  ];
  const body = { model: 'sim-model', messages: [{ role: 'user', content: parts }], max_tokens: 20, ignore_eos: true };
  const ask = () => post(p, chat, { ...body, return_token_ids: true });
  const [first, same] = [await ask(), await ask()];
  expect(textOf(same)).toBe(textOf(first));
  content = 'two';
  const other = await ask();
  expect(textOf(other)).not.toBe(textOf(first));
  expect(at(other.json, 'prompt_token_ids')).toEqual(at(first.json, 'prompt_token_ids'));
  content = '';
  expect((await ask()).status).toBe(400);
});

test('a restart may bring another chat template', async () => {
  const p = await sim();
  const messages = [{ role: 'user', content: 'hi' }];
  const [bare, withTools] = [{ messages }, { messages, tools: [{ type: 'function', function: { name: 'look' } }] }];
  const before = [await tokens(p, bare), await tokens(p, withTools)];
  await p.restart('tools-last');
  expect(await tokens(p, bare)).toEqual(before[0]);
  expect(await tokens(p, withTools)).not.toEqual(before[1]);
  await p.restart('preamble');
  expect(await tokens(p, bare)).not.toEqual(before[0]);
  await p.restart('plain');
  expect([await tokens(p, bare), await tokens(p, withTools)]).toEqual(before);
});
