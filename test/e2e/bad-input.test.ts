import { request as httpRequest } from 'node:http';
import { connect } from 'node:net';
import { gzipSync } from 'node:zlib';
import { afterAll, beforeAll, beforeEach, describe, expect, test } from 'vitest';
import { STUB_MODEL, type Stubbed, sayJson, sayStream, sendRaw, startStubbed } from '../support/stub-engine.ts';

/** What a client may do wrong: each is told what, no engine hears of it, and nothing of it stands in the log. */
let stubbed: Stubbed;
const LIMIT = 65_536;
/** Stands for prompts, keys and names: no log line and no metric may have it. */
const SECRET = 'S3CRETmarker';

beforeAll(async () => {
  stubbed = await startStubbed({ yaml: `facade: { body_limit: ${LIMIT}, metrics: true }\nlog: { level: trace }` });
});
afterAll(async () => {
  await stubbed?.[Symbol.asyncDispose]();
});
beforeEach(() => stubbed.reset());

interface Refused {
  readonly status: number;
  readonly headers: Headers;
  readonly error: Readonly<Record<string, unknown>>;
}

const engineCalls = () => stubbed.p.requests.length + stubbed.d.requests.length;
const CHAT = '/v1/chat/completions';

/** The error of a reply, which has the OpenAI shape and nothing else. */
function envelope(text: string): Readonly<Record<string, unknown>> {
  const body = JSON.parse(text) as { error: Readonly<Record<string, unknown>> };
  expect(Object.keys(body)).toEqual(['error']);
  expect(Object.keys(body.error)).toEqual(['message', 'type', 'param', 'code']);
  return body.error;
}

async function refused(path: string, init: RequestInit): Promise<Refused> {
  const reply = await fetch(stubbed.url + path, init);
  expect(reply.headers.get('content-type')).toContain('application/json');
  return { status: reply.status, headers: reply.headers, error: envelope(await reply.text()) };
}

const post = (body: string | Buffer<ArrayBuffer>, headers: Record<string, string> = {}) =>
  refused(CHAT, { method: 'POST', body, headers });

/** Status line, headers and error of a raw reply; the connection was closed behind it. */
function rawReply(text: string): { readonly status: number; readonly error: Readonly<Record<string, unknown>> } {
  const [head = '', body = ''] = text.split('\r\n\r\n', 2);
  return { status: Number(head.split(' ')[1]), error: envelope(body) };
}

const bytes = (...parts: (string | number[])[]) =>
  Buffer.concat(parts.map((part) => (typeof part === 'string' ? Buffer.from(part) : Buffer.from(part))));

