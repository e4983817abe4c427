import { getEventListeners, once } from 'node:events';
import { createServer } from 'node:http';
import { connect as connectHttp2, constants, type IncomingHttpHeaders } from 'node:http2';
import { gunzipSync } from 'node:zlib';
import { create, toBinary } from '@bufbuild/protobuf';
import { durationFromMs } from '@bufbuild/protobuf/wkt';
import { afterEach, describe, expect, test } from 'vitest';
import { GetStatsRequestSchema, ListEntriesRequestSchema } from '../../gen/baton/v1/kv_cache_store_pb.ts';
import { BatonError } from '../../src/core/errors.ts';
import type { RpcFault } from '../../src/rpc/bind.ts';
import { CALLER } from '../../src/rpc/caller.ts';
import { LazyContext } from '../../src/rpc/lazy-context.ts';
import { RPC_MAX_MESSAGE_BYTES } from '../../src/rpc/limits.ts';
import { startRpcListener } from '../../src/rpc/listener.ts';
import { bindServices } from '../../src/rpc/routes.ts';
import { UnaryCalls } from '../../src/rpc/unary-calls.ts';
import { EVERYTHING } from '../../src/services/kv-cache-store.ts';

// Plain calls have a way of their own through the port; a header that means nothing sends the same call through
// connect-node. Both have to answer the same.
const THE_OTHER_WAY = { 'content-encoding': 'identity' };

let stack = new AsyncDisposableStack();
const faults: RpcFault[] = [];
afterEach(async () => {
  await stack.disposeAsync();
  stack = new AsyncDisposableStack();
  faults.splice(0);
});

const entry = {
  entryId: 'e-1',
  key: { tenant: 't', model: 'm', conversationId: 'c'.repeat(400) },
  remainingTtl: durationFromMs(5),
};

/** What the implementation saw of each call. */
interface Seen {
  readonly way: 'plain' | 'connect-node';
  readonly caller: string;
  readonly tenant: string | null;
  readonly timeoutMs: number | undefined;
  readonly url: string;
}

async function start() {
  const seen: Seen[] = [];
  const waiting = Promise.withResolvers<AbortSignal>();
  const listener = stack.use(
    await startRpcListener({
      host: '127.0.0.1',
      port: 0,
      services: {
        kvCacheStore: {
          getStats: async (_, context) => {
            seen.push({
              way: context instanceof LazyContext ? 'plain' : 'connect-node',
              caller: context.values.get(CALLER).tenant,
              tenant: context.requestHeader.get('x-tenant'),
              timeoutMs: context.timeoutMs(),
              url: new URL(context.url).pathname,
            });
            context.responseHeader.set('x-answer', 'header');
            context.responseTrailer.set('x-answer', 'trailer');
            return { runId: 'run' };
          },
          listEntries: async ({ pageSize }) => ({ entries: Array.from({ length: pageSize }, () => entry) }),
          getEntry: async () => {
            throw new BatonError({ reason: 'INVALID_ARGUMENT', message: 'key is required', param: 'key' });
          },
          commitClaim: async () => {
            throw new TypeError('a secret');
          },
          releaseClaim: (_, { signal }) =>
            new Promise((_resolve, reject) => {
              if (signal.aborted) reject(signal.reason);
              else signal.addEventListener('abort', () => reject(signal.reason));
              waiting.resolve(signal);
            }),
        },
      },
      callerOf: (authorization) =>
        authorization === 'Bearer wrong'
          ? new BatonError({ reason: 'CREDENTIAL_REQUIRED', message: 'the token is not valid' })
          : { ...EVERYTHING, tenant: authorization ?? 'nobody' },
      onFault: (fault) => void faults.push(fault),
    }),
  );
  return { url: `http://127.0.0.1:${listener.port}`, seen, waiting: waiting.promise };
}

interface Call {
  readonly method: string;
  readonly body?: Uint8Array;
  readonly headers?: Readonly<Record<string, string>>;
}

