import { afterEach, describe, expect, test } from 'vitest';
import { encodeNotice } from '../../src/sim/notice-socket.ts';
import { contentOf, post } from '../support/harness.ts';
import { type Golden, noticeBytes, startGolden } from '../support/lmcache-golden.ts';

// The golden sequences of LMCache 0.5.6's example proxy. Where baton mends the proxy, the mended form stands here:
// - `req_id` is a UUID, not a counter;
// - `/tokenize` gets `model`, `tools` and every other member that it honours;
// - one id over the whole reply, `chatcmpl-…` for chat, and P's `created`;
// - usage is N and 1 + D's; its chunk is a chat chunk in a chat reply;
// - the content type is that of what is sent; a reply that is no stream is JSON, and D is asked for JSON;
// - the end of a generation at its first token is the end of the reply.

let golden: Golden;
afterEach(() => golden?.[Symbol.asyncDispose]());

const UUID = /^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$/;
const hex = (text: string) => Uint8Array.from(Buffer.from(text.replaceAll(' ', ''), 'hex'));
const IDS = [128_000, 1000, 1001, 1002, 1003, 1004];
const ASK = {
  model: 'm',
  prompt: 'What date is today ?',
  max_tokens: 4,
  temperature: 0,
  stream: true,
  stream_options: { include_usage: true },
};
const TOOLS = [{ type: 'function', function: { name: 'date', parameters: {} } }];
const CHAT = {
  model: 'm',
  messages: [{ role: 'user', content: 'Hi there friend' }],
  tools: TOOLS,
  max_tokens: 4,
  max_completion_tokens: 4,
  stream: true,
  stream_options: { include_usage: true },
  logprobs: true,
};

function eventsOf(text: string): readonly unknown[] {
  return text
    .split('\n\n')
    .filter((event) => event.startsWith('data: '))
    .map((event) => (event === 'data: [DONE]' ? '[DONE]' : JSON.parse(event.slice(6))));
}

const complete = (body: unknown, headers: Record<string, string> = {}) =>
  post(`${golden.url}/v1/completions`, body, { headers });
const chat = (body: unknown) => post(`${golden.url}/v1/chat/completions`, body);
/** The legs that decode, drains left out. */
const decodes = () =>
  golden.calls.filter(({ engine, path, body }) => /^D/.test(engine) && path !== '/tokenize' && body['stream'] === true);
const drains = () =>
  golden.calls.filter(({ engine, body }) => /^D/.test(engine) && body['max_tokens'] === 1 && body['stream'] === false);

/** A promise that the test resolves. */
function gate() {
  return Promise.withResolvers<void>();
}

/** Reads a stream until it holds a text; the rest is read by the returned function. */
async function readUntil(reply: Response, wanted: string): Promise<() => Promise<string>> {
  const reader = (reply.body as ReadableStream<Uint8Array>).getReader();
  const decoder = new TextDecoder();
  let text = '';
  const more = async () => {
    const { done, value } = await reader.read();
    text += decoder.decode(value, { stream: true });
    return !done;
  };
  while (!text.includes(wanted)) if (!(await more())) throw new Error(`the stream ended: ${text}`);
  return async () => {
    while (await more());
    return text;
  };
}

function stream(body: unknown, signal?: AbortSignal): Promise<Response> {
  const init = { method: 'POST', body: JSON.stringify(body), ...(signal === undefined ? {} : { signal }) };
  return fetch(`${golden.url}/v1/completions`, init);
}

/** Baton has looked at every frame sent before this one. */
async function allNoticesRead(): Promise<void> {
  const count = async () => {
    const text = await (await fetch(`${golden.adminUrl}/metrics`)).text();
    const lines = text.split('\n').filter((line) => line.startsWith('baton_lmcache_notices_total{'));
    return lines.reduce((sum, line) => sum + Number(line.split(' ')[1]), 0);
  };
  const before = await count();
  await golden.notify(noticeBytes('nobody'));
  await expect.poll(count).toBeGreaterThan(before);
}