describe('a body that is no JSON object', () => {
  test.each<[string, string | Buffer<ArrayBuffer>, string]>([
    ['empty', '', 'body_empty'],
    ['blank', ' \n', 'body_invalid_json'],
    ['cut', `{"messages":["${SECRET}"`, 'body_invalid_json'],
    ['plain text', SECRET, 'body_invalid_json'],
    ['two objects', '{}{}', 'body_invalid_json'],
    ['a comma too many', '{"a":1,}', 'body_invalid_json'],
    ['single quotes', "{'a':1}", 'body_invalid_json'],
    ['NaN', '{"temperature":NaN}', 'body_invalid_json'],
    ['Infinity', '{"temperature":-Infinity}', 'body_invalid_json'],
    ['a number with a leading zero', '{"a":01}', 'body_invalid_json'],
    ['a control character in a string', '{"a":"\u0001"}', 'body_invalid_json'],
    ['a byte order mark', '\ufeff{"a":1}', 'body_invalid_json'],
    ['UTF-16', Buffer.from('{"a":1}', 'utf16le'), 'body_invalid_json'],
    ['a lone continuation byte', bytes('{"a":"', [0x80], '"}'), 'body_invalid_json'],
    ['an overlong form', bytes('{"a":"', [0xc0, 0xaf], '"}'), 'body_invalid_json'],
    ['a surrogate in UTF-8', bytes('{"a":"', [0xed, 0xa0, 0x80], '"}'), 'body_invalid_json'],
    ['a cut character', bytes('{"a":"', [0xe2, 0x82], '"}'), 'body_invalid_json'],
    ['levels that do not close', '['.repeat(50_000), 'body_invalid_json'],
    ['levels that close wrongly', `${'['.repeat(30_000)}${'}'.repeat(30_000)}`, 'body_invalid_json'],
    ['an array', '[1]', 'body_not_object'],
    ['a string', `"${SECRET}"`, 'body_not_object'],
    ['null', 'null', 'body_not_object'],
    ['a deep array', `${'['.repeat(30_000)}${']'.repeat(30_000)}`, 'body_not_object'],
  ])('is refused with 400: %s', async (_name, body, code) => {
    const { status, error, headers } = await post(body);
    expect({ status, code: error['code'] }).toEqual({ status: 400, code });
    expect(error).toMatchObject({ type: 'invalid_request_error', param: null });
    expect(String(error['message'])).not.toContain(SECRET);
    expect(headers.get('x-request-id')).toMatch(/^[0-9a-f-]{36}$/);
    expect(engineCalls()).toBe(0);
  });

  test.each(['gzip', 'br', 'identity, gzip'])('content-encoding %s is 415', async (encoding) => {
    const { status, error } = await post(gzipSync('{}'), { 'content-encoding': encoding });
    expect({ status, code: error['code'] }).toEqual({ status: 415, code: 'content_encoding_unsupported' });
    expect(engineCalls()).toBe(0);
  });

  test.each(['', 'application/json', 'text/plain', 'application/x-www-form-urlencoded', 'nonsense', 'a/b; charset=é'])(
    'the content type "%s" says nothing about it',
    async (type) => {
      const reply = await fetch(stubbed.url + CHAT, { method: 'POST', body: '{}', headers: { 'content-type': type } });
      expect(reply.status).toBe(200);
    },
  );
});

describe('a body over the limit', () => {
  const fill = (size: number) => `{"a":"${'x'.repeat(size - 8)}"}`;

  test('is accepted at the limit and 413 above it', async () => {
    expect((await fetch(stubbed.url + CHAT, { method: 'POST', body: fill(LIMIT) })).status).toBe(200);
    stubbed.reset();
    const { status, error } = await post(fill(LIMIT + 1));
    expect({ status, code: error['code'] }).toEqual({ status: 413, code: 'body_too_large' });
    expect(engineCalls()).toBe(0);
  });

  test('is 413 in chunks too', async () => {
    const size = LIMIT + 10;
    const head = `POST ${CHAT} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n${size.toString(16)}\r\n`;
    const { status, error } = rawReply(await sendRaw(stubbed.port, `${head}${fill(size)}\r\n0\r\n\r\n`));
    expect({ status, code: error['code'] }).toEqual({ status: 413, code: 'body_too_large' });
    expect(engineCalls()).toBe(0);
  });

  test('is 413 for a client that sends all of a much larger one before it reads', async () => {
    const { status, error } = await post(fill(8 * 1024 * 1024));
    expect({ status, code: error['code'] }).toEqual({ status: 413, code: 'body_too_large' });
  });
});

describe('members that only baton may set', () => {
  test.each([
    ['kv_transfer_params', '{"do_remote_prefill":true,"remote_host":"evil"}'],
    ['kv_transfer_params', '{}'],
    ['kv_transfer_params', 'false'],
    ['kv_transfer_param\\u0073', '1'],
    ['ec_transfer_params', '[]'],
  ])('%s: %s is 400', async (key, value) => {
    const { status, error } = await post(`{"messages":[],"${key}":${value}}`);
    expect(status).toBe(400);
    expect(error).toMatchObject({ code: 'kv_transfer_params_refused', param: key.replace('\\u0073', 's') });
    expect(engineCalls()).toBe(0);
  });

  test('null is none', async () => {
    const body = '{"kv_transfer_params":null,"ec_transfer_params":null,"n":2}';
    expect((await fetch(stubbed.url + CHAT, { method: 'POST', body })).status).toBe(200);
    expect(stubbed.d.requests[0]?.body.toString()).toBe('{"n":2}');
  });
});

