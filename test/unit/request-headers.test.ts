import { describe, expect, test } from 'vitest';
import { acceptedRequestId, forwardedHeaders } from '../../src/core/request-headers.ts';

describe('forwardedHeaders', () => {
  test('keeps what engines and tracing may want', () => {
    const headers = {
      accept: 'text/event-stream',
      'user-agent': 'x',
      traceparent: '00-1-2-03',
      'x-session-id': 's',
      'x-forwarded-for': '1.2.3.4',
      'x-data-parallel-rank': '3',
    };
    expect(forwardedHeaders(headers)).toEqual(headers);
  });

  test.each([
    'connection',
    'keep-alive',
    'proxy-authenticate',
    'proxy-authorization',
    'proxy-connection',
    'te',
    'trailer',
    'transfer-encoding',
    'upgrade',
    'expect',
    'host',
    'content-length',
    'content-type',
    'content-encoding',
    'accept-encoding',
    'authorization',
    'cookie',
    'x-request-id',
    'x-baton-debug',
    'x-prefiller-url',
    'x-prefiller-host-port',
    'x-gateway-destination-endpoint',
  ])('drops %s', (name) => {
    expect(forwardedHeaders({ [name]: 'x', kept: '1' })).toEqual({ kept: '1' });
  });

  test('drops the headers that Connection names, in any case and with spaces', () => {
    const headers = { connection: 'close, X-Hop ,x-other', 'x-hop': '1', 'x-other': '2', 'x-stays': '3' };
    expect(forwardedHeaders(headers)).toEqual({ 'x-stays': '3' });
  });

  test('joins repeated headers and leaves out absent ones', () => {
    expect(forwardedHeaders({ 'x-a': ['1', '2'], 'x-b': undefined, 'x-c': '' })).toEqual({ 'x-a': '1, 2', 'x-c': '' });
  });

  test('a header called like a member of objects is one like any other', () => {
    const headers = Object.fromEntries([
      ['constructor', '1'],
      ['x-a', '2'],
    ]);
    expect(forwardedHeaders(headers)).toEqual({ constructor: '1', 'x-a': '2' });
    expect(Object.getPrototypeOf(forwardedHeaders(JSON.parse('{"__proto__":"x"}')))).toBe(Object.prototype);
  });
});

describe('acceptedRequestId', () => {
  test.each(['a', '0', 'A.b_c:d-e', '9f8e7d6c-1234', 'x'.repeat(128)])('takes %s', (id) => {
    expect(acceptedRequestId(id)).toBe(id);
  });

  test.each(['', 'x'.repeat(129), 'a b', 'a/b', 'a\n', '\na', 'a,b', 'é', 'a"b', '{}', 'a\u0000'])('not %j', (id) => {
    expect(acceptedRequestId(id)).toBeUndefined();
  });

  test('neither none nor several', () => {
    expect(acceptedRequestId(undefined)).toBeUndefined();
    expect(acceptedRequestId(['a', 'b'])).toBeUndefined();
  });
});