test('G1: completions', async () => {
  golden = await startGolden();
  const reply = await complete(ASK);
  const [tokenize, prefill, decode] = golden.calls;
  expect(golden.calls.map(({ engine, path }) => `${engine} ${path}`)).toHaveLength(3);
  expect(tokenize).toEqual({ engine: 'P0', path: '/tokenize', body: { model: 'm', prompt: 'What date is today ?' } });
  const params = prefill?.body['kv_transfer_params'] as { disagg_spec: { req_id: string } } | undefined;
  const id = params?.disagg_spec.req_id ?? '';
  expect(id).toMatch(UUID);
  expect(prefill).toEqual({
    engine: 'P0',
    path: '/v1/completions',
    body: {
      model: 'm',
      prompt: IDS,
      max_tokens: 1,
      temperature: 0,
      stream: false,
      kv_transfer_params: {
        ret_first_tok: true,
        disagg_spec: {
          req_id: id,
          receiver_host: '127.0.0.1',
          receiver_init_port: [golden.initPort],
          receiver_alloc_port: [golden.allocPort],
        },
      },
    },
  });
  expect(golden.sent).toEqual([Buffer.from(encodeNotice(id)).toString('hex')]);
  expect(decode).toEqual({
    engine: 'D0',
    path: '/v1/completions',
    body: {
      model: 'm',
      prompt: [...IDS, 9906],
      max_tokens: 3,
      temperature: 0,
      stream: true,
      stream_options: { include_usage: true },
    },
  });
  expect(reply.headers.get('content-type')).toBe('text/event-stream; charset=utf-8');
  const base = { id: 'cmpl-p1', object: 'text_completion', created: 1_700_000_000, model: 'm' };
  const choice = (text: string, finish: string | null) => ({
    index: 0,
    text,
    logprobs: null,
    finish_reason: finish,
    stop_reason: null,
  });
  expect(eventsOf(reply.text)).toEqual([
    { ...base, choices: [choice(' Hello', null)], usage: null },
    { ...base, choices: [choice(' w0', null)] },
    { ...base, choices: [choice(' w1', null)] },
    { ...base, choices: [choice(' w2', 'length')] },
    { ...base, choices: [], usage: { prompt_tokens: 6, total_tokens: 10, completion_tokens: 4 } },
    '[DONE]',
  ]);
});

test.each(['as it comes', 'coalesced', 'split'])('G2: chat, D’s events %s', async (how) => {
  golden = await startGolden();
  await complete(ASK);
  golden.calls.length = 0;
  golden.decode.coalesce = how === 'coalesced';
  golden.decode.split = how === 'split';
  const reply = await chat(CHAT);
  const [tokenize, prefill, decode] = golden.calls;
  const { model, messages, tools } = CHAT;
  expect(tokenize).toEqual({ engine: 'P1', path: '/tokenize', body: { model, messages, tools } });
  const { stream_options: options, ...rest } = CHAT;
  const prompt = [128_000, 1000, 1001, 1002];
  expect(prefill).toEqual({
    engine: 'P1',
    path: '/v1/completions',
    body: {
      ...rest,
      max_tokens: 1,
      max_completion_tokens: 1,
      stream: false,
      prompt,
      kv_transfer_params: {
        ret_first_tok: true,
        disagg_spec: {
          req_id: expect.stringMatching(UUID),
          receiver_host: '127.0.0.1',
          receiver_init_port: [golden.initPort + 1],
          receiver_alloc_port: [golden.allocPort + 1],
        },
      },
    },
  });
  expect(decode).toEqual({
    engine: 'D1',
    path: '/v1/completions',
    body: { ...rest, max_tokens: 3, max_completion_tokens: 3, prompt: [...prompt, 9906], stream_options: options },
  });
  const base = { id: 'chatcmpl-p1', object: 'chat.completion.chunk', created: 1_700_000_000, model: 'm' };
  const choice = (delta: unknown, finish: string | null = null) => ({
    index: 0,
    delta,
    logprobs: null,
    finish_reason: finish,
    ...(finish === null ? {} : { stop_reason: null }),
  });
  expect(eventsOf(reply.text)).toEqual([
    { ...base, choices: [choice({ role: 'assistant', content: '' })] },
    { ...base, choices: [choice({ content: ' Hello' })] },
    { ...base, choices: [choice({ content: ' w0' })] },
    { ...base, choices: [choice({ content: ' w1' })] },
    { ...base, choices: [choice({ content: ' w2' }, 'length')] },
    { ...base, choices: [], usage: { prompt_tokens: 4, total_tokens: 8, completion_tokens: 4 } },
    '[DONE]',
  ]);
});

