import { connect } from 'node:net';
import { afterAll, beforeAll, beforeEach, expect, test } from 'vitest';
import { type Stubbed, sendRaw, startStubbed } from '../support/stub-engine.ts';
import { metricOf } from './ladder-support.ts';

const SECRET = 'hush-hush';
const CHAT = 'POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n';
const ID = 'x-request-id: mine-1\r\n';

let baton: Stubbed;
beforeAll(async () => {
  const yaml = `
facade: {body_limit: 1KiB, header_limit: 4KiB, max_headers: 20, header_timeout: 300ms}
timeouts: {client_stall: 300ms}
tenant: {header: x-tenant, trusted_proxies: [127.0.0.1]}
`;
  baton = await startStubbed({ yaml });
});
afterAll(() => baton?.[Symbol.asyncDispose]());
beforeEach(() => {
  baton.reset();
  baton.forgetLog();
});

const lines = () => baton.log.filter(({ msg }) => msg === 'request');
const idOf = (reply: string) => /^x-request-id: (\S+)\r$/im.exec(reply)?.[1];
const headers = (count: number) => Array.from({ length: count }, (_, i) => `x-${i}: ${SECRET}\r\n`).join('');

test.each([
  ['a body that is too large', `${CHAT}${ID}content-length: 2000\r\n\r\n{"a":"${SECRET}`, 413, 'body_too_large'],
  ['too many header lines', `${CHAT}${ID}${headers(30)}content-length: 2\r\n\r\n{}`, 431, 'headers_too_large'],
  [
    'a tenant that is none',
    `${CHAT}${ID}x-tenant: a ${SECRET}\r\ncontent-length: 2\r\n\r\n{}`,
    400,
    'invalid_argument',
  ],
  ['a body that stops', `${CHAT}${ID}content-length: 20\r\n\r\n{"a":"${SECRET}`, 408, 'body_incomplete'],
  ['a body of bad chunks', `${CHAT}${ID}transfer-encoding: chunked\r\n\r\n${SECRET}\r\n`, 400, 'body_incomplete'],
])('%s: one line, one count, and the id of the request', async (_what, sent, status, error) => {
  const counted = `baton_errors_total{reason="${error}"}`;
  const ended = `baton_requests_total{api="chat.completions",model="none",mode="none",status_class="4xx"}`;
  const before = [await metricOf(baton, counted), await metricOf(baton, ended)];
  const reply = await sendRaw(baton.port, sent, false);
  expect(reply).toMatch(new RegExp(`^HTTP/1\\.1 ${status} `));
  expect(idOf(reply)).toBe('mine-1');
  expect(reply).toContain(`"code":"${error}"`);
  await expect
    .poll(lines)
    .toEqual([
      expect.objectContaining({ request_id: 'mine-1', api: 'chat.completions', status, error, ending: 'refused' }),
    ]);
  expect([await metricOf(baton, counted), await metricOf(baton, ended)]).toEqual(before.map((count) => count + 1));
  expect(JSON.stringify(baton.log)).not.toContain(SECRET);
  expect(await metricOf(baton, 'baton_requests_in_flight{api="chat.completions"}')).toBe(0);
});

test.each([
  ['no HTTP', `${SECRET}\r\n\r\n`, 400, 'invalid_argument', 'HPE_INVALID_METHOD'],
  ['a head that is too large', `${CHAT}x-a: ${SECRET.repeat(900)}`, 431, 'headers_too_large', 'HPE_HEADER_OVERFLOW'],
  ['a head that does not end', `${CHAT}x-a: ${SECRET}`, 408, 'invalid_argument', 'ERR_HTTP_REQUEST_TIMEOUT'],
])(
  '%s: one line with what the parser calls it, and nothing of what was sent',
  async (_what, sent, status, error, cause) => {
    const counted = `baton_errors_total{reason="${error}"}`;
    const before = await metricOf(baton, counted);
    const reply = await sendRaw(baton.port, sent, false);
    expect(reply).toMatch(new RegExp(`^HTTP/1\\.1 ${status} `));
    const requestId = idOf(reply);
    expect(requestId).toMatch(/^[0-9a-f-]{36}$/);
    expect(lines()).toEqual([
      expect.objectContaining({ request_id: requestId, status, error, cause, ending: 'refused' }),
    ]);
    expect(await metricOf(baton, counted)).toBe(before + 1);
    expect(JSON.stringify(baton.log)).not.toContain(SECRET);
  },
);

test('who leaves in the middle of a body has a line as a client that left', async () => {
  const socket = connect(baton.port, '127.0.0.1');
  socket.on('error', () => undefined);
  socket.write(`${CHAT}${ID}content-length: 20\r\n\r\n{"a":`, () => socket.resetAndDestroy());
  await expect
    .poll(lines)
    .toEqual([expect.objectContaining({ request_id: 'mine-1', status: 499, ending: 'client_closed' })]);
  expect(lines()[0]).not.toHaveProperty('error');
});

test('a connection that is opened and says nothing is no request', async () => {
  const said = await sendRaw(baton.port, '', false);
  expect(said).toMatch(/^(HTTP\/1\.1 408 |$)/);
  expect(lines()).toEqual([]);
});
