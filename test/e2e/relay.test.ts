import { brotliCompressSync, deflateSync, gzipSync } from 'node:zlib';
import { afterAll, beforeAll, beforeEach, describe, expect, test } from 'vitest';
import {
  type StubAnswer,
  type Stubbed,
  sayJson,
  sayStream,
  sayThenReset,
  startStubbed,
} from '../support/stub-engine.ts';

/** What reaches the client: byte for byte what D wrote, except the members that must be null, and never a quiet end. */
let stubbed: Stubbed;

beforeAll(async () => {
  stubbed = await startStubbed({ decode: 2 });
});
afterAll(async () => {
  await stubbed?.[Symbol.asyncDispose]();
});
beforeEach(() => stubbed.reset());

const DONE = 'data: [DONE]\n\n';
/** Echo with logprobs makes D work alone, which saves each of thousands of requests its prefill leg. */
const ALONE = '{"stream":true,"echo":true,"logprobs":0}';

/** Both decode engines answer alike, so that it does not matter whose turn it is. */
function answer(say: StubAnswer): void {
  for (const engine of stubbed.decode) engine.answer = say;
}

interface Got {
  readonly status: number;
  readonly headers: Headers;
  readonly bytes: Buffer;
  readonly text: string;
}

async function ask(body = ALONE, headers: Record<string, string> = {}): Promise<Got> {
  const reply = await fetch(`${stubbed.url}/v1/completions`, { method: 'POST', body, headers });
  const bytes = Buffer.from(await reply.arrayBuffer());
  return { status: reply.status, headers: reply.headers, bytes, text: bytes.toString() };
}

const errorOf = (got: Got) => (JSON.parse(got.text) as { error: Record<string, unknown> }).error;
const lastErrorOf = (got: Got) => {
  const events = got.text.split('\n\n').filter((event) => event.startsWith('data: {"error"'));
  expect(events).toHaveLength(1);
  return (JSON.parse(events[0]?.slice(6) ?? '') as { error: Record<string, unknown> }).error;
};
const legs = () => stubbed.decode.reduce((sum, { requests }) => sum + requests.length, 0);

const chunk = (text: string, more = '') =>
  `{"id":"c","choices":[{"index":0,"text":"${text}","finish_reason":null}]${more}}`;
const finish = (more = '') => `{"id":"c","choices":[{"index":0,"text":"","finish_reason":"stop"}]${more}}`;
const HANDLE = '{"do_remote_decode":true,"remote_block_ids":[[1,"}"]]}';

interface Sample {
  readonly sent: string;
  readonly shown: string;
}

/** As D writes them, and as the client is to see them. */
const STREAMS: Readonly<Record<string, Sample>> = {
  'LF, comments and a handle': {
    sent: `: hi\n\ndata: ${chunk('a')}\n\n:\ndata:${finish(`,"kv_transfer_params":${HANDLE}`)}\n\n${DONE}`,
    shown: `: hi\n\ndata: ${chunk('a')}\n\n:\ndata:${finish(',"kv_transfer_params":null')}\n\n${DONE}`,
  },
  'CRLF and field lines': {
    sent: `event: m\r\nid: 7\r\ndata: ${chunk('é€😀')}\r\nretry: 9\r\n\r\ndata: ${finish()}\r\n\r\ndata: [DONE]\r\n\r\n`,
    shown: `event: m\r\nid: 7\r\ndata: ${chunk('é€😀')}\r\nretry: 9\r\n\r\ndata: ${finish()}\r\n\r\ndata: [DONE]\r\n\r\n`,
  },
  'CR alone and a byte order mark': {
    sent: `\ufeffdata: ${chunk('a')}\r\rdata: ${finish()}\r\rdata: [DONE]\r\r`,
    shown: `\ufeffdata: ${chunk('a')}\r\rdata: ${finish()}\r\rdata: [DONE]\r\r`,
  },
  'an object over several data lines, with the handle in it': {
    sent: `data: {"choices":[{"index":0,"text":"a",\ndata: "finish_reason":"stop"}],\ndata:"kv_transfer_params": {"a":\ndata: [1]}\ndata: }\n\n${DONE}`,
    shown: `data: {"choices":[{"index":0,"text":"a",\ndata: "finish_reason":"stop"}],\ndata:"kv_transfer_params": null\ndata: \ndata: }\n\n${DONE}`,
  },
  'a key that is written with escapes, and null where the engine has null': {
    sent: `data: ${chunk('a', `,"kv\\u005ftransfer_params":${HANDLE}`)}\n\ndata: ${finish(',"kv_transfer_params":null')}\n\n${DONE}`,
    shown: `data: ${chunk('a', ',"kv\\u005ftransfer_params":null')}\n\ndata: ${finish(',"kv_transfer_params":null')}\n\n${DONE}`,
  },
  'extra blank lines and bytes after the end marker': {
    sent: `\n\ndata: ${chunk('a')}\n\n\n\ndata: ${finish()}\n\n${DONE}: bye\n\n`,
    shown: `\n\ndata: ${chunk('a')}\n\n\n\ndata: ${finish()}\n\n${DONE}: bye\n\n`,
  },
};