describe('members that are too many or too long', () => {
  const long = (size: number) => 'x'.repeat(size);
  test.each([
    ['a thousand and one', `${'"a":1,'.repeat(1000)}"last":1`, 'last', 'more than 1000 members'],
    ['a long name', `"${long(1025)}":1`, long(64), 'longer than 1024 bytes'],
    ['a long model', `"model":"${long(513)}"`, 'model', '`model` must be at most 512 bytes'],
    ['a long salt', `"cache_salt":"${long(513)}"`, 'cache_salt', '`cache_salt` must be at most 512 bytes'],
    ['a long conversation', `"conversation_id":"${long(513)}"`, 'conversation_id', 'must be at most 512 bytes'],
    ['half a character', '"cache_salt":"\\ud800"', 'cache_salt', 'half characters'],
  ])('are refused with 400: %s', async (_name, members, param, message) => {
    const { status, error } = await post(`{${members}}`);
    expect(status).toBe(400);
    expect(error).toMatchObject({ code: 'invalid_argument', type: 'invalid_request_error', param });
    expect(error['message']).toContain(message);
    expect(engineCalls()).toBe(0);
  });

  test("are taken where they are an engine's to judge", async () => {
    const body = `{"session_id":"${long(600)}","user":"${long(5000)}","messages":[{${'"a":1,'.repeat(2000)}"b":1}]}`;
    expect((await fetch(stubbed.url + CHAT, { method: 'POST', body })).status).toBe(200);
  });
});

describe('who and what', () => {
  test('an unknown model is 404 as at OpenAI', async () => {
    const { status, error } = await post(`{"model":"${SECRET}${'x'.repeat(400)}"}`);
    expect(status).toBe(404);
    expect(error).toMatchObject({ code: 'model_not_found', param: 'model', type: 'invalid_request_error' });
    expect(String(error['message']).length).toBeLessThan(300);
    expect(engineCalls()).toBe(0);
  });

  test.each([`"${STUB_MODEL}"`, 'null', '""', '7'])("a model of %s is the engines' to judge", async (model) => {
    const reply = await fetch(stubbed.url + CHAT, { method: 'POST', body: `{"model":${model}}` });
    expect(reply.status).toBe(200);
  });

  test.each(['\\ud800', '\\u0000', '\\ud83d\\ude00', 'e\u0301'])(
    'a model and a conversation of "%s" end no request badly',
    async (odd) => {
      const named = await fetch(stubbed.url + CHAT, { method: 'POST', body: `{"model":"${odd}"}` });
      expect(named.status).toBe(404);
      const body = `{"conversation_id":"${odd}","cache_salt":"${odd}"}`;
      const turn = await fetch(stubbed.url + CHAT, { method: 'POST', body });
      expect([200, 400]).toContain(turn.status);
    },
  );

  test('a conversation id as long as the body may be is refused or cut, and never logged', async () => {
    const reply = await fetch(stubbed.url + CHAT, {
      method: 'POST',
      body: `{"conversation_id":"${SECRET.repeat(5000)}"}`,
    });
    expect([200, 400]).toContain(reply.status);
    if (reply.status === 400) envelope(await reply.text());
  });

  test.each([
    ['a.b:c_d-9', true],
    ['x'.repeat(128), true],
    ['x'.repeat(129), false],
    [`${SECRET} two`, false],
    ['a/b', false],
    ['é', false],
    ['', false],
    ['a,b', false],
  ])('the request id "%s" is kept: %s', async (id, isKept) => {
    for (const body of ['{}', 'no']) {
      const reply = await fetch(stubbed.url + CHAT, { method: 'POST', body, headers: { 'x-request-id': id } });
      const given = reply.headers.get('x-request-id');
      if (isKept) expect(given).toBe(id);
      else expect(given).toMatch(/^[0-9a-f-]{36}$/);
      if (body === '{}') expect(stubbed.d.requests.at(-1)?.headers['x-request-id']).toBe(given);
    }
  });
});

