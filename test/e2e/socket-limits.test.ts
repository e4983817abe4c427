import { connect as connectHttp2 } from 'node:http2';
import { connect, type Socket } from 'node:net';
import { setTimeout } from 'node:timers/promises';
import { afterAll, beforeAll, expect, test } from 'vitest';
import { buildAdmin } from '../../src/http/admin.ts';
import { createLogger } from '../../src/obs/log.ts';
import { Metrics } from '../../src/obs/metrics.ts';
import { listen } from '../../src/roles/listen.ts';
import { post } from '../support/harness.ts';
import { STUB_MODEL, type Stubbed, sendRaw, startStubbed } from '../support/stub-engine.ts';

let baton: Stubbed;
beforeAll(async () => {
  const yaml =
    'facade: {header_timeout: 300ms, header_limit: 4KiB, max_headers: 20, max_connections: 30}\nrpc: {max_connections: 3}\n';
  baton = await startStubbed({ yaml });
});
afterAll(() => baton?.[Symbol.asyncDispose]());

const HEAD = 'GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n';
const ask = () => post(`${baton.url}/v1/chat/completions`, { model: STUB_MODEL, messages: [] });

function open(port: number): Promise<Socket> {
  return new Promise((resolve) => {
    const socket = connect(port, '127.0.0.1', () => resolve(socket));
    socket.on('error', () => undefined);
  });
}

/** What a socket gets until it is closed. */
async function readAll(socket: Socket): Promise<string> {
  let text = '';
  socket.setEncoding('latin1').on('data', (data: string) => (text += data));
  if (!socket.closed) await new Promise((resolve) => socket.once('close', resolve));
  return text;
}

/** Sends a head a byte at a time, for as long as the other side listens. */
async function drip(port: number): Promise<string> {
  const socket = await open(port);
  const text = readAll(socket);
  socket.write('GET /version HTTP/1.1\r\nx-long: ');
  while (!socket.closed) {
    if (socket.writable) socket.write('a');
    await setTimeout(20);
  }
  return text;
}

test('a head that is too large, or has too many lines, is 431', async () => {
  const large = await sendRaw(baton.port, `${HEAD}x-long: ${'a'.repeat(5000)}\r\n\r\n`, false);
  expect(large).toMatch(/^HTTP\/1\.1 431 /);
  const lines = (count: number) => Array.from({ length: count }, (_, i) => `x-${i}: 1\r\n`).join('');
  expect(await sendRaw(baton.port, `${HEAD}${lines(18)}\r\n`, false)).toMatch(/^HTTP\/1\.1 200 /);
  const many = await sendRaw(baton.port, `${HEAD}${lines(19)}\r\n`, false);
  expect(many).toMatch(/^HTTP\/1\.1 431 /);
  expect(JSON.parse(many.split('\r\n\r\n')[1] ?? '')).toMatchObject({
    error: { type: 'invalid_request_error', code: 'headers_too_large' },
  });
});

test('who says nothing, or a head a byte at a time, is closed; others are served meanwhile', async () => {
  const silent = await Promise.all(Array.from({ length: 8 }, async () => readAll(await open(baton.port))));
  for (const text of silent) expect(text).toMatch(/^(HTTP\/1\.1 408 |$)/);
  const slow = Promise.all(Array.from({ length: 8 }, () => drip(baton.port)));
  for (let i = 0; i < 5; i++) expect((await ask()).status).toBe(200);
  for (const text of await slow) expect(text).toMatch(/^HTTP\/1\.1 408 /);
  expect((await ask()).status).toBe(200);
});

test('the admin port does the same', async () => {
  const log = createLogger({ level: 'silent', format: 'json' });
  const gate = {
    callerOf: () => ({ tenant: '', actsForAnyTenant: true, mayTakeUnverified: false, isOperator: true }),
    hasTokens: false,
  };
  const reload = async () => ({ kind: 'no-file' as const, message: '' });
  const limits = { headerBytes: 4096, headerMs: 200, connections: 3 };
  const admin = buildAdmin(new Metrics({ version: 't' }), { ...gate, reload }, undefined, { limits, log });
  const address = await listen(admin, '127.0.0.1', 0, '--admin-port', log);
  try {
    const port = Number(address.split(':').at(-1));
    const silent = await Promise.all(Array.from({ length: 6 }, async () => readAll(await open(port))));
    // Those over the limit are closed without a word.
    expect(silent.filter((text) => text === '')).toHaveLength(3);
    expect(silent.filter((text) => text.startsWith('HTTP/1.1 408 '))).toHaveLength(3);
    expect(await drip(port)).toMatch(/^HTTP\/1\.1 408 /);
  } finally {
    await admin.close();
  }
});

test('connections over the limit are closed at once, and there is room again when others end', async () => {
  const before = (await ask()).status;
  expect(before).toBe(200);
  const flood = await Promise.all(Array.from({ length: 60 }, () => open(baton.port)));
  await expect.poll(() => flood.filter(({ closed }) => closed).length).toBeGreaterThanOrEqual(30);
  await expect
    .poll(() => baton.log.filter(({ msg }) => String(msg).includes('too many')))
    .toEqual([expect.objectContaining({ level: 'warn', listener: 'facade', connections: 30 })]);
  for (const socket of flood) socket.destroy();
  await expect
    .poll(() =>
      ask().then(
        ({ status }) => status,
        () => 0,
      ),
    )
    .toBe(200);
});

test('so does the RPC port, whose HTTP/2 sessions have a limited number of streams and a limited head', async () => {
  const port = Number(new URL(baton.rpcUrl).port);
  const session = connectHttp2(baton.rpcUrl);
  const settings = await new Promise<unknown>((resolve) => session.once('remoteSettings', resolve));
  expect(settings).toMatchObject({ maxConcurrentStreams: 1000, maxHeaderListSize: 32_768 });
  const sockets = await Promise.all(Array.from({ length: 5 }, () => open(port)));
  await expect.poll(() => sockets.filter(({ closed }) => closed).length).toBe(3);
  for (const socket of sockets) socket.destroy();
  session.destroy();
});
