import { once } from 'node:events';
import { createServer as createHttp1Server } from 'node:http';
import {
  type ClientHttp2Session,
  connect as connectHttp2,
  constants,
  createServer as createHttp2Server,
} from 'node:http2';
import { connect, createServer as createNetServer, type Server, type Socket } from 'node:net';
import { Code, ConnectError } from '@connectrpc/connect';
import { describe, expect, test } from 'vitest';
import { PlanMode } from '../../gen/baton/v1/router_pb.ts';
import type { RpcFault } from '../../src/rpc/bind.ts';
import { connectRemote, type RemoteOptions, type RemoteServices } from '../../src/rpc/clients.ts';
import { type RpcListener, startRpcListener } from '../../src/rpc/listener.ts';
import type { RpcServices } from '../../src/rpc/routes.ts';
import { EVERYTHING } from '../../src/services/kv-cache-store.ts';

const PROTOCOLS: readonly Omit<RemoteOptions, 'url'>[] = [
  { protocol: 'connect', httpVersion: '1.1' },
  { protocol: 'connect', httpVersion: '2' },
  { protocol: 'grpc', httpVersion: '2' },
  { protocol: 'grpc-web', httpVersion: '1.1' },
  { protocol: 'grpc-web', httpVersion: '2' },
];

interface Started extends AsyncDisposable {
  readonly listener: RpcListener;
  readonly faults: readonly RpcFault[];
  readonly url: string;
  readonly client: (options?: Omit<RemoteOptions, 'url'>) => RemoteServices;
  readonly socket: (...parts: readonly string[]) => Promise<Socket>;
}

async function start(services: RpcServices, silentMs?: number): Promise<Started> {
  const faults: RpcFault[] = [];
  const stack = new AsyncDisposableStack();
  const listener = await startRpcListener({
    host: '127.0.0.1',
    port: 0,
    services,
    callerOf: () => EVERYTHING,
    onFault: (fault) => void faults.push(fault),
    ...(silentMs === undefined ? {} : { silentMs }),
  });
  stack.use(listener);
  const url = `http://127.0.0.1:${listener.port}`;
  return {
    listener,
    faults,
    url,
    client: (options = {}) => stack.use(connectRemote({ url, ...options })),
    socket: async (...parts) => {
      const socket = stack.adopt(connect(listener.port, '127.0.0.1'), (open) => void open.destroy());
      socket.on('error', () => undefined);
      await once(socket, 'connect');
      for (const part of parts) {
        socket.write(part);
        await turn();
      }
      return socket;
    },
    [Symbol.asyncDispose]: () => stack.disposeAsync(),
  };
}