describe('methods and paths', () => {
  test.each([
    ['GET', CHAT, 405, 'POST'],
    ['PUT', '/v1/completions', 405, 'POST'],
    ['DELETE', '/v1/models', 405, 'GET, HEAD'],
    ['POST', '/health', 405, 'GET, HEAD'],
    ['PATCH', '/v1/completions/', 405, 'POST'],
    ['GET', '/', 404, null],
    ['POST', '/v1/completions/x', 404, null],
    ['POST', '/v1/chat', 404, null],
    ['POST', '//v1/chat/completions', 404, null],
    ['GET', '/__proto__', 404, null],
    ['GET', `/${SECRET}`, 404, null],
    ['GET', '/%zz', 404, null],
    ['GET', `/${SECRET}%c0%af`, 404, null],
    ['POST', '/v1/%', 404, null],
  ])('%s %s is %i', async (method, path, status, allow) => {
    const reply = await sendRaw(
      stubbed.port,
      `${method} ${path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 0\r\n\r\n`,
    );
    const { status: got, error } = rawReply(reply);
    expect(got).toBe(status);
    expect(error['code']).toBe(status === 405 ? 'method_not_allowed' : 'route_not_found');
    expect(/\r\nallow: ([^\r]*)/i.exec(reply)?.[1] ?? null).toBe(allow);
    expect(engineCalls()).toBe(0);
  });

  test('HEAD has the status of GET and no body', async () => {
    for (const [path, status] of [
      ['/v1/models', 200],
      ['/health', 200],
      [CHAT, 405],
      ['/nowhere', 404],
    ] as const) {
      const reply = await fetch(stubbed.url + path, { method: 'HEAD' });
      expect([path, reply.status, await reply.text()]).toEqual([path, status, '']);
    }
  });

  test('a preflight of a browser is allowed, and replies and errors carry the header', async () => {
    const headers = { origin: 'https://app', 'access-control-request-headers': 'authorization,x-a' };
    const preflight = await fetch(stubbed.url + CHAT, { method: 'OPTIONS', headers });
    expect(preflight.status).toBe(204);
    expect(Object.fromEntries(preflight.headers)).toMatchObject({
      'access-control-allow-origin': '*',
      'access-control-allow-headers': 'authorization,x-a',
    });
    expect(preflight.headers.get('access-control-allow-methods')).toContain('POST');
    for (const body of ['{}', 'no']) {
      const reply = await fetch(stubbed.url + CHAT, { method: 'POST', body, headers: { origin: 'https://app' } });
      expect(reply.headers.get('access-control-allow-origin')).toBe('*');
    }
  });
});

