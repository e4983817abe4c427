import fc from 'fast-check';
import { describe, expect, test } from 'vitest';
import {
  describeEngineError,
  errorEnvelope,
  errorEvent,
  maskMessage,
  readEngineError,
  saysNoRoute,
} from '../../src/core/openai-error.ts';

describe('maskMessage', () => {
  test.each([
    ['cannot reach http://10.0.0.5:8200/v1/models.', 'cannot reach [url]'],
    ['see "https://user:pw@host/a?b=c", please', 'see "[url]", please'],
    ['(tcp://node-1:5600)', '([url])'],
    ['http://[fe80::1%25eth0]:8000/x failed', '[url] failed'],
    ['file:///opt/models/x is missing', '[url] is missing'],
    ["host='10.12.0.7', port=8100", "host='[address]', port=8100"],
    ['Connect call failed 127.0.0.1:5600', 'Connect call failed [address]'],
    ['peer [::1]:5600 and [2001:db8::7]', 'peer [address] and [address]'],
    ['peer fe80::1%eth0 and 2001:db8:0:0:0:0:0:7, ::ffff:10.0.0.1', 'peer [address] and [address], [address]'],
    ['localhost:8000 refused', '[address] refused'],
    ['p.pool.svc.cluster.local:8100 refused', '[address] refused'],
    ['decode-0:8200 and node1:5600 refused', '[address] and [address] refused'],
    ['model /models/llama/7b is not there', 'model [path] is not there'],
    ['File "/usr/lib/python3/site-packages/vllm/x.py", line 3', 'File "[path]", line 3'],
    ['path=/root/.cache/x/y', 'path=[path]'],
  ])('%s', (text, masked) => {
    expect(maskMessage(text)).toBe(masked);
    expect(maskMessage(masked)).toBe(masked);
  });

  test.each([
    'The model `meta-llama/Llama-3.1-8B-Instruct` does not exist.',
    'The model "org/sub/name-v1.2" does not exist.',
    'Use /v1/chat/completions or /v1/completions, /tokenize.',
    'at 12:30:00, [12:30:00], 2026-01-02T12:30:00.123Z',
    'a ratio of 16:9, 3/4 or 1:2:3',
    "list index out of range: 'tokens[0:10]' and 'tokens[::2]'",
    "max_tokens:8192 is more than 4096; got 'temperature': 2.5",
    'std::vector<int>, torch::Tensor, add::fee',
    'Error in "#/properties/city/type" of "$ref": "#/$defs/City"',
    'expected application/json or text/event-stream and/or nothing',
    "`x = a / b / c` and 'a/b/c'",
    "Input should be 'auto', 'required' or 'none' [type=literal_error]",
    'aa:bb:cc:dd:ee:ff, sha256:abc',
    'version 0.33.0 of 1.2.3',
    'Müller, 你好: {"a": [1, 2]}',
    '<|im_start|>user',
  ])('leaves readable: %s', (text) => {
    expect(maskMessage(text)).toBe(text);
  });

  test('no address gets through, wherever it stands', () => {
    // A bare `::7` is also a slice and tells nothing; without a digit it is a scoped name.
    const v6 = fc.ipV6().filter((ip) => /\d/.test(ip) && !/^::\d{0,3}$/.test(ip));
    const address = fc.oneof(
      fc.ipV4(),
      v6,
      v6.map((ip) => `[${ip}]:8000`),
      fc.webUrl(),
    );
    const around = fc.constantFrom(['', ''], ['at ', ' now'], ['"', '"'], ["='", "',"], ['(', ')'], ['to ', ': gone']);
    fc.assert(
      fc.property(address, around, (ip, [before = '', after = '']) => {
        expect(maskMessage(before + ip + after)).not.toContain(ip);
      }),
    );
  });

  test('a message of a megabyte costs no more than its first two thousand characters', () => {
    for (const text of ['a.'.repeat(500_000), 'a'.repeat(1_000_000), '1:'.repeat(500_000), '/a'.repeat(500_000)]) {
      expect(maskMessage(text).length).toBeLessThanOrEqual(2000);
    }
  });
});