describe('one port', () => {
  test('serves every protocol at once', async () => {
    const gate = Promise.withResolvers<void>();
    const all = Promise.withResolvers<void>();
    let waiting = 0;
    await using started = await start({
      router: {
        planRoute: async (request) => {
          if (++waiting === PROTOCOLS.length * 4) all.resolve();
          await gate.promise;
          return { result: { case: 'plan', value: { planId: request.planKey, mode: PlanMode.AGGREGATED } } };
        },
      },
    });
    const calls = PROTOCOLS.flatMap((protocol, index) => {
      const client = started.client(protocol);
      return Array.from({ length: 4 }, (_, turnIndex) => client.router.planRoute({ planKey: `${index}-${turnIndex}` }));
    });
    await all.promise;
    gate.resolve();
    const answers = await Promise.all(calls);
    expect(answers.map((answer) => (answer.result.case === 'plan' ? answer.result.value.planId : ''))).toEqual(
      PROTOCOLS.flatMap((_, index) => ['0', '1', '2', '3'].map((turnIndex) => `${index}-${turnIndex}`)),
    );
    expect(started.faults).toEqual([]);
  });

  test('carries a message of more than a socket buffer, and refuses one over the limit', async () => {
    const tokenIds = Array.from({ length: 1_048_576 }, (_, index) => index % 150_000);
    const lengths: (number | undefined)[] = [];
    await using started = await start({
      router: {
        planRoute: (request) => {
          lengths.push(request.prompt?.tokenIds.length);
          return {};
        },
      },
    });
    for (const protocol of PROTOCOLS.slice(0, 3))
      await started.client(protocol).router.planRoute({ prompt: { tokenIds } });
    expect(lengths).toEqual([1_048_576, 1_048_576, 1_048_576]);

    const body = new Uint8Array(16 * 1024 * 1024 + 1);
    const response = await fetch(`${started.url}/baton.v1.Router/PlanRoute`, {
      method: 'POST',
      headers: { 'content-type': 'application/proto' },
      body,
    });
    expect(response.status).toBe(429);
    expect(await response.json()).toMatchObject({ code: 'resource_exhausted' });
  });

  test('answers JSON with curl-like requests, GET included', async () => {
    await using started = await start({
      router: {
        explainRoute: (request) => ({ plan: { reason: request.facts?.model ?? '', mode: PlanMode.DECODE_LOCAL } }),
      },
    });
    const path = `${started.url}/baton.v1.Router/ExplainRoute`;
    const expected = { plan: { reason: 'm', mode: 'PLAN_MODE_DECODE_LOCAL' } };
    const posted = await fetch(path, {
      method: 'POST',
      headers: { 'content-type': 'application/json' },
      body: '{"facts":{"model":"m","unknownField":1}}',
    });
    expect([posted.status, await posted.json()]).toEqual([200, expected]);
    const message = encodeURIComponent('{"facts":{"model":"m"}}');
    const got = await fetch(`${path}?connect=v1&encoding=json&message=${message}`);
    expect([got.status, await got.json()]).toEqual([200, expected]);
    const changing = await fetch(`${started.url}/baton.v1.Router/PlanRoute?connect=v1&encoding=json&message=%7B%7D`);
    expect(changing.status).toBe(405);
    await changing.arrayBuffer();
  });

  test('answers 404 to unknown paths over both versions of HTTP', async () => {
    await using started = await start({});
    for (const path of ['/', '/v1/models', '/baton.v1.Router', '/baton.v1.Router/Nothing']) {
      const response = await fetch(started.url + path, { method: 'POST', body: 'x' });
      expect([path, response.status, await response.text()]).toEqual([path, 404, '']);
    }
    const session = connectHttp2(started.url);
    const stream = session.request({ ':path': '/nothing' });
    const [headers] = await once(stream, 'response');
    expect(headers[':status']).toBe(404);
    stream.resume();
    await once(stream, 'close');
    session.destroy();
  });

  test('survives requests without a usable authority', async () => {
    await using started = await start({ router: { planRoute: () => ({}) } });
    const requests = [
      'POST /baton.v1.Router/PlanRoute HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}',
      'POST /baton.v1.Router/PlanRoute HTTP/1.1\r\nhost: a b\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}',
    ];
    for (const request of requests) {
      const socket = await started.socket(request);
      expect(await textOf(socket)).toMatch(/^HTTP\/1\.1 400 /);
    }
    await started.client().router.planRoute({});
    expect(started.faults).toEqual([]);
  });
});