describe('a stream that is cut anywhere arrives as it was written', () => {
  test.each(Object.entries(STREAMS))('%s', async (_name, { sent, shown }) => {
    const bytes = Buffer.from(sent);
    const splits = Array.from({ length: bytes.length + 1 }, (_, at) => at);
    const check = async (at: number) => {
      const got = await ask(ALONE, { 'x-at': String(at) });
      expect(got.text, `split at ${at}`).toBe(shown);
      expect(got.status).toBe(200);
    };
    answer((response, request) => {
      const at = Number(request.headers['x-at']);
      sayStream([bytes.subarray(0, at), bytes.subarray(at)])(response, request);
    });
    for (let i = 0; i < splits.length; i += 8) await Promise.all(splits.slice(i, i + 8).map(check));
    answer(sayStream(Array.from(bytes, (_, i) => bytes.subarray(i, i + 1))));
    expect((await ask()).text).toBe(shown);
  });

  test('an event of some megabytes in many pieces', async () => {
    const big = Buffer.from(`data: ${chunk('€'.repeat(1_000_000))}\n\ndata: ${finish()}\n\n${DONE}`);
    const pieces = Array.from({ length: Math.ceil(big.length / 10_007) }, (_, i) =>
      big.subarray(i * 10_007, (i + 1) * 10_007),
    );
    answer(sayStream(pieces));
    expect((await ask()).bytes.equals(big)).toBe(true);
  });
});

