import { once } from 'node:events';
import { request as httpRequest } from 'node:http';
import { type ClientHttp2Session, connect as connectHttp2, type IncomingHttpHeaders } from 'node:http2';
import { type AddressInfo, connect, type Socket } from 'node:net';
import { gzipSync } from 'node:zlib';
import { afterEach, describe, expect, test } from 'vitest';
import type { RpcFault } from '../../src/rpc/bind.ts';
import { RPC_MAX_MESSAGE_BYTES } from '../../src/rpc/limits.ts';
import { type RpcListener, startRpcListener } from '../../src/rpc/listener.ts';
import { EVERYTHING } from '../../src/services/kv-cache-store.ts';

let stack = new AsyncDisposableStack();
const faults: RpcFault[] = [];
afterEach(async () => {
  await stack.disposeAsync();
  stack = new AsyncDisposableStack();
  // Whatever a peer sends is its own mistake and no fault of the process.
  expect(faults.splice(0)).toEqual([]);
});

async function start(): Promise<RpcListener & { readonly url: string }> {
  const listener = stack.use(
    await startRpcListener({
      host: '127.0.0.1',
      port: 0,
      services: { kvCacheStore: { getStats: () => ({ runId: 'alive' }) } },
      callerOf: () => EVERYTHING,
      onFault: (fault) => void faults.push(fault),
    }),
  );
  return { ...listener, url: `http://127.0.0.1:${listener.port}` };
}

const STATS = '/baton.v1.KVCacheStore/GetStats';
const TAKE = '/baton.v1.KVCacheStore/TakeEntry';

async function send(url: string, path: string, type: string, body: Uint8Array, more: Record<string, string> = {}) {
  const reply = await fetch(url + path, {
    method: 'POST',
    headers: { 'content-type': type, ...more },
    body: Buffer.from(body),
  });
  return { status: reply.status, text: await reply.text() };
}

/** A gRPC call with these bytes; the status in headers or trailers. */
async function grpc(session: ClientHttp2Session, path: string, body: Uint8Array, type = 'application/grpc') {
  const stream = session.request({ ':method': 'POST', ':path': path, 'content-type': type, te: 'trailers' });
  stream.on('error', () => undefined);
  const seen: IncomingHttpHeaders[] = [];
  stream.on('response', (headers) => seen.push(headers));
  stream.on('trailers', (trailers) => seen.push(trailers));
  stream.resume();
  const closed = once(stream, 'close');
  stream.end(body);
  await closed;
  const http = seen[0]?.[':status'];
  return { http, grpc: seen.map((headers) => headers['grpc-status']).find((status) => status !== undefined) };
}

/** One message of gRPC and of Connect's streams. */
function framed(body: Uint8Array, length = body.length, flags = 0): Uint8Array {
  const head = Buffer.alloc(5);
  head.writeUInt8(flags, 0);
  head.writeUInt32BE(length, 1);
  return Buffer.concat([head, body]);
}

async function session(url: string): Promise<ClientHttp2Session> {
  const open = stack.adopt(connectHttp2(url), (each) => each.destroy());
  open.on('error', () => undefined);
  await once(open, 'remoteSettings');
  return open;
}

async function isAlive(url: string): Promise<void> {
  const { status, text } = await send(url, STATS, 'application/json', Buffer.from('{}'));
  expect([status, JSON.parse(text).runId]).toEqual([200, 'alive']);
}

// A length-delimited field that says it is longer than what follows.
const GARBAGE = Uint8Array.of(0x0a, 0xff, 0xff, 0xff, 0x07, 1, 2, 3);