describe('first bytes', () => {
  test('may arrive one at a time, HTTP/1.1', async () => {
    await using started = await start({});
    const socket = await started.socket(...'POST /nothing HTTP/1.1\r\nhost: x\r\n', 'connection: close\r\n\r\n');
    expect(await textOf(socket)).toMatch(/^HTTP\/1\.1 404 /);
  });

  test('may arrive one at a time, HTTP/2', async () => {
    await using started = await start({});
    const settings = '\0\0\0\x04\0\0\0\0\0';
    const socket = await started.socket(...'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n', settings);
    const [chunk] = await once(socket, 'data');
    // Length 24 bits, then type 4: the server's SETTINGS frame.
    expect(chunk[3]).toBe(4);
  });

  test('that begin like HTTP/2 and go on otherwise are HTTP/1.1', async () => {
    await using started = await start({});
    const socket = await started.socket('PR', 'OPFIND / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n');
    expect(await textOf(socket)).toMatch(/^HTTP\/1\.1 404 /);
  });

  test('must come: a silent socket is closed, and a busy one is not', async () => {
    const gate = Promise.withResolvers<void>();
    const started1 = Promise.withResolvers<void>();
    await using started = await start(
      {
        router: {
          planRoute: async () => {
            started1.resolve();
            await gate.promise;
            return {};
          },
        },
      },
      // Long enough for the head of the busy one on a busy machine.
      500,
    );
    const call = started.client({ httpVersion: '1.1' }).router.planRoute({});
    await started1.promise;
    const silent = await Promise.all([started.socket(), started.socket('P'), started.socket('PRI * HTTP/2.0\r\n')]);
    for (const socket of silent) expect(await textOf(socket)).toBe('');
    gate.resolve();
    await call;
  });

  test('cut off in their body are not waited for', async () => {
    await using started = await start({}, 50);
    const head = 'POST /baton.v1.Router/PlanRoute HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n';
    const socket = await started.socket(`${head}content-length: 1000\r\n\r\n{`);
    expect(await textOf(socket)).toMatch(/^HTTP\/1.1 408 /);
  });

  test.each(['application/proto', 'application/json', 'application/grpc'])(
    'cut off in their body over HTTP/2 are not waited for either, %s',
    async (type) => {
      await using started = await start({}, 50);
      const session = await openSession(started.url);
      const head = { ':method': 'POST', ':path': '/baton.v1.Router/PlanRoute', 'content-type': type };
      const stream = session.request(head);
      stream.on('error', () => undefined);
      stream.write('{');
      await once(stream, 'close');
      expect(stream.rstCode).not.toBe(constants.NGHTTP2_NO_ERROR);
    },
  );

  test('that never come do not hold a half-closed socket', async () => {
    await using started = await start({});
    const socket = await started.socket();
    socket.end();
    expect(await textOf(socket)).toBe('');
  });

  test('half of a request header is given up too', async () => {
    await using started = await start({}, 50);
    const socket = await started.socket('POST /x HTTP/1.1\r\nhost: x\r\n');
    expect(await textOf(socket)).toMatch(/^HTTP\/1\.1 408 /);
  });
});