describe('broken connections and broken HTTP', () => {
  test.each([
    ['garbage', `${SECRET}\r\n\r\n`, 400],
    ['TLS on a plain port', Buffer.from('16030100c8010000c40303', 'hex'), 400],
    ['a header without a colon', `GET / HTTP/1.1\r\nhost: x\r\n${SECRET}\r\n\r\n`, 400],
    ['two lengths', `POST ${CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}`, 400],
    [
      'a length and chunks',
      `POST ${CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n`,
      400,
    ],
    ['a length that is none', `POST ${CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n`, 400],
    ['a bad chunk', `POST ${CHAT} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n`, 400],
    ['a head of 100 KB', `GET / HTTP/1.1\r\nhost: x\r\nx-a: ${SECRET.repeat(8000)}\r\n\r\n`, 431],
    ['a body that is cut', `POST ${CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{"a":"${SECRET}`, 400],
  ])('%s is answered in the same envelope and the connection closed', async (_name, sent, status) => {
    const reply = await sendRaw(stubbed.port, sent);
    const got = rawReply(reply);
    expect(got.status).toBe(status);
    expect(got.error).toMatchObject({ type: 'invalid_request_error', param: null });
    expect(reply.toLowerCase()).toContain('\r\nconnection: close\r\n');
    expect(engineCalls()).toBe(0);
  });

  test('a client that leaves in the middle of its upload disturbs nobody', async () => {
    await new Promise<void>((resolve) => {
      const socket = connect(stubbed.port, '127.0.0.1', () => {
        const head = `POST ${CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{"a":"${SECRET}`;
        socket.write(head, () => socket.resetAndDestroy());
      });
      socket.on('close', () => resolve());
      socket.on('error', () => undefined);
    });
    expect((await fetch(stubbed.url + CHAT, { method: 'POST', body: '{}' })).status).toBe(200);
    expect(engineCalls()).toBe(2);
  });

  test('bytes behind a request do not get into the stream that answers it', async () => {
    const first = Promise.withResolvers<void>();
    const rest = Promise.withResolvers<void>();
    const event = 'data: {"choices":[{"index":0,"text":"a","finish_reason":"stop"}]}\n\n';
    stubbed.d.answer = (response) => {
      response.writeHead(200, { 'content-type': 'text/event-stream' });
      response.write(event);
      void rest.promise.then(() => response.end('data: [DONE]\n\n'));
    };
    const closed = new Promise<string>((resolve) => {
      let text = '';
      const socket = connect(stubbed.port, '127.0.0.1', () =>
        socket.write(`POST ${CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}`),
      );
      socket.setEncoding('latin1').on('data', (data: string) => {
        text += data;
        if (!text.includes(event) || text.includes('DONE')) return;
        socket.write('garbage\r\n\r\n');
        first.resolve();
      });
      socket.on('error', () => undefined).on('close', () => resolve(text));
    });
    await first.promise;
    // baton has seen the garbage once it has closed the connection, or has gone on without minding it.
    const text = await closed;
    rest.resolve();
    expect(text.split('HTTP/1.1')).toHaveLength(2);
  });

  test('`expect: 100-continue` is honoured', async () => {
    const status = await new Promise<number | undefined>((resolve, reject) => {
      const headers = { expect: '100-continue', 'content-length': 2 };
      const request = httpRequest(stubbed.url + CHAT, { method: 'POST', headers }, (response) => {
        response.resume();
        resolve(response.statusCode);
      });
      request.on('continue', () => request.end('{}'));
      request.on('error', reject);
      request.flushHeaders();
    });
    expect(status).toBe(200);
  });
});

test('what engines say of a request reaches the client and not the log', async () => {
  const error = { message: `bad prompt ${SECRET} at http://10.0.0.1:1/`, type: 'T', param: null, code: 400 };
  stubbed.d.answer = sayJson(JSON.stringify({ error }), 400);
  expect((await post(`{"user":"${SECRET}"}`)).error['message']).toBe(`bad prompt ${SECRET} at [url]`);
  stubbed.d.answer = sayStream([`data: {"error":{"message":"${SECRET}","code":500}}\n\n`]);
  expect((await post('{"stream":true}')).status).toBe(500);
  stubbed.p.answer = sayJson(SECRET, 500, { 'x-a': SECRET });
  expect((await post('{}', { authorization: `Bearer ${SECRET}`, 'x-session-id': SECRET })).status).toBe(500);
  stubbed.p.answer = sayJson(`{"kv_transfer_params":{"remote_host":"${SECRET}"}}`);
  await fetch(`${stubbed.url}${CHAT}?key=${SECRET}`, { method: 'POST', body: '{}' });
});

test('after all that the process answers, and neither log nor metrics show anything that clients or engines wrote', async () => {
  const reply = await fetch(stubbed.url + CHAT, { method: 'POST', body: '{"conversation_id":"c"}' });
  expect(reply.status).toBe(200);
  const lines = stubbed.log.map((line) => JSON.stringify(line));
  expect(lines.length).toBeGreaterThan(50);
  expect(lines.filter((line) => line.includes(SECRET))).toEqual([]);
  expect(lines.filter((line) => line.includes('do_remote') || line.includes('remote_block_ids'))).toEqual([]);
  // Refusals are no faults of baton.
  expect(stubbed.log.filter((line) => line['error_type'] !== undefined)).toEqual([]);
  const metrics = await (await fetch(`${stubbed.url}/metrics`)).text();
  expect(metrics).toContain('baton_');
  expect(metrics).not.toContain(SECRET);
});
