import { type AddressInfo, connect, createServer, type Socket } from 'node:net';
import { create } from '@bufbuild/protobuf';
import { durationMs } from '@bufbuild/protobuf/wkt';
import { afterEach, describe, expect, test } from 'vitest';
import { InstanceState } from '../../gen/baton/v1/instance_pb.ts';
import { EntryKeySchema } from '../../gen/baton/v1/kv_cache_store_pb.ts';
import { connectRemote } from '../../src/rpc/clients.ts';
import { contentOf, type Harness, type HarnessOptions, post, startHarness } from '../support/harness.ts';
import { instanceAt, instancesOf } from '../support/instances.ts';
import { expectBreach, startOtherPrompt } from '../support/other-prompt.ts';
import { engine, metricOf, untilUnread } from './ladder-support.ts';

const open: AsyncDisposable[] = [];
afterEach(async () => {
  while (open.length > 0) await open.pop()?.[Symbol.asyncDispose]();
});

async function start(options: HarnessOptions = {}): Promise<Harness> {
  const harness = await startHarness({
    ...options,
    engine: { bidirectional: true, maxModelLen: 4096, eosEvery: 0, recordRequests: true, ...options.engine },
  });
  open.push(harness);
  const isReady = async () => (await instancesOf(harness)).every(({ state }) => state === InstanceState.READY);
  await expect.poll(isReady).toBe(true);
  return harness;
}

type Message = { readonly role: string; readonly content: string };

/** A conversation of which every answer, long enough to be worth a pull, is compared with the plain engine's. */
class Talk {
  readonly #harness: Harness;
  readonly #named: Readonly<Record<string, unknown>>;
  readonly #headers: Readonly<Record<string, string>>;
  messages: Message[];

  constructor(harness: Harness, id: string, options: { readonly headers?: Readonly<Record<string, string>> } = {}) {
    this.#harness = harness;
    this.#named = options.headers === undefined ? { conversation_id: id } : {};
    this.#headers = { ...options.headers };
    this.messages = [{ role: 'user', content: `${id}: ${'tell me about batons '.repeat(12)}` }];
  }