async function overHttp1(url: string, { method, body = new Uint8Array(), headers = {} }: Call) {
  const reply = await fetch(`${url}/baton.v1.KVCacheStore/${method}`, {
    method: 'POST',
    headers: { 'content-type': 'application/proto', 'accept-encoding': 'identity', ...headers },
    body: Buffer.from(body),
  });
  return comparable(reply.status, Object.fromEntries(reply.headers), Buffer.from(await reply.arrayBuffer()));
}

async function overHttp2(url: string, { method, body = new Uint8Array(), headers = {} }: Call) {
  const session = connectHttp2(url);
  const stream = session.request({
    ':method': 'POST',
    ':path': `/baton.v1.KVCacheStore/${method}`,
    'content-type': 'application/proto',
    ...headers,
  });
  stream.end(body);
  const [head]: IncomingHttpHeaders[] = await once(stream, 'response');
  const chunks: Buffer[] = [];
  for await (const chunk of stream) chunks.push(chunk);
  session.close();
  return comparable(head?.[':status'], { ...head }, Buffer.concat(chunks));
}

/** The answer without what depends on the time and the connection. */
function comparable(status: unknown, headers: Record<string, unknown>, raw: Buffer) {
  const { date, connection, 'keep-alive': _, ...rest } = headers;
  const zipped = rest['content-encoding'] === 'gzip' && raw[0] === 0x1f;
  return { status, headers: rest, body: (zipped ? gunzipSync(raw) : raw).toString('latin1') };
}

const stats = toBinary(GetStatsRequestSchema, create(GetStatsRequestSchema));
const page = (pageSize: number) => toBinary(ListEntriesRequestSchema, create(ListEntriesRequestSchema, { pageSize }));

const CALLS: Readonly<Record<string, Call>> = {
  'an answer, with headers and trailers of its own': { method: 'GetStats', body: stats },
  'a long answer': { method: 'ListEntries', body: page(40) },
  'a long answer for somebody who takes gzip': {
    method: 'ListEntries',
    body: page(40),
    headers: { 'accept-encoding': 'br, gzip' },
  },
  'a short answer for somebody who takes gzip': { method: 'GetStats', headers: { 'accept-encoding': 'gzip' } },
  'an answer that is too long': { method: 'ListEntries', body: page(60_000) },
  'an error with details': { method: 'GetEntry' },
  'a fault': { method: 'CommitClaim' },
  'a method without an implementation': { method: 'PutEntry' },
  'garbage instead of a message': { method: 'GetStats', body: Uint8Array.of(0x0a, 0xff, 0xff, 0xff, 0x07, 1) },
  'a wrong token': { method: 'GetStats', headers: { authorization: 'Bearer wrong' } },
  'a deadline that passes': { method: 'ReleaseClaim', headers: { 'connect-timeout-ms': '20' } },
  'a deadline that has passed': { method: 'ReleaseClaim', headers: { 'connect-timeout-ms': '0' } },
  'a deadline that is none': { method: 'GetStats', headers: { 'connect-timeout-ms': 'soon' } },
};

describe.each([
  ['HTTP/1.1', overHttp1],
  ['HTTP/2', overHttp2],
])('%s', (_, send) => {
  test.each(Object.entries(CALLS))('%s', async (_name, call) => {
    const { url, seen } = await start();
    const answer = await send(url, call);
    const other = await send(url, { ...call, headers: { ...call.headers, ...THE_OTHER_WAY } });
    const { 'content-length': length, ...headers } = answer.headers;
    const { 'content-length': otherLength, ...otherHeaders } = other.headers;
    expect({ ...answer, headers }).toEqual({ ...other, headers: otherHeaders });
    // What gzip makes of the same may differ by its level.
    if (headers['content-encoding'] === undefined) expect(length).toEqual(otherLength);
    if (seen.length > 0) expect(seen).toEqual([seen[0], { ...seen[0], way: 'connect-node' }]);
  });

  test('the context tells the same', async () => {
    const { url, seen } = await start();
    const headers = { 'x-tenant': 'ä'.normalize(), 'connect-timeout-ms': '5000', authorization: 'Bearer a' };
    await send(url, { method: 'GetStats', headers });
    await send(url, { method: 'GetStats', headers: { ...headers, ...THE_OTHER_WAY } });
    const told = { caller: 'Bearer a', tenant: seen[1]?.tenant, url: '/baton.v1.KVCacheStore/GetStats' };
    expect(seen).toMatchObject([
      { ...told, way: 'plain' },
      { ...told, way: 'connect-node' },
    ]);
    for (const { timeoutMs = 0 } of seen) expect(timeoutMs).toBeGreaterThan(0);
  });
});