describe('readEngineError', () => {
  const said = (status: number, body: string | undefined) => readEngineError(status, body);

  test.each<[string, number, string | undefined, object]>([
    [
      'an OpenAI envelope',
      400,
      '{"error":{"message":"no","type":"BadRequestError","param":"seed","code":400}}',
      { message: 'no', type: 'BadRequestError', param: 'seed', code: 400 },
    ],
    [
      'an older one',
      404,
      '{"object":"error","message":"no","type":"T","param":null,"code":404}',
      { message: 'no', code: 404 },
    ],
    [
      'an error that is text',
      401,
      '{"error":"Unauthorized"}',
      { message: 'Unauthorized', type: 'invalid_request_error', code: 401 },
    ],
    ['a detail', 404, '{"detail":"Not Found"}', { message: 'Not Found', param: null, code: 404 }],
    ['a detail that is a list', 422, '{"detail":[{"loc":["body"]}]}', { message: '[{"loc":["body"]}]' }],
    ['a code that is text', 500, '{"error":{"message":"no","code":"kv"}}', { code: 'kv', type: 'upstream_error' }],
    ['plain text', 500, ' Internal Server Error\n', { message: 'Internal Server Error', code: 500 }],
    ['a page', 502, '<html>nginx</html>', { message: 'The engine answered with status 502.' }],
    ['nothing', 503, '', { message: 'The engine answered with status 503.', code: 503 }],
    ['no body', 503, undefined, { message: 'The engine answered with status 503.' }],
    ['an empty message', 500, '{"error":{"message":""}}', { message: 'The engine answered with status 500.' }],
    ['null', 500, 'null', { message: 'The engine answered with status 500.' }],
    ['an array', 500, '[1]', { message: 'The engine answered with status 500.' }],
    [
      'no message',
      500,
      '{"error":{"message":null,"detail":null}}',
      { message: 'The engine answered with status 500.' },
    ],
    ['an address', 500, '{"error":{"message":"lost 10.0.0.1:9"}}', { message: 'lost [address]' }],
  ])('reads %s', (_name, status, body, error) => {
    expect(said(status, body)).toMatchObject(error);
  });

  test('never throws, and always gives the whole shape', () => {
    fc.assert(
      fc.property(fc.oneof(fc.json(), fc.string()), fc.integer({ min: 400, max: 599 }), (body, status) => {
        const error = said(status, body);
        expect(Object.keys(JSON.parse(errorEnvelope(error)).error)).toEqual(['message', 'type', 'param', 'code']);
        expect(error.message).not.toBe('');
        expect(error.message.length).toBeLessThanOrEqual(2000);
      }),
    );
  });
});

test('an error in a stream is one event, whatever its text', () => {
  const error = describeEngineError(500, { message: 'two\n\nlines \u2028 and "quotes"', type: null, code: null });
  const event = errorEvent(error);
  expect(event.startsWith('data: {"error":{')).toBe(true);
  expect(event.indexOf('\n')).toBe(event.length - 2);
  expect(JSON.parse(event.slice(6))).toEqual({
    error: { message: 'two\n\nlines \u2028 and "quotes"', type: 'upstream_error', param: null, code: 500 },
  });
});

describe('saysNoRoute', () => {
  test.each([
    '',
    '<html><body><h1>404 Not Found</h1></body></html>',
    '{"detail":"Not Found"}',
    '{"error":{"message":"Not Found","type":"Not Found","param":null,"code":404}}',
    '{"error":{"code":404,"message":"File Not Found","type":"not_found_error"}}',
    '{"message":"Route POST:/foo/v1/chat/completions not found","error":"Not Found","statusCode":404}',
    '{"message":"no Route matched with those values"}',
    '{"timestamp":1,"status":404,"error":"Not Found","path":"/v1/completions"}',
    '404 page not found',
    '404: Not Found',
    'The requested URL was not found on this server.',
  ])('%s', (body) => {
    expect(saysNoRoute(body)).toBe(true);
  });

  test.each([
    '{"error":{"message":"The model `m` does not exist.","type":"NotFoundError","param":"model","code":404}}',
    '{"error":{"message":"Not Found","type":"NotFoundError","param":null,"code":404}}',
    '{"error":{"message":"Not found","type":"invalid_request_error","param":null,"code":"model_not_found"}}',
    '{"object":"error","message":"Model not found","type":"x","code":404}',
    '{"error":"model \\"llama\\" not found, try pulling it first"}',
    '{"detail":"Adapter a was not found"}',
    'no model m',
  ])('not: %s', (body) => {
    expect(saysNoRoute(body)).toBe(false);
  });
});