test('a reply that is no stream is JSON', async () => {
  golden = await startGolden();
  const { stream: _stream, stream_options: _options, ...rest } = CHAT;
  const reply = await chat(rest);
  expect(reply.headers.get('content-type')).toBe('application/json');
  expect(JSON.parse(reply.text)).toEqual({
    id: 'chatcmpl-p1',
    object: 'chat.completion',
    created: 1_700_000_000,
    model: 'm',
    choices: [
      {
        index: 0,
        message: { role: 'assistant', content: ' Hello w0 w1 w2', refusal: null },
        logprobs: null,
        finish_reason: 'length',
        stop_reason: null,
      },
    ],
    usage: { prompt_tokens: 4, total_tokens: 8, completion_tokens: 4 },
  });
});

describe('G3: two ranks', () => {
  test('D waits for the second notice', async () => {
    golden = await startGolden({ ranks: 2 });
    const second = gate();
    golden.prefill.noticeCount = 1;
    const rest = await readUntil(await stream(ASK), ' Hello');
    await expect.poll(() => golden.sent).toHaveLength(1);
    await allNoticesRead();
    expect(decodes()).toEqual([]);
    await golden.notify(hex(golden.sent[0] ?? ''));
    second.resolve();
    expect(contentOf(await rest()).texts).toEqual([' Hello w0 w1 w2']);
  });

  test('one alone: after the deadline D computes the prompt itself', async () => {
    golden = await startGolden({ ranks: 2, yaml: 'lmcache: { notice_timeout: 100ms }' });
    golden.prefill.noticeCount = 1;
    expect(contentOf((await complete(ASK)).text).texts).toEqual([' Hello w0 w1 w2']);
    expect(decodes()[0]?.body['prompt']).toEqual([...IDS, 9906]);
  });

  test('a count of its own for P: one notice is enough', async () => {
    golden = await startGolden({ ranks: 2, yaml: 'lmcache: { notices: 1 }' });
    golden.prefill.noticeCount = 1;
    expect(contentOf((await complete(ASK)).text).texts).toEqual([' Hello w0 w1 w2']);
  });
});

describe('G4: order', () => {
  test('before the reply of P', async () => {
    golden = await startGolden();
    golden.prefill.noticeFirst = true;
    expect(contentOf((await complete(ASK)).text).texts).toEqual([' Hello w0 w1 w2']);
  });

  test('long after it: the first token goes out, D waits', async () => {
    golden = await startGolden();
    const later = gate();
    golden.prefill.noticeAfter = later.promise;
    const rest = await readUntil(await stream(ASK), ' Hello');
    await allNoticesRead();
    expect(decodes()).toEqual([]);
    later.resolve();
    expect(contentOf(await rest()).texts).toEqual([' Hello w0 w1 w2']);
  });

  test('doubled, foreign and junk frames release nobody else', async () => {
    golden = await startGolden();
    const junk = [hex('c1'), Uint8Array.of(), Buffer.from('{"type":"ProxyNotif"}')];
    golden.prefill.junk = [...junk.map((frame) => [frame]), [noticeBytes('1'), noticeBytes('2')]];
    golden.prefill.noticeCount = 3;
    expect(contentOf((await complete(ASK)).text).texts).toEqual([' Hello w0 w1 w2']);
    const later = gate();
    golden.prefill.noticeAfter = later.promise;
    golden.prefill.noticeCount = undefined;
    const before = decodes().length;
    const rest = await readUntil(await stream(ASK), ' Hello');
    for (const sent of golden.sent) await golden.notify(hex(sent));
    await golden.notify(noticeBytes('3'));
    await allNoticesRead();
    expect(decodes()).toHaveLength(before);
    later.resolve();
    expect(contentOf(await rest()).texts).toEqual([' Hello w0 w1 w2']);
  });
});

test('G5: notices that waited for a proxy which is gone release nothing', async () => {
  golden = await startGolden({
    before: async (notify) => {
      for (const id of ['1', '2', '3f0c1a52-6f0e-4f3a-9a4a-9a1d2b7c5e10']) await notify(noticeBytes(id));
    },
  });
  const later = gate();
  golden.prefill.noticeAfter = later.promise;
  const rest = await readUntil(await stream(ASK), ' Hello');
  await allNoticesRead();
  expect(decodes()).toEqual([]);
  later.resolve();
  expect(contentOf(await rest()).texts).toEqual([' Hello w0 w1 w2']);
});