describe('the end of a stream', () => {
  test.each([
    ['[DONE] missing after every choice has finished', `data: ${chunk('a')}\n\ndata: ${finish()}\n\n`, DONE],
    ['the last blank line missing', `data: ${chunk('a')}\n\ndata: ${finish()}`, `\n\n${DONE}`],
    ['[DONE] without its blank line', `data: ${finish()}\n\ndata: [DONE]`, '\n\n'],
    ['a comment without its blank line', `data: ${finish()}\n\n${DONE}: bye`, '\n\n'],
    ['usage after the finish', `data: ${finish()}\n\ndata: {"choices":[],"usage":{"prompt_tokens":1}}\n\n`, DONE],
  ])('%s is completed', async (_name, sent, added) => {
    answer(sayStream([sent]));
    const got = await ask();
    expect(got.text).toBe(sent + added);
    expect(got.status).toBe(200);
  });

  test.each([
    ['before any finish reason', `data: ${chunk('a')}\n\n`],
    ['with one of two choices unfinished', `data: {"choices":[{"index":1,"text":"b"}]}\n\ndata: ${finish()}\n\n`],
    ['inside an event', `data: ${chunk('a')}\n\ndata: {"choices":[{"ind`],
    ['inside an event behind the finish', `data: ${finish()}\n\ndata: {"choices":[],"usa`],
  ])('a clean end %s is told as an error', async (_name, sent) => {
    answer(sayStream([sent]));
    const got = await ask();
    expect(got.text.startsWith(sent.slice(0, sent.indexOf('\n\n') + 2))).toBe(true);
    expect(lastErrorOf(got)).toMatchObject({ type: 'upstream_error', code: 'engine_connection_lost' });
    expect(got.text.endsWith(DONE)).toBe(true);
    expect(legs()).toBe(1);
  });

  test('of several choices only [DONE] says that there is none that never began', async () => {
    answer(sayStream([`data: ${finish()}\n\n`]));
    expect(lastErrorOf(await ask('{"stream":true,"n":2}'))).toMatchObject({ code: 'engine_connection_lost' });
    answer(sayStream([`data: ${finish()}\n\n${DONE}`]));
    expect((await ask('{"stream":true,"n":2}')).text).toBe(`data: ${finish()}\n\n${DONE}`);
  });

  test('a reset after content is an error event and [DONE]', async () => {
    const { promise: seen, resolve } = Promise.withResolvers<void>();
    answer(sayThenReset([`data: ${chunk('a')}\n\n`], seen));
    const reply = await fetch(`${stubbed.url}/v1/completions`, { method: 'POST', body: ALONE });
    let text = '';
    for await (const piece of reply.body ?? []) {
      text += Buffer.from(piece).toString();
      resolve();
    }
    const [first, error, end] = text.split('\n\n');
    expect(first).toBe(`data: ${chunk('a')}`);
    expect(JSON.parse(error?.slice(6) ?? '')).toMatchObject({ error: { code: 'engine_connection_lost' } });
    expect(end).toBe('data: [DONE]');
  });

  test('an error event of the engine in mid-stream is shown once, masked, and followed by [DONE]', async () => {
    const error = '{"error":{"message":"lost http://10.0.0.5:8200/x","type":"Internal","param":null,"code":500}}';
    for (const tail of ['', DONE]) {
      answer(sayStream([`data: ${chunk('a')}\n\n`, `data: ${error}\n\n`, tail]));
      const got = await ask();
      expect(lastErrorOf(got)).toEqual({ message: 'lost [url]', type: 'Internal', param: null, code: 500 });
      expect(got.text.endsWith(`}}\n\n${DONE}`)).toBe(true);
      expect(got.text.split('[DONE]')).toHaveLength(2);
    }
  });

  test("a reset behind the engine's own error event adds no second one", async () => {
    const { promise: seen, resolve } = Promise.withResolvers<void>();
    answer(sayThenReset([`data: ${chunk('a')}\n\n`, 'data: {"error":{"message":"dead","code":500}}\n\n'], seen));
    const reply = await fetch(`${stubbed.url}/v1/completions`, { method: 'POST', body: ALONE });
    let text = '';
    for await (const piece of reply.body ?? []) {
      text += Buffer.from(piece).toString();
      if (text.includes('dead')) resolve();
    }
    expect(text.split('"error"')).toHaveLength(2);
    expect(text.endsWith(DONE)).toBe(true);
  });
});