describe('close', () => {
  test('ends streams with a reason, lets calls finish, and then every connection', async () => {
    const gate = Promise.withResolvers<void>();
    const inCall = Promise.withResolvers<void>();
    let calls = 0;
    await using started = await start({
      router: {
        planRoute: async () => {
          if (++calls === PROTOCOLS.length) inCall.resolve();
          await gate.promise;
          return {};
        },
      },
      poolRegistry: {
        watchInstances: async function* () {
          yield { resumeToken: 'first' };
          await new Promise(() => undefined);
        },
      },
    });
    const idle = await openSession(started.url);
    const idleClosed = once(idle, 'close');
    const silent = await started.socket();
    const clients = PROTOCOLS.map((protocol) => started.client(protocol));
    const unary = clients.map((client) => client.router.planRoute({}));
    const watches = await Promise.all(
      clients.map(async (client) => {
        const iterator = client.poolRegistry.watchInstances({})[Symbol.asyncIterator]();
        await iterator.next();
        return iterator;
      }),
    );
    await inCall.promise;

    let done = false;
    const closed = started.listener.close(60_000).then(() => {
      done = true;
    });
    for (const watch of watches) {
      const error = await watch.next().catch((thrown: unknown) => thrown);
      expect(error).toBeInstanceOf(ConnectError);
      expect(error).toMatchObject({ code: Code.Unavailable, rawMessage: 'this process is shutting down' });
    }
    await idleClosed;
    expect(await textOf(silent)).toBe('');
    expect(done).toBe(false);
    await expect(started.socket()).rejects.toMatchObject({ code: 'ECONNREFUSED' });
    gate.resolve();
    await Promise.all(unary);
    await closed;
    expect(started.faults).toEqual([]);
  });

  test('aborts what has not finished when the time is up', async () => {
    const running: AbortSignal[] = [];
    const inCall = Promise.withResolvers<void>();
    await using started = await start({
      router: {
        planRoute: async (_, context) => {
          running.push(context.signal);
          if (running.length === PROTOCOLS.length) inCall.resolve();
          return new Promise<never>((_resolve, reject) => {
            context.signal.addEventListener('abort', () => reject(context.signal.reason));
          });
        },
        reportOutcome: () => new Promise<never>(() => undefined),
      },
    });
    const polite = PROTOCOLS.map((protocol) =>
      started
        .client(protocol)
        .router.planRoute({})
        .catch((error) => error),
    );
    const stuck = PROTOCOLS.map((protocol) =>
      started
        .client(protocol)
        .router.reportOutcome({})
        .catch((error) => error),
    );
    await inCall.promise;
    await started.listener.close(20);
    for (const error of await Promise.all(polite)) {
      expect(error).toMatchObject({ code: Code.Unavailable, rawMessage: 'this process is shutting down' });
    }
    for (const error of await Promise.all(stuck)) expect(error).toBeInstanceOf(ConnectError);
    expect(running.every((signal) => signal.aborted)).toBe(true);
  });

  // The drain is longer than a test may take: a peer that does not do its part must not use it up.
  const LONG_MS = 600_000;
  const settings = '\0\0\0\x04\0\0\0\0\0';
  const preface = `PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n${settings}`;

  test('does not wait for a peer that keeps its side of a session open', async () => {
    await using started = await start({});
    const socket = halfOpenSocket(started.listener.port);
    await once(socket, 'connect');
    socket.write(preface);
    await once(socket, 'data');
    await started.listener.close(LONG_MS);
    socket.destroy();
  });

  test('does not wait for a peer whose call was answered and that then falls silent', async () => {
    await using started = await start({ router: { planRoute: () => ({}) } });
    const relay = createNetServer({ allowHalfOpen: true }, (inner) => {
      const outer = connect({ port: started.listener.port, host: '127.0.0.1', allowHalfOpen: true });
      inner.pipe(outer).pipe(inner);
      cut.signal.addEventListener('abort', () => {
        inner.unpipe(outer).pause();
        outer.unpipe(inner).pause();
      });
      for (const socket of [inner, outer]) socket.on('error', () => undefined);
    });
    const cut = new AbortController();
    await once(relay.listen(0, '127.0.0.1'), 'listening');
    const address = relay.address();
    if (address === null || typeof address === 'string') throw new Error('no port');
    const clients = connectRemote({ url: `http://127.0.0.1:${address.port}` });
    await clients.router.planRoute({});
    cut.abort();
    await started.listener.close(LONG_MS);
    clients[Symbol.dispose]();
    relay.close();
  });

  test('does not wait for a watcher that does not read', async () => {
    let sent = 0;
    await using started = await start({
      poolRegistry: {
        watchInstances: async function* () {
          for (;;) {
            sent++;
            yield { resumeToken: 'x'.repeat(100_000) };
          }
        },
      },
    });
    const session = await openSession(started.url);
    const headers = { ':method': 'POST', 'content-type': 'application/connect+json' };
    const stream = session.request({ ...headers, ':path': '/baton.v1.PoolRegistry/WatchInstances' });
    stream.on('error', () => undefined);
    stream.end(Buffer.from('\0\0\0\0\x02{}', 'latin1'));
    stream.pause();
    // Flow control holds the stream up: a stuck writer, nothing more is sent.
    await expect.poll(() => sent).toBeGreaterThan(0);
    await started.listener.close(LONG_MS);
    expect(sent).toBeLessThan(50);
    session.destroy();
  });

  test.each(['1.1', '2'])('ends a request that is never finished when the time is up, HTTP/%s', async (version) => {
    await using started = await start({ router: { planRoute: () => ({}) } });
    const path = '/baton.v1.Router/PlanRoute';
    let closed: Promise<unknown>;
    if (version === '2') {
      const session = await openSession(started.url);
      const stream = session.request({ ':method': 'POST', ':path': path, 'content-type': 'application/json' });
      stream.on('error', () => undefined).resume();
      stream.write('{');
      closed = once(session, 'close');
    } else {
      const head = `POST ${path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n{`;
      closed = once((await started.socket(head)).resume(), 'close');
    }
    // The request is being read.
    await turn();
    await started.listener.close(20);
    await closed;
    expect(started.faults).toEqual([]);
  });

  test('may be asked twice, and frees the port', async () => {
    await using first = await start({});
    await Promise.all([first.listener.close(1_000), first.listener.close(0)]);
    const again = await startRpcListener({
      host: '127.0.0.1',
      port: first.listener.port,
      services: {},
      callerOf: () => EVERYTHING,
      onFault: () => undefined,
    });
    expect(again.port).toBe(first.listener.port);
    await again.close(0);
  });

  test('a taken port is an error of the start', async () => {
    await using first = await start({});
    const second = startRpcListener({
      host: '127.0.0.1',
      port: first.listener.port,
      services: {},
      callerOf: () => EVERYTHING,
      onFault: () => undefined,
    });
    await expect(second).rejects.toMatchObject({ code: 'EADDRINUSE' });
  });
});