describe('G6 and G7: the first token is the last', () => {
  test.each([
    ['a stop', { ...ASK }, 'stop'],
    ['max_tokens 1', { ...ASK, max_tokens: 1 }, 'length'],
  ])('%s: no decode leg, and the KV is taken out of D', async (_name, body, finish) => {
    golden = await startGolden();
    golden.prefill.finishReason = finish;
    const reply = await complete(body);
    expect(contentOf(reply.text)).toMatchObject({ texts: [' Hello'], finish: [finish], done: true, errors: [] });
    expect(contentOf(reply.text).usage).toMatchObject({ prompt_tokens: 6, completion_tokens: 1, total_tokens: 7 });
    await expect.poll(drains).toHaveLength(1);
    expect(drains()[0]).toEqual({
      engine: 'D0',
      path: '/v1/completions',
      body: { model: 'm', prompt: [...IDS, 9906], max_tokens: 1, stream: false },
    });
    expect(decodes()).toEqual([]);
  });
});

describe('G8: the client leaves', () => {
  // One slot: the next request is admitted when the room has come back.
  const yaml = 'lmcache: { pd_buffer_size: 32MiB }';

  test.each(['during prefill', 'while D waits for the notice'])(
    '%s: D is drained, and the room comes back',
    async (when) => {
      golden = await startGolden({ yaml });
      const early = when === 'during prefill';
      const later = gate();
      if (early) golden.prefill.replyAfter = later.promise;
      else golden.prefill.noticeAfter = later.promise;
      const client = new AbortController();
      const reply = stream(ASK, client.signal);
      if (early) await expect.poll(() => golden.callsOf('P0')).toHaveLength(1);
      else await readUntil(await reply, ' Hello');
      client.abort();
      await reply.catch(() => undefined);
      golden.prefill.replyAfter = Promise.resolve();
      golden.prefill.noticeAfter = Promise.resolve();
      // Round robin: this one goes to the other decoder, the next to the first again.
      await complete(ASK);
      const next = complete(ASK);
      later.resolve();
      await expect.poll(drains).toHaveLength(1);
      expect(drains()[0]?.engine).toBe('D0');
      expect(contentOf((await next).text).texts).toEqual([' Hello w0 w1 w2']);
    },
  );
});

describe('G9: D fails', () => {
  test('before its first byte: another one computes the prompt', async () => {
    golden = await startGolden();
    golden.decode.failing = ['D0'];
    const reply = await complete(ASK);
    expect(contentOf(reply.text)).toMatchObject({ texts: [' Hello w0 w1 w2'], errors: [], done: true });
    expect(decodes().map(({ engine, body }) => [engine, body['prompt']])).toEqual([
      ['D0', [...IDS, 9906]],
      ['D1', [...IDS, 9906]],
    ]);
  });

  test('everywhere: an error event', async () => {
    golden = await startGolden();
    golden.decode.failing = ['D0', 'D1'];
    const reply = await complete(ASK);
    expect(contentOf(reply.text)).toMatchObject({ texts: [' Hello'], errors: [{ code: 500 }], done: true });
  });

  test('in the middle: an error event', async () => {
    golden = await startGolden();
    golden.decode.cutAfter = 2;
    const reply = await complete(ASK);
    expect(contentOf(reply.text)).toMatchObject({ texts: [' Hello w0 w1'], done: true });
    expect(contentOf(reply.text).errors).toHaveLength(1);
  });

  test('a reply that is no stream tells the error with its status', async () => {
    golden = await startGolden();
    golden.decode.failing = ['D0', 'D1'];
    const { stream: _stream, stream_options: _options, ...rest } = ASK;
    expect(await complete(rest)).toMatchObject({ status: 500 });
  });
});

test('G10: a bound id keeps its pair', async () => {
  golden = await startGolden({ env: { CLIENT_BOUND: 'TRUE', CLIENT_BOUND_KEY: 'X-Sess' } });
  const pairs: string[] = [];
  const ask = async (session?: string) => {
    golden.calls.length = 0;
    await complete(ASK, session === undefined ? {} : { 'x-sess': session });
    const legs = golden.calls.filter(
      ({ path, body }) => path !== '/tokenize' && !drains().some((d) => d.body === body),
    );
    pairs.push(legs.map(({ engine }) => engine).join(''));
  };
  for (const session of [undefined, 'A', 'A', 'B', undefined, 'A', '', 'B']) await ask(session);
  expect(pairs).toEqual(['P0D0', 'P1D1', 'P1D1', 'P0D0', 'P1D1', 'P1D1', 'P0D0', 'P0D0']);
  golden.decode.failing = ['D1'];
  await ask('A');
  expect(pairs.at(-1)).toBe('P1D1D0');
});