describe('the held head', () => {
  const role = 'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n';

  test.each([
    [{ message: 'bad', type: 'BadRequestError', param: 'seed', code: 400 }, 400, 1],
    [{ message: 'gone', type: 'NotFoundError', code: 404 }, 404, 1],
    [{ message: 'load', type: 'InternalServerError', code: 500 }, 500, 2],
    [{ message: 'busy', type: 'X', code: 503 }, 503, 2],
    [{ message: 'slow down', type: 'X', code: 429 }, 429, 2],
    [{ message: 'a word', type: 'X', code: 'odd' }, 502, 2],
    [{ message: 'no code' }, 502, 2],
  ] as [{ message: string; type?: string; code?: unknown }, number, number][])(
    'an error event before content is a true status: %o',
    async (error, status, tries) => {
      answer(sayStream([`${role}data: ${JSON.stringify({ error })}\n\n${DONE}`]));
      const got = await ask();
      expect(got.status).toBe(status);
      expect(got.headers.get('content-type')).toBe('application/json');
      expect(errorOf(got)).toMatchObject({ message: error.message, type: error.type ?? 'upstream_error' });
      expect(got.headers.has('retry-after')).toBe(status === 429 || status === 503);
      expect(legs()).toBe(tries);
    },
  );

  test("an error in another engine's second try is not shown when that try succeeds", async () => {
    const good = `${role}data: ${chunk('a')}\n\ndata: ${finish()}\n\n${DONE}`;
    let tries = 0;
    answer((response, request) => {
      tries += 1;
      sayStream([tries === 1 ? `${role}data: {"error":{"message":"kv load","code":500}}\n\n` : good])(
        response,
        request,
      );
    });
    const got = await ask('{"stream":true}');
    expect(got.text).toBe(good);
    expect(tries).toBe(2);
    // The handle is spent: P is asked again before the other D.
    expect(stubbed.p.requests).toHaveLength(2);
    const ids = stubbed.decode.flatMap(({ requests }) => requests.map(({ headers }) => headers['x-request-id']));
    expect(new Set(ids).size).toBe(2);
  });

  test('a connection that breaks before content is repeated on the other engine', async () => {
    let tries = 0;
    answer((response, request) => {
      tries += 1;
      if (tries > 1) return sayStream([`data: ${chunk('a')}\n\ndata: ${finish()}\n\n${DONE}`])(response, request);
      response.writeHead(200, { 'content-type': 'text/event-stream' });
      // Closing without a reset lets baton read the head before it sees the end.
      response.write(role, () => response.socket?.destroy());
    });
    const got = await ask();
    expect(got.status).toBe(200);
    expect(got.text).toContain('"a"');
    expect(tries).toBe(2);
  });

  test.each([
    ['nothing at all', ['']],
    ['a role alone', [role]],
    ['[DONE] alone', [DONE]],
    ['a comment alone', [': x\n\n']],
  ])('a 200 stream of %s is never an empty 200', async (_name, pieces) => {
    answer(sayStream(pieces));
    const got = await ask();
    expect(got.status).toBe(502);
    expect(errorOf(got)).toMatchObject({ type: 'upstream_error' });
  });

  test('a finish without any text is a reply like another', async () => {
    answer(sayStream([`data: ${finish()}\n\n${DONE}`]));
    expect(await ask()).toMatchObject({ status: 200, text: `data: ${finish()}\n\n${DONE}` });
  });

  test('is held for 64 KiB and no longer', async () => {
    const comment = `: ${'x'.repeat(1020)}\n\n`;
    const open = Promise.withResolvers<void>();
    answer((response) => {
      response.writeHead(200, { 'content-type': 'text/event-stream' });
      for (let i = 0; i < 70; i++) response.write(comment);
      void open.promise.then(() => response.end(`data: ${finish()}\n\n${DONE}`));
    });
    const reply = await fetch(`${stubbed.url}/v1/completions`, { method: 'POST', body: ALONE });
    open.resolve();
    expect(await reply.text()).toBe(`${comment.repeat(70)}data: ${finish()}\n\n${DONE}`);
    // One byte less than the bound is still held: the error behind it is a status.
    answer(sayStream([comment.repeat(63), 'data: {"error":{"message":"late","code":500}}\n\n']));
    expect((await ask()).status).toBe(500);
  });
});

describe('whole replies', () => {
  const usage = '"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5.0}';
  const reply = (params: string) =>
    `{ "id":"x", "kv_transfer_params" : ${params} ,"choices":[{"index":0,"text":"\\ud83d\\u00e9 ","finish_reason":"stop","kv_transfer_params":{"mine":1}}],\n${usage},"zz":1e400}`;

  test('keep every byte but the handle', async () => {
    answer(sayJson(reply(HANDLE)));
    const got = await ask('{"n":2}');
    expect(got.text).toBe(reply('null'));
    expect(got.headers.get('content-length')).toBe(String(got.bytes.length));
    answer(sayJson(reply('null')));
    expect((await ask('{"n":2}')).text).toBe(reply('null'));
  });

  test.each([
    ['no JSON', 'hello'],
    ['cut JSON', '{"choices":['],
    ['an array', '[]'],
    ['nothing', ''],
  ])('that are %s become 502', async (_name, body) => {
    answer(sayJson(body));
    const got = await ask('{"n":2}');
    expect(got.status).toBe(502);
    expect(errorOf(got)).toMatchObject({ code: 'engine_reply_invalid' });
  });

  test('an error object under status 200 is an error', async () => {
    answer(sayJson('{"error":{"message":"no","type":"T","code":422}}'));
    const got = await ask('{"n":2}');
    expect(got.status).toBe(422);
    expect(legs()).toBe(1);
  });
});