test('faults are told, with the id of their request', async () => {
  const { url } = await start();
  await overHttp2(url, { method: 'CommitClaim', headers: { 'x-request-id': 'r-1' } });
  await overHttp2(url, { method: 'CommitClaim', headers: { 'x-request-id': 'r-1', ...THE_OTHER_WAY } });
  expect(faults).toMatchObject([
    { method: 'baton.v1.KVCacheStore/CommitClaim', requestId: 'r-1', error: { message: 'a secret' } },
    { method: 'baton.v1.KVCacheStore/CommitClaim', requestId: 'r-1', error: { message: 'a secret' } },
  ]);
});

test('a body over the limit is refused while it comes, and no more of it is taken', async () => {
  const { url } = await start();
  const session = stack.adopt(connectHttp2(url), (each) => each.destroy());
  const stream = session.request({
    ':method': 'POST',
    ':path': '/baton.v1.KVCacheStore/GetStats',
    'content-type': 'application/proto',
  });
  const piece = Buffer.alloc(256 * 1024);
  let sent = 0;
  const more = (): void => {
    while (!stream.destroyed && !stream.closed && sent < 4 * RPC_MAX_MESSAGE_BYTES) {
      sent += piece.length;
      if (!stream.write(piece)) return void stream.once('drain', more);
    }
  };
  more();
  const [head]: IncomingHttpHeaders[] = await once(stream, 'response');
  const chunks: Buffer[] = [];
  stream.on('data', (chunk: Buffer) => void chunks.push(chunk));
  await once(stream, 'close');
  expect([head?.[':status'], JSON.parse(Buffer.concat(chunks).toString()).code]).toEqual([429, 'resource_exhausted']);
  expect(stream.rstCode).toBe(constants.NGHTTP2_NO_ERROR);
  expect(sent).toBeLessThan(4 * RPC_MAX_MESSAGE_BYTES);
});

test.each([{}, THE_OTHER_WAY])('a caller that goes away ends its call %j', async (headers) => {
  const { url, waiting } = await start();
  const session = stack.adopt(connectHttp2(url), (each) => each.destroy());
  const stream = session.request({
    ':method': 'POST',
    ':path': '/baton.v1.KVCacheStore/ReleaseClaim',
    'content-type': 'application/proto',
    ...headers,
  });
  stream.on('error', () => undefined);
  stream.end();
  const signal = await waiting;
  expect(signal.aborted).toBe(false);
  stream.close(constants.NGHTTP2_CANCEL);
  await expect.poll(() => signal.reason).toMatchObject({ name: 'ConnectError' });
  expect(faults).toEqual([]);
});

test('a call that is over is not held by whatever would end it', async () => {
  const stop = new AbortController();
  const held = () => getEventListeners(stop.signal, 'abort').length;
  const seen: number[] = [];
  const implementation = {
    getStats: async (_: unknown, { signal }: { readonly signal: AbortSignal }) => {
      seen.push(held(), Number(signal.aborted));
      return {};
    },
  };
  const methods = bindServices({ kvCacheStore: implementation }, (fault) => void faults.push(fault));
  const calls = new UnaryCalls({ methods, callerOf: () => EVERYTHING, callStop: stop.signal });
  await using server = createServer((request, response) => void calls.serve(request.url ?? '', request, response));
  await once(server.listen(0, '127.0.0.1'), 'listening');
  const { port } = server.address() as { readonly port: number };
  expect(await overHttp1(`http://127.0.0.1:${port}`, { method: 'GetStats' })).toMatchObject({ status: 200 });
  expect({ seen, held: held(), faults }).toEqual({ seen: [1, 0], held: 0, faults: [] });
});