  /** One turn; gives what `x-baton-plan` says. */
  async turn(extra: Readonly<Record<string, unknown>> = {}): Promise<Readonly<Record<string, string>>> {
    const body = { model: 'sim-model', messages: this.messages, max_tokens: 120, ...extra };
    const headers = { 'x-baton-debug': '1', ...this.#headers };
    const reply = await post(`${this.#harness.url}/v1/chat/completions`, { ...body, ...this.#named }, { headers });
    expect(reply.status, reply.text).toBe(200);
    const right = await post(`${this.#harness.plain.url}/v1/chat/completions`, body);
    const got = contentOf(reply.text);
    expect({ texts: got.texts, finish: got.finish }).toEqual({
      texts: contentOf(right.text).texts,
      finish: contentOf(right.text).finish,
    });
    this.messages = [
      ...this.messages,
      { role: 'assistant', content: got.texts[0] ?? '' },
      { role: 'user', content: 'go on' },
    ];
    const parts = (reply.headers.get('x-baton-plan') ?? '').split('; ');
    return Object.fromEntries(parts.map((part) => part.split('=') as [string, string]));
  }
}

function harmOf(harness: Harness) {
  return [...harness.prefill, ...harness.decode].map((sim) => {
    const { mismatchedPulls, doubleReads, expiredReads, hung, deathReason } = sim.state();
    return { mismatchedPulls, doubleReads, expiredReads, hung, deathReason };
  });
}

const UNHARMED = { mismatchedPulls: 0, doubleReads: 0, expiredReads: 0, hung: 0, deathReason: null };

describe('a prefill leg with a handle fails', () => {
  test('500: it is asked again without one, and the client sees nothing of it', async () => {
    const harness = await start({ prefill: 1, decode: 1 });
    const talk = new Talk(harness, 'fails');
    await talk.turn();
    await engine(harness.prefill).setFault({ kind: 'status', status: 500, leg: 'prefill' });
    expect(await talk.turn()).toMatchObject({ outcome: 'warm_failed_cold_retry' });
    expect(await metricOf(harness, 'baton_reuse_total{outcome="warm_failed_cold_retry"}')).toBe(1);
    const takes = 'baton_store_duration_seconds_count{method="TakeEntry",outcome="ok"}';
    expect(await metricOf(harness, takes)).toBeGreaterThan(0);
    expect(await metricOf(harness, 'baton_retries_total{reason="warm"}')).toBe(1);
    // The handle was spent, and the turn left a new one.
    expect(await talk.turn()).toMatchObject({ outcome: 'hit' });
    for (const harm of harmOf(harness)) expect(harm).toEqual(UNHARMED);
  });

  test('400: the engine refuses the request, and the handle is good for the next', async () => {
    const harness = await start({ prefill: 1, decode: 1 });
    const talk = new Talk(harness, 'refused');
    await talk.turn();
    const body = { model: 'sim-model', messages: talk.messages, temperature: -1, conversation_id: 'refused' };
    expect((await post(`${harness.url}/v1/chat/completions`, body)).status).toBe(400);
    expect(await talk.turn()).toMatchObject({ outcome: 'hit' });
  });
});

describe('the engine that is asked for the prompt’s tokens', () => {
  test.each([
    ['answers 500', { kind: 'status', status: 500 }],
    ['breaks off', { kind: 'reset' }],
    ['does not answer', { kind: 'hang' }],
  ] as const)('%s: the next one tells them, and the turn is a hit', async (_what, fault) => {
    const harness = await start({ prefill: 2, decode: 1, yaml: 'timeouts: { tokenize: 1500ms }' });
    const talk = new Talk(harness, 'tokens');
    await talk.turn();
    // Both, so that it does not matter which is asked first: the decode engine is the third.
    for (const sim of harness.prefill) await sim.setFault({ ...fault, path: '/tokenize', count: 10 });
    expect(await talk.turn()).toMatchObject({ outcome: 'hit' });
    await engine(harness.decode).setFault({ ...fault, path: '/tokenize', count: 10 });
    expect(await talk.turn()).toMatchObject({ outcome: 'miss_unverifiable' });
    for (const harm of harmOf(harness)) expect(harm).toEqual(UNHARMED);
  });
});

const HANGS = 'timeouts: { prefill_warm: 300ms, prefill_warm_per_token: 0s }';
const noPull = (role: string, index: number) => (role === 'prefill' && index === 0 ? { bidirectional: false } : {});

describe('a prefill engine cannot read from decode engines', () => {
  test('auto: its first leg with a handle hits the limit of the trial, and it gets no more', async () => {
    const harness = await start({ prefill: 1, decode: 1, engineOf: noPull, yaml: HANGS });
    const { url } = engine(harness.prefill);
    expect((await instanceAt(harness, url)).kv?.bidirectional).toBe('auto');
    const talk = new Talk(harness, 'off');
    await talk.turn();
    expect(await talk.turn()).toMatchObject({ outcome: 'warm_failed_cold_retry' });
    expect((await instanceAt(harness, url)).kv?.bidirectional).toBe('off');
    expect(await metricOf(harness, 'baton_reuse_alarms_total{what="switched_off"}')).toBe(1);
    expect(await talk.turn()).toMatchObject({ outcome: 'miss_disabled' });
    expect(await talk.turn()).toMatchObject({ outcome: 'miss_disabled' });
    expect(engine(harness.prefill).state().hung).toBe(1);
  });

  test('auto: the first leg with a handle of one that can read switches it on', async () => {
    const harness = await start({ prefill: 1, decode: 1 });
    const { url } = engine(harness.prefill);
    const talk = new Talk(harness, 'on');
    await talk.turn();
    expect(await talk.turn()).toMatchObject({ outcome: 'hit' });
    expect((await instanceAt(harness, url)).kv?.bidirectional).toBe('on');
  });

  test('two hung pulls: it is drained', async () => {
    const yaml = `${HANGS}\npools: { prefill: { bidirectional: on } }`;
    const harness = await start({ prefill: 2, decode: 3, engineOf: noPull, yaml });
    const { url } = engine(harness.prefill);
    // A pair is barred after one hung pull; the engine meets another decode engine each time.
    const talks = Array.from({ length: 6 }, (_, index) => new Talk(harness, `drain-${index}`));
    for (const talk of talks) await talk.turn();
    for (const talk of talks) await talk.turn();
    const instance = await instanceAt(harness, url);
    expect(instance).toMatchObject({ state: InstanceState.DRAINING, stateReason: 'hung_pulls' });
    expect(engine(harness.prefill).state().hung).toBe(2);
    expect(await metricOf(harness, 'baton_reuse_alarms_total{what="drain"}')).toBe(1);
    // The other one reads whatever there is.
    for (const talk of talks) expect(await talk.turn()).toMatchObject({ outcome: 'hit' });
  });
});

describe('a decode engine restarts', () => {
  test('baton has noticed: its handles are gone', async () => {
    const harness = await start({ prefill: 1, decode: 1, yaml: 'health: { interval: 100ms }' });
    const talk = new Talk(harness, 'noticed');
    await talk.turn();
    await talk.turn();
    await engine(harness.decode).restart();
    const generation = async () => (await instanceAt(harness, engine(harness.decode).url)).incarnation?.generation;
    await expect.poll(generation, { timeout: 5000 }).toBe(2);
    await harness.ready();
    expect(await talk.turn()).toMatchObject({ outcome: 'miss_owner_gone' });
    for (const harm of harmOf(harness)) expect(harm).toEqual(UNHARMED);
  });

  test('baton has not noticed: the prefill engine fails on the handle and is asked again', async () => {
    const harness = await start({ prefill: 1, decode: 1, yaml: 'health: { interval: 60s }' });
    const talk = new Talk(harness, 'unnoticed');
    await talk.turn();
    await engine(harness.decode).restart();
    expect(await talk.turn()).toMatchObject({ outcome: 'warm_failed_cold_retry' });
    expect(engine(harness.prefill).state().loadFailures).toBe(1);
    expect(await talk.turn()).toMatchObject({ outcome: 'hit' });
    for (const harm of harmOf(harness)) expect(harm).toEqual(UNHARMED);
  });
});

describe('an engine uses another prompt than the one that was compared', () => {
  test('prefill: it is drained, the answer is right', async () => {
    const engines = await start({ prefill: 2, decode: 1 });
    const [first, second] = [engine(engines.prefill), engine(engines.prefill, 1)];
    const front = await startOtherPrompt(first.url, ({ messages, isGiven }) =>
      isGiven ? [...messages, { role: 'user', content: 'and more' }] : undefined,
    );
    open.unshift(front);
    const harness = await start({
      prefill: 1,
      decode: 0,
      flags: { prefill: [front.url, second.url], decode: [engine(engines.decode).url] },
    });
    for (let i = 0; i < 2; i += 1) {
      const talk = new Talk(harness, `breach-${i}`);
      for (let turn = 0; turn < 3; turn += 1) await talk.turn();
    }
    await expectBreach(harness, front.url);
  });

  test.each([false, true])('decode, stream %s: nothing of its reply is shown, another one answers', async (stream) => {
    const engines = await start({ prefill: 1, decode: 2 });
    const [first, second] = [engine(engines.decode), engine(engines.decode, 1)];
    // As many tokens as there were: nothing but the ids can tell.
    const front = await startOtherPrompt(first.url, ({ messages, isGiven }) =>
      isGiven
        ? messages.map(({ role, content }) => ({ role, content: [...String(content)].reverse().join('') }))
        : undefined,
    );
    open.unshift(front);
    const harness = await start({
      prefill: 0,
      decode: 1,
      flags: { prefill: [engine(engines.prefill).url], decode: [front.url, second.url] },
    });
    for (let i = 0; i < 2; i += 1) {
      const talk = new Talk(harness, `decodes-${i}`);
      for (let turn = 0; turn < 2; turn += 1) await talk.turn({ stream });
    }
    await expectBreach(harness, front.url);
    expect(await metricOf(harness, 'baton_retries_total{reason="other_prompt"}')).toBe(1);
  });
});

test('a store that does not answer costs its budget and no more', async () => {
  const sockets = new Set<Socket>();
  const silent = createServer((socket) => {
    sockets.add(socket);
    socket.on('error', () => undefined);
  });
  await new Promise<void>((resolve) => silent.listen(0, '127.0.0.1', resolve));
  const { port } = silent.address() as AddressInfo;
  open.push({
    async [Symbol.asyncDispose]() {
      for (const socket of sockets) socket.destroy();
      await new Promise((resolve) => silent.close(resolve));
    },
  });
  const yaml = `roles: [facade, router, registry]\nkvstore_url: http://127.0.0.1:${port}`;
  const harness = await start({ prefill: 1, decode: 1, yaml });
  const talk = new Talk(harness, 'away');
  expect(await talk.turn()).toMatchObject({ mode: 'prefill_decode', outcome: 'miss_store_unavailable' });
  expect(await talk.turn()).toMatchObject({ mode: 'prefill_decode', outcome: 'miss_store_unavailable' });
  expect(sockets.size).toBeGreaterThan(0);
});

test('CLIENT_BOUND keeps a conversation on its instances', async () => {
  const harness = await start({ prefill: 3, decode: 3, env: { CLIENT_BOUND: 'true' } });
  const bound = new Talk(harness, 'bound', { headers: { 'session-id': 'bound' } });
  for (let i = 0; i < 5; i += 1) {
    await bound.turn();
    // Others in between: in turn the next pair would be another one.
    await new Talk(harness, `other-${i}`, { headers: { 'session-id': `other-${i}` } }).turn();
  }
  const conv = harness.log.find(({ msg }) => msg === 'request')?.['conv'];
  const lines = harness.log.filter((line) => line['msg'] === 'request' && line['conv'] === conv);
  expect(lines.length).toBe(5);
  expect(new Set(lines.map((line) => line['prefill_instance'])).size).toBe(1);
  expect(new Set(lines.map((line) => line['decode_instance'])).size).toBe(1);
  expect(lines.slice(1).map((line) => line['reuse'])).toEqual(['hit', 'hit', 'hit', 'hit']);
});

test('what a slow reader holds up is taken off the time that its handle is kept', async () => {
  const yaml = 'facade: { stream_buffer: 1KiB }\npools: { decode: { decoder_ttl: 60s } }';
  const harness = await start({ prefill: 1, decode: 1, yaml, engine: { maxModelLen: 8000, decoderTtlMs: 60_000 } });
  const body = {
    model: 'sim-model',
    messages: new Talk(harness, 'slow').messages,
    conversation_id: 'slow',
    stream: true,
    max_tokens: 6000,
    ignore_eos: true,
    logprobs: true,
    top_logprobs: 10,
  };
  const { hostname, port } = new URL(harness.url);
  const socket = connect(Number(port), hostname);
  const text = JSON.stringify(body);
  socket.write(
    `POST /v1/chat/completions HTTP/1.1\r\nhost: baton\r\nconnection: close\r\ncontent-length: ${text.length}\r\n\r\n${text}`,
  );
  socket.pause();
  await untilUnread(harness);
  await new Promise((resolve) => setTimeout(resolve, 400));
  socket.resume();
  await new Promise((resolve) => socket.on('close', resolve));
  using remote = connectRemote({ url: harness.rpcUrl });
  const value = create(EntryKeySchema, { tenant: 'anonymous', model: 'sim-model', conversationId: 'slow' });
  const read = async () => (await remote.kvCacheStore.getEntry({ selector: { case: 'key', value } })).entries[0];
  await expect.poll(read).toBeDefined();
  const entry = await read();
  if (entry?.remainingTtl === undefined || entry.age === undefined) throw new Error('an entry has an age');
  // Of 60 s the last third is not used.
  const kept = durationMs(entry.remainingTtl) + durationMs(entry.age);
  expect(kept).toBeLessThan(40_000 - 350);
  expect(kept).toBeGreaterThan(20_000);
});

describe('what follows from more than the token ids is not found by them', () => {
  test('a picture: equal ids prove nothing', async () => {
    const harness = await start({ prefill: 1, decode: 1 });
    const text = 'tell me about this picture '.repeat(6);
    const picture = { type: 'image_url', image_url: { url: 'data:image/png;base64,AAAA' } };
    const first = { model: 'sim-model', max_tokens: 8, return_token_ids: true, conversation_id: 'picture' };
    const messages = [{ role: 'user', content: [{ type: 'text', text }, picture] }];
    const reply = await post(`${harness.url}/v1/chat/completions`, { ...first, messages });
    const { prompt_token_ids } = JSON.parse(reply.text) as { prompt_token_ids: number[] };
    // The same ids without the picture.
    const again = { ...first, prompt: [...prompt_token_ids, 65, 66] };
    const headers = { 'x-baton-debug': '1' };
    const got = await post(`${harness.url}/v1/completions`, again, { headers });
    const right = await post(`${harness.plain.url}/v1/completions`, again);
    expect(contentOf(got.text).texts).toEqual(contentOf(right.text).texts);
    expect(got.headers.get('x-baton-plan')).toMatch(/outcome=miss_mismatch/);
    // Nor the picture's words by the ids that stand for it.
    const { choices } = JSON.parse(got.text) as { choices: { text: string }[] };
    const more = [...messages, { role: 'assistant', content: choices[0]?.text }, { role: 'user', content: 'on' }];
    const after = await post(`${harness.url}/v1/chat/completions`, { ...first, messages: more }, { headers });
    const alone = await post(`${harness.plain.url}/v1/chat/completions`, { ...first, messages: more });
    expect(contentOf(after.text).texts).toEqual(contentOf(alone.text).texts);
    expect(harmOf(harness)).toEqual([UNHARMED, UNHARMED]);
  });

  test('an adapter: its turns are found under its root', async () => {
    const models = ['sim-model', { id: 'lora', root: 'adapters/lora', parent: 'sim-model' }];
    const harness = await start({ prefill: 1, decode: 1, engine: { models } });
    const talk = new Talk(harness, 'adapter');
    await talk.turn({ model: 'lora' });
    expect(await talk.turn({ model: 'lora' })).toMatchObject({ outcome: 'hit' });
    expect(await talk.turn({ model: 'sim-model' })).toMatchObject({ outcome: 'miss_never' });
  });

  test('a turn that leaves no handle says so, whatever became of the one before', async () => {
    const harness = await start({ prefill: 1, decode: 1 });
    const talk = new Talk(harness, 'nothing');
    await talk.turn();
    expect(await talk.turn({ stop: ['e', 'a', 'o', ' '] })).toMatchObject({ outcome: 'hit' });
    expect(await talk.turn()).toMatchObject({ outcome: 'miss_no_handle' });
  });
});