describe('token ids', () => {
  const ids = '"choices":[{"index":0,"text":"a","prompt_token_ids":[1, 2],"token_ids":[3],"finish_reason":"stop"}]';
  const nulls = '"choices":[{"index":0,"text":"a","prompt_token_ids":null,"token_ids":null,"finish_reason":"stop"}]';

  test.each([
    ['that only baton asked for are null', '{"conversation_id":"c1","stream":false}', true],
    ['that the client asked for are shown', '{"conversation_id":"c2","return_token_ids":true}', false],
    ['that an engine gives of its own accord are shown', '{"prompt_logprobs":1}', false],
  ])('%s', async (_name, body, isMuted) => {
    answer(sayJson(`{${ids}}`));
    const whole = await ask(body);
    const asked = stubbed.decode.some(({ requests }) => requests[0]?.body.includes('"return_token_ids":true'));
    expect(asked).toBe(body.includes('conversation_id'));
    expect(whole.text).toBe(`{${isMuted ? nulls : ids}}`);
    answer(sayStream([`data: {${ids}}\n\n${DONE}`]));
    expect((await ask(body)).text).toBe(`data: {${isMuted ? nulls : ids}}\n\n${DONE}`);
  });
});

describe('encodings and headers', () => {
  const stream = Buffer.from(`data: ${chunk('é')}\n\ndata: ${finish()}\n\n${DONE}`);
  const whole = Buffer.from('{"choices":[{"index":0,"text":"é","finish_reason":"stop"}]}');
  const encodings = { gzip: gzipSync, 'x-gzip': gzipSync, deflate: deflateSync, br: brotliCompressSync };

  test.each(Object.entries(encodings))('%s is decoded and its header dropped', async (name, compress) => {
    answer(sayJson(compress(whole), 200, { 'content-encoding': name }));
    const json = await ask('{"n":2}');
    expect(json.bytes.equals(whole)).toBe(true);
    expect(json.headers.has('content-encoding')).toBe(false);
    const packed = compress(stream);
    answer(sayStream([packed.subarray(0, 9), packed.subarray(9)], { 'content-encoding': name }));
    const sse = await ask();
    expect(sse.bytes.equals(stream)).toBe(true);
    expect(sse.headers.has('content-encoding')).toBe(false);
    answer(sayJson(compress(Buffer.from('{"error":{"message":"no","code":400}}')), 400, { 'content-encoding': name }));
    expect(errorOf(await ask('{"n":2}'))).toMatchObject({ message: 'no', code: 400 });
  });

  test('a compressed reply that is cut is no silent truncation', async () => {
    const packed = gzipSync(Buffer.from(`data: ${chunk('é'.repeat(3000))}\n\n`));
    answer(sayStream([packed.subarray(0, packed.length - 6)], { 'content-encoding': 'gzip' }));
    const got = await ask();
    if (got.status === 200) expect(lastErrorOf(got)).toMatchObject({ code: 'engine_connection_lost' });
    else expect(got.status).toBe(502);
  });

  test("hop-by-hop headers stay, baton's own win, the rest passes", async () => {
    const headers = {
      connection: 'keep-alive, x-hop',
      'x-hop': '1',
      'keep-alive': 'timeout=5',
      'proxy-authenticate': 'x',
      server: 'uvicorn',
      'x-request-id': 'engine',
      'cache-control': 'max-age=9',
      'x-custom': 'kept',
      'set-cookie': 'lb=1',
    };
    answer(sayStream([stream], headers));
    const got = await ask(ALONE, { 'x-request-id': 'mine', 'x-baton-debug': '1' });
    const shown = Object.fromEntries(got.headers);
    expect(shown).toMatchObject({
      'x-request-id': 'mine',
      'cache-control': 'no-cache',
      'x-accel-buffering': 'no',
      'x-custom': 'kept',
      'content-type': 'text/event-stream; charset=utf-8',
      'x-baton-plan': expect.stringMatching(/^mode=decode_local; reason=echo_logprobs;/),
    });
    for (const name of ['x-hop', 'proxy-authenticate', 'server', 'set-cookie']) expect(shown).not.toHaveProperty(name);
    expect(shown['keep-alive']).not.toBe('timeout=5');
    const whole = await ask('{"n":2}');
    expect(whole.headers.has('x-baton-plan')).toBe(false);
    expect(whole.headers.get('x-request-id')).toMatch(/^[0-9a-f-]{36}$/);
  });
});