describe('each protocol says what is wrong', () => {
  test('garbage instead of a message', async () => {
    const { url } = await start();
    const binary = await send(url, STATS, 'application/proto', GARBAGE);
    expect([binary.status, JSON.parse(binary.text).code]).toEqual([400, 'invalid_argument']);
    // What a usual client does not send goes another way.
    const zipped = await send(url, STATS, 'application/proto', gzipSync(GARBAGE), { 'content-encoding': 'gzip' });
    expect([zipped.status, JSON.parse(zipped.text).code]).toEqual([400, 'invalid_argument']);
    for (const json of ['{', '[]', '{"filter": 5}', '\u0000']) {
      const reply = await send(url, STATS, 'application/json', Buffer.from(json));
      expect([json, reply.status, JSON.parse(reply.text).code]).toEqual([json, 400, 'invalid_argument']);
    }
    // The word that gRPC has for it.
    const web = await send(url, STATS, 'application/grpc-web+proto', framed(GARBAGE));
    expect(web.text).toMatch(/grpc-status: 13\r\n/);
    const http2 = await session(url);
    expect(await grpc(http2, STATS, framed(GARBAGE))).toEqual({ http: 200, grpc: '13' });
    await isAlive(url);
  });

  test('a wrong type, method or path', async () => {
    const { url } = await start();
    for (const type of ['text/plain', 'application/xml', 'application/x-www-form-urlencoded', '']) {
      expect((await send(url, STATS, type, Buffer.from('{}'))).status).toBe(415);
    }
    for (const method of ['GET', 'PUT', 'DELETE']) expect((await fetch(url + TAKE, { method })).status).toBe(405);
    const http2 = await session(url);
    expect((await grpc(http2, STATS, framed(GARBAGE), 'text/plain')).http).toBe(415);
    // Clients of gRPC read a 404 without a status as UNIMPLEMENTED.
    expect(await grpc(http2, '/baton.v1.KVCacheStore/Nothing', framed(new Uint8Array()))).toEqual({
      http: 404,
      grpc: undefined,
    });
    // One that the process does not serve, and one that it does not implement.
    expect(await grpc(http2, TAKE, framed(new Uint8Array()))).toEqual({ http: 200, grpc: '12' });
    await isAlive(url);
  });

  test('frames that are cut off, or of an unknown kind', async () => {
    const { url } = await start();
    const http2 = await session(url);
    for (const body of [Uint8Array.of(0, 0), framed(Uint8Array.of(1, 2), 100), new Uint8Array()]) {
      const { grpc: status } = await grpc(http2, STATS, body);
      expect(['3', '12']).toContain(status);
    }
    // Says it is compressed, and is not.
    expect((await grpc(http2, STATS, framed(Uint8Array.of(1, 2, 3), 3, 1))).grpc).not.toBe('0');
    const encoded = await send(url, STATS, 'application/proto', Buffer.from('x'), { 'content-encoding': 'br' });
    expect([encoded.status, JSON.parse(encoded.text).code]).toEqual([501, 'unimplemented']);
    await isAlive(url);
  });
});

describe('memory is bounded', () => {
  test('a message over the limit is refused by the length it tells, before it is there', async () => {
    const { url } = await start();
    const http2 = await session(url);
    for (const length of [RPC_MAX_MESSAGE_BYTES + 1, 0xffffffff]) {
      const stream = http2.request({ ':method': 'POST', ':path': STATS, 'content-type': 'application/grpc' });
      stream.on('error', () => undefined).resume();
      const trailers = once(stream, 'trailers');
      // The rest never comes.
      stream.write(framed(new Uint8Array(10), length));
      const [{ 'grpc-status': status }] = await trailers;
      expect(status).toBe('8');
    }
    await isAlive(url);
  });

  test('a body without an end is cut off not far behind the limit', async () => {
    const { url } = await start();
    const request = httpRequest(url + STATS, { method: 'POST', headers: { 'content-type': 'application/proto' } });
    request.on('error', () => undefined);
    const answered = once(request, 'response');
    const chunk = Buffer.alloc(256 * 1024);
    let sent = 0;
    let over = false;
    void answered.then(() => {
      over = true;
    });
    while (!over && sent < 16 * RPC_MAX_MESSAGE_BYTES && !request.destroyed) {
      sent += chunk.length;
      await new Promise<void>((next) => request.write(chunk, () => next()));
    }
    const [response] = await answered;
    expect(response.statusCode).toBe(429);
    expect(sent).toBeLessThan(3 * RPC_MAX_MESSAGE_BYTES);
    request.destroy();
    await isAlive(url);
  });

  test('a small body that unpacks to more than the limit', async () => {
    const { url } = await start();
    const bomb = gzipSync(Buffer.alloc(RPC_MAX_MESSAGE_BYTES + 1));
    expect(bomb.length).toBeLessThan(100_000);
    const reply = await send(url, STATS, 'application/proto', bomb, { 'content-encoding': 'gzip' });
    expect([reply.status, JSON.parse(reply.text).code]).toEqual([429, 'resource_exhausted']);
    await isAlive(url);
  });
});

describe('bytes that are no HTTP', () => {
  const settings = Buffer.from([0, 0, 0, 4, 0, 0, 0, 0, 0]);
  const preface = Buffer.from('PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n', 'latin1');

  test.each([
    ['garbage after the preface of HTTP/2', Buffer.concat([preface, Buffer.alloc(64, 0xff)])],
    ['a frame that is too long', Buffer.concat([preface, Buffer.from([0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 1])])],
    [
      'data of a stream that was not opened',
      Buffer.concat([preface, settings, Buffer.from([0, 0, 1, 0, 0, 0, 0, 0, 7, 0])]),
    ],
    ['a greeting of TLS', Buffer.from('16030100050100000100', 'hex')],
    ['headers without an end', Buffer.from(`GET / HTTP/1.1\r\nx: ${'y'.repeat(100_000)}`)],
  ])('%s: the connection is closed', async (_, bytes) => {
    const { port, url } = await start();
    const socket = dial(port);
    const closed = new Promise((done) => socket.once('close', done));
    socket.write(bytes);
    socket.resume();
    await closed;
    await isAlive(url);
  });
});

function dial(port: AddressInfo['port']): Socket {
  const socket = stack.adopt(connect(port, '127.0.0.1'), (each) => void each.destroy());
  socket.on('error', () => undefined);
  return socket;
}