describe('peers that leave', () => {
  test.each(PROTOCOLS)('abort the call and are no fault: $protocol on $httpVersion', async (protocol) => {
    const inCall = Promise.withResolvers<void>();
    const aborted = Promise.withResolvers<void>();
    await using started = await start({
      router: {
        planRoute: (_, context) => {
          context.signal.addEventListener('abort', () => aborted.resolve());
          inCall.resolve();
          return new Promise<never>(() => undefined);
        },
        reportOutcome: () => ({}),
      },
    });
    const client = connectRemote({ url: started.url, ...protocol });
    const call = client.router.planRoute({}).catch((error: unknown) => error);
    await inCall.promise;
    client[Symbol.dispose]();
    await aborted.promise;
    expect(await call).toBeInstanceOf(ConnectError);
    await started.client(protocol).router.reportOutcome({});
    expect(started.faults).toEqual([]);
  });
});

describe('servers that leave', () => {
  test.each(PROTOCOLS)('are UNAVAILABLE, before and within an answer: $protocol on $httpVersion', async (protocol) => {
    const server = createHttp2OrHttp1(protocol.httpVersion === '2');
    await once(server.listen(0, '127.0.0.1'), 'listening');
    const { port } = server.address() as { readonly port: number };
    const client = connectRemote({ url: `http://127.0.0.1:${port}`, ...protocol });
    const watch = client.poolRegistry.watchInstances({})[Symbol.asyncIterator]();
    const errors = [client.router.planRoute({}), watch.next()].map((call) => call.catch((error: unknown) => error));
    for (const error of await Promise.all(errors)) expect(error).toMatchObject({ code: Code.Unavailable });
    client[Symbol.dispose]();
    server.close();
  });
});

/** A server that drops the connection of every request. */
function createHttp2OrHttp1(http2: boolean): Server {
  return http2
    ? createHttp2Server((request) => void request.stream.session?.destroy())
    : createHttp1Server((request) => void request.socket.destroy());
}

/** A socket that does not end its side when the other side does. */
function halfOpenSocket(port: number): Socket {
  const socket = connect({ port, host: '127.0.0.1', allowHalfOpen: true });
  socket.on('error', () => undefined);
  return socket;
}

async function openSession(url: string): Promise<ClientHttp2Session> {
  const session = connectHttp2(url);
  await once(session, 'remoteSettings');
  return session;
}

async function textOf(socket: Socket): Promise<string> {
  const chunks: string[] = [];
  socket.setEncoding('latin1');
  socket.on('data', (chunk) => chunks.push(String(chunk)));
  if (!socket.closed) await once(socket, 'close');
  return chunks.join('');
}

function turn(): Promise<void> {
  return new Promise((resolve) => setImmediate(resolve));
}
