import { describe, expect, test } from 'vitest';
import { Role } from '../../gen/baton/v1/instance_pb.ts';
import { connectRemote } from '../../src/rpc/clients.ts';
import { Conversation, chatWithPlan } from '../support/conversation.ts';
import { contentOf, type HarnessOptions, post } from '../support/harness.ts';
import { engine, legsOf, startLadder } from './ladder-support.ts';

const ENGINE = { version: '0.32.0', bidirectional: true, maxModelLen: 4096, eosEvery: 0 };
const start = (decodeStream: string, options: HarnessOptions = {}) =>
  startLadder({
    prefill: 1,
    decode: 1,
    yaml: `reuse: { decode_stream: ${decodeStream} }\n`,
    engine: ENGINE,
    ...options,
  });

interface Chunk {
  readonly choices: readonly { readonly delta?: object; readonly finish_reason: string | null }[];
}

const chunksOf = (stream: string): readonly Chunk[] =>
  stream.split('\n\n').flatMap((event) => (event.startsWith('data: {') ? [JSON.parse(event.slice(6))] : []));

/** Names of all members of a chunk, and which are null: what a client can see of its form. */
const formOf = (value: unknown): unknown => {
  if (Array.isArray(value)) return value.map(formOf);
  if (typeof value !== 'object' || value === null) return value === null ? null : typeof value;
  return Object.entries(value).map(([key, member]) => [key, formOf(member)]);
};

/** One chunk of each kind, in order. */
const formsOf = (stream: string) => [...new Set(chunksOf(stream).map((chunk) => JSON.stringify(formOf(chunk))))];

describe('engines that give handles in whole replies alone', () => {
  test('convert: streamed turns leave handles, and what the client sees has the form of the engine’s own stream', async () => {
    await using harness = await start('convert');
    const talk = new Conversation('talk', { stream: true, plain: harness.plain });
    for (let turn = 0; turn < 3; turn++) await talk.turn((body) => chatWithPlan(harness.url, body));
    expect(talk.outcomes.slice(1)).toEqual(['hit', 'hit']);
    const legs = legsOf(engine(harness.decode));
    expect(legs.map(({ body }) => body['stream'])).toEqual([false, false, false]);
    using remote = connectRemote({ url: harness.rpcUrl });
    const { instances } = await remote.poolRegistry.listInstances({ filter: { role: Role.DECODE } });
    expect(instances[0]?.engine).toMatchObject({ version: '0.32.0', kvGroups: 1, handles: 'whole' });
    await harness.expectUnharmed();
  });

  test.each([
    ['chat', '/v1/chat/completions', { messages: [{ role: 'user', content: 'Grüße an alle Läufer. '.repeat(8) }] }],
    ['completions', '/v1/completions', { prompt: 'Grüße an alle Läufer. '.repeat(8) }],
  ])('convert: %s, with and without usage, is what a plain engine streams', async (_, path, prompt) => {
    await using harness = await start('convert');
    for (const options of [undefined, { include_usage: true }, { include_usage: false }]) {
      const stream = options === undefined ? {} : { stream_options: options };
      const body = { model: 'sim-model', max_tokens: 20, stream: true, ...stream, ...prompt };
      const reply = await post(`${harness.url}${path}`, { ...body, conversation_id: `c-${JSON.stringify(options)}` });
      const native = await post(`${harness.plain.url}${path}`, body);
      expect(reply.headers.get('content-type')).toBe(native.headers.get('content-type'));
      expect(reply.headers.get('content-length')).toBeNull();
      expect(formsOf(reply.text)).toEqual(formsOf(native.text));
      const [got, want] = [contentOf(reply.text), contentOf(native.text)];
      expect({ ...got, usage: tokensOf(got.usage) }).toEqual({ ...want, usage: tokensOf(want.usage) });
    }
    expect(legsOf(engine(harness.decode)).map(({ body }) => body['stream'])).toEqual([false, false, false]);
    expect(legsOf(engine(harness.decode)).filter(({ body }) => 'stream_options' in body)).toEqual([]);
  });

  test('convert: what a whole reply cannot be made into a stream of is streamed by the engine', async () => {
    await using harness = await start('convert');
    const messages = [{ role: 'user', content: 'Who is first? '.repeat(8) }];
    const asked = { model: 'sim-model', messages, max_tokens: 12, stream: true, conversation_id: 'c' };
    const reply = await post(`${harness.url}/v1/chat/completions`, { ...asked, logprobs: true });
    expect(chunksOf(reply.text).length).toBeGreaterThan(4);
    const counts = { include_usage: true, continuous_usage_stats: true };
    await post(`${harness.url}/v1/chat/completions`, { ...asked, stream_options: counts });
    expect(legsOf(engine(harness.decode)).map(({ body }) => body['stream'])).toEqual([true, true]);
  });

  test('convert: an error of the engine is an error with its status, as before a stream', async () => {
    await using harness = await start('convert');
    await engine(harness.decode).setFault({ kind: 'status', status: 400, leg: 'decode' });
    const reply = await harness.ask({
      model: 'sim-model',
      messages: [{ role: 'user', content: 'x '.repeat(60) }],
      stream: true,
      conversation_id: 'c',
    });
    expect(reply.status).toBe(400);
    expect(reply.headers.get('content-type')).toMatch(/^application\/json/);
  });

  test('as_client: the client has its stream, and the next turn nothing to read', async () => {
    await using harness = await start('as_client');
    const talk = new Conversation('talk', { stream: true, plain: harness.plain });
    for (let turn = 0; turn < 2; turn++) await talk.turn((body) => chatWithPlan(harness.url, body));
    expect(talk.outcomes[1]).toBe('miss_unsupported_stream');
    expect(legsOf(engine(harness.decode)).map(({ body }) => body['stream'])).toEqual([true, true]);
  });
});

test('convert changes nothing where streams carry handles', async () => {
  await using harness = await start('convert', { engine: { ...ENGINE, version: '0.33.0' } });
  const talk = new Conversation('talk', { stream: true, plain: harness.plain });
  for (let turn = 0; turn < 2; turn++) await talk.turn((body) => chatWithPlan(harness.url, body));
  expect(talk.outcomes[1]).toBe('hit');
  expect(legsOf(engine(harness.decode)).map(({ body }) => body['stream'])).toEqual([true, true]);
});

/** What is cached differs between a pair and one engine. */
function tokensOf(usage: unknown): unknown {
  if (typeof usage !== 'object' || usage === null) return usage;
  return { ...usage, prompt_tokens_details: undefined };
}
