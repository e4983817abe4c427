import { once } from 'node:events';
import {
  createServer as createHttp,
  type Server as HttpServer,
  type IncomingMessage,
  type ServerResponse,
} from 'node:http';
import { type AddressInfo, createServer, type Server, type Socket } from 'node:net';
import { gzipSync } from 'node:zlib';
import { describe, expect, test } from 'vitest';
import { EngineClient, type LegControl, type LegFailure, type LegRequest } from '../../src/engine/client.ts';

/** How a leg went, as its handler was told. */
interface Told {
  readonly control: LegControl;
  readonly status: Promise<number>;
  /** Resolves with the body, or with the failure. */
  readonly ending: Promise<{ readonly body: string } | { readonly failure: LegFailure }>;
  readonly headers: () => Readonly<Record<string, unknown>>;
  readonly received: () => number;
}

function send(client: EngineClient, request: Partial<LegRequest> & { readonly url: string }): Told {
  const status = Promise.withResolvers<number>();
  const ending = Promise.withResolvers<Awaited<Told['ending']>>();
  const chunks: Uint8Array[] = [];
  let headers: Record<string, unknown> = {};
  let endings = 0;
  const control = client.send(
    { method: 'POST', path: '/v1/x', headers: {}, body: new TextEncoder().encode('{}'), ...request },
    {
      head(code, told) {
        headers = told;
        status.resolve(code);
      },
      data: (chunk) => void chunks.push(chunk),
      end() {
        endings += 1;
        ending.resolve({ body: Buffer.concat(chunks).toString() });
      },
      fail(failure) {
        endings += 1;
        ending.resolve({ failure });
      },
    },
  );
  return {
    control,
    status: status.promise,
    ending: ending.promise.then(async (value) => {
      await new Promise(setImmediate);
      expect(endings).toBe(1);
      return value;
    }),
    headers: () => headers,
    received: () => chunks.reduce((sum, chunk) => sum + chunk.byteLength, 0),
  };
}

interface Listening extends AsyncDisposable {
  readonly url: string;
  readonly sockets: Set<Socket>;
  /** Connections accepted so far. */
  readonly accepted: () => number;
  readonly close: () => Promise<void>;
}

async function listen(server: Server | HttpServer): Promise<Listening> {
  const sockets = new Set<Socket>();
  let accepted = 0;
  server.on('connection', (socket: Socket) => {
    accepted += 1;
    sockets.add(socket);
    socket.on('error', () => undefined);
    socket.once('close', () => sockets.delete(socket));
  });
  server.listen(0, '127.0.0.1');
  await once(server, 'listening');
  const close = async () => {
    for (const socket of sockets) socket.destroy();
    if (server.listening) await new Promise((resolve) => server.close(resolve));
  };
  return {
    url: `http://127.0.0.1:${(server.address() as AddressInfo).port}`,
    sockets,
    accepted: () => accepted,
    close,
    [Symbol.asyncDispose]: close,
  };
}

/** An HTTP server; requests are read whole before they are answered. */
function listenHttp(answer: (request: IncomingMessage, response: ServerResponse) => void): Promise<Listening> {
  return listen(
    createHttp({ keepAliveTimeout: 60_000 }, (request, response) => {
      request.resume().once('end', () => answer(request, response));
    }),
  );
}

function open(keepAliveMs = 4000, connectMs = 3000): EngineClient {
  return new EngineClient({ connectMs, keepAliveMs });
}

describe('whether the engine can have seen the request', () => {
  test('a refused connection: not sent', async () => {
    await using client = open();
    const server = await listenHttp(() => undefined);
    await server.close();
    const ending = await send(client, { url: server.url }).ending;
    expect(ending).toMatchObject({ failure: { kind: 'not_sent', reused: false, replied: false } });
  });

  test('a name that does not exist: not sent', async () => {
    await using client = open();
    const ending = await send(client, { url: 'http://no-such-host.invalid:9' }).ending;
    expect(ending).toMatchObject({ failure: { kind: 'not_sent' } });
  });

  test('no TLS at the other end: not sent', async () => {
    await using server = await listenHttp(() => undefined);
    await using client = open();
    const ending = await send(client, { url: server.url.replace('http:', 'https:') }).ending;
    expect(ending).toMatchObject({ failure: { kind: 'not_sent' } });
  });

  test('a connection that was refused is tried anew by the next leg', async () => {
    await using client = open();
    const first = await listenHttp(() => undefined);
    await first.close();
    expect(await send(client, { url: first.url }).ending).toMatchObject({ failure: { kind: 'not_sent' } });
    const again = createHttp((request, response) => void request.resume().once('end', () => response.end('ok')));
    again.listen(Number(new URL(first.url).port), '127.0.0.1');
    await once(again, 'listening');
    expect(await send(client, { url: first.url }).ending).toEqual({ body: 'ok' });
    again.closeAllConnections();
    again.close();
  });

  test('a reset of a new connection', async () => {
    await using server = await listen(
      createServer((socket) => void socket.once('data', () => socket.resetAndDestroy())),
    );
    await using client = open();
    const ending = await send(client, { url: server.url }).ending;
    expect(ending).toMatchObject({ failure: { kind: 'reset', reused: false, replied: false } });
  });

  test('a connection that is closed without an answer', async () => {
    await using server = await listen(createServer((socket) => void socket.once('data', () => socket.end())));
    await using client = open();
    const ending = await send(client, { url: server.url }).ending;
    expect(ending).toMatchObject({ failure: { kind: 'reset', reused: false, replied: false } });
  });

  test('a reset of a connection that had served another leg', async () => {
    let requests = 0;
    await using server = await listenHttp((request, response) => {
      requests += 1;
      if (requests === 1) response.end('one');
      else request.socket.resetAndDestroy();
    });
    await using client = open();
    expect(await send(client, { url: server.url }).ending).toEqual({ body: 'one' });
    const ending = await send(client, { url: server.url }).ending;
    expect(ending).toMatchObject({ failure: { kind: 'reset', reused: true, replied: false } });
    expect(server.accepted()).toBe(1);
  });

  test('legs side by side: each knows of its own connection', async () => {
    const gate = Promise.withResolvers<void>();
    await using server = await listenHttp((request, response) => {
      if (request.url === '/first') return void response.end();
      if (request.url === '/reset') return void gate.promise.then(() => request.socket.resetAndDestroy());
      return void gate.promise.then(() => response.end('ok'));
    });
    await using client = open();
    await send(client, { url: server.url, path: '/first' }).ending;
    const old = send(client, { url: server.url, path: '/reset' });
    const young = send(client, { url: server.url, path: '/reset' });
    const fine = send(client, { url: server.url, path: '/fine' });
    await expect.poll(() => server.accepted()).toBe(3);
    gate.resolve();
    expect(await old.ending).toMatchObject({ failure: { kind: 'reset', reused: true } });
    expect(await young.ending).toMatchObject({ failure: { kind: 'reset', reused: false } });
    expect(await fine.ending).toEqual({ body: 'ok' });
  });

  test.each([
    ['the head', 'HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n'],
    ['some of the body', 'HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n'],
  ])('a reset after %s: replied', async (_what, reply) => {
    const cut = Promise.withResolvers<void>();
    await using server = await listen(
      createServer(
        (socket) =>
          void socket.once('data', () => {
            socket.write(reply);
            void cut.promise.then(() => socket.resetAndDestroy());
          }),
      ),
    );
    await using client = open();
    const leg = send(client, { url: server.url });
    expect(await leg.status).toBe(200);
    cut.resolve();
    expect(await leg.ending).toMatchObject({ failure: { kind: 'reset', replied: true } });
  });

  test('an answer that is no HTTP', async () => {
    await using server = await listen(
      createServer((socket) => void socket.once('data', () => socket.end('SSH-2.0-x\r\n'))),
    );
    await using client = open();
    expect(await send(client, { url: server.url }).ending).toMatchObject({ failure: { kind: 'reset' } });
  });
});

describe('a leg that must not be sent after some moment', () => {
  test.each([false, true])('too late %s', async (late) => {
    const seen: unknown[] = [];
    await using server = await listenHttp((request, response) => {
      seen.push(request.url);
      response.end('ok');
    });
    await using client = open();
    const ending = await send(client, { url: server.url, path: '/one', isTooLate: () => late }).ending;
    if (late) expect(ending).toMatchObject({ failure: { kind: 'too_late', replied: false } });
    else expect(ending).toEqual({ body: 'ok' });
    expect(await send(client, { url: server.url, path: '/two' }).ending).toEqual({ body: 'ok' });
    expect(seen).toEqual(late ? ['/two'] : ['/one', '/two']);
  });
});

describe('giving up', () => {
  test('before the connection is there: told at once, nothing is sent', async () => {
    let requests = 0;
    await using server = await listenHttp((_request, response) => {
      requests += 1;
      response.end();
    });
    await using client = open();
    const leg = send(client, { url: server.url });
    const cause = new Error('changed my mind');
    leg.control.abort(cause);
    expect(await leg.ending).toEqual({ failure: { kind: 'aborted', reused: false, replied: false, cause } });
    // A later leg goes through on the same pool; had the first been sent, it would have come before.
    await send(client, { url: server.url }).ending;
    expect(requests).toBe(1);
  });

  test.each(['before', 'after'] as const)('%s the head: the engine sees the connection close', async (when) => {
    const arrived = Promise.withResolvers<Socket>();
    await using server = await listenHttp((request, response) => {
      if (when === 'after') response.writeHead(200).write('x');
      arrived.resolve(request.socket);
    });
    await using client = open();
    const leg = send(client, { url: server.url });
    const socket = await arrived.promise;
    if (when === 'after') await leg.status;
    const closed = once(socket, 'close');
    leg.control.abort(new Error('enough'));
    leg.control.abort(new Error('twice'));
    const ending = await leg.ending;
    expect(ending).toMatchObject({ failure: { kind: 'aborted', replied: when === 'after' } });
    expect('failure' in ending && ending.failure.cause.message).toBe('enough');
    await closed;
  });

  test('after the end: nothing happens', async () => {
    await using server = await listenHttp((_request, response) => response.end('ok'));
    await using client = open();
    const leg = send(client, { url: server.url });
    expect(await leg.ending).toEqual({ body: 'ok' });
    leg.control.abort(new Error('late'));
    leg.control.pause();
    leg.control.resume();
    expect(await send(client, { url: server.url }).ending).toEqual({ body: 'ok' });
    expect(server.accepted()).toBe(1);
  });
});

describe('reading', () => {
  test.each(['identity', 'gzip'] as const)('stops and goes on, %s', async (encoding) => {
    const text = Array.from({ length: 400_000 }, (_, index) => index.toString(36)).join(',');
    const plain = Buffer.concat(Array.from({ length: 8 }, () => Buffer.from(text)));
    await using server = await listenHttp((_request, response) => {
      if (encoding === 'identity') response.end(plain);
      else response.writeHead(200, { 'content-encoding': 'gzip' }).end(gzipSync(plain, { level: 1 }));
    });
    await using client = open();
    const leg = send(client, { url: server.url });
    expect(await leg.status).toBe(200);
    leg.control.pause();
    let before = -1;
    await expect
      .poll(
        () => {
          const stands = leg.received() === before;
          before = leg.received();
          return stands;
        },
        { interval: 100 },
      )
      .toBe(true);
    expect(before).toBeLessThan(plain.byteLength);
    leg.control.resume();
    expect(await leg.ending).toEqual({ body: plain.toString() });
  });

  test.each(['gzip', 'x-gzip', 'GZIP'])('%s is decoded and no longer announced', async (encoding) => {
    await using server = await listenHttp((_request, response) =>
      response.writeHead(201, { 'content-encoding': encoding, 'x-more': '1' }).end(gzipSync('hello')),
    );
    await using client = open();
    const leg = send(client, { url: server.url });
    expect(await leg.status).toBe(201);
    expect(await leg.ending).toEqual({ body: 'hello' });
    expect(leg.headers()).not.toHaveProperty('content-encoding');
    expect(leg.headers()).toHaveProperty('x-more', '1');
  });

  test('a broken gzip is a broken connection', async () => {
    await using server = await listenHttp((_request, response) =>
      response.writeHead(200, { 'content-encoding': 'gzip' }).end('this is no gzip'),
    );
    await using client = open();
    expect(await send(client, { url: server.url }).ending).toMatchObject({ failure: { kind: 'reset', replied: true } });
  });

  test('a gzip that is cut is no whole reply', async () => {
    await using server = await listenHttp((_request, response) =>
      response.writeHead(200, { 'content-encoding': 'gzip' }).end(gzipSync('hello '.repeat(1000)).subarray(0, 40)),
    );
    await using client = open();
    expect(await send(client, { url: server.url }).ending).toMatchObject({ failure: { kind: 'reset', replied: true } });
  });

  test('the path prefix of the instance, the method and the body arrive', async () => {
    const seen: string[] = [];
    await using server = await listen(
      createHttp((request, response) => {
        const chunks: Buffer[] = [];
        request.on('data', (chunk: Buffer) => chunks.push(chunk));
        request.once('end', () => {
          seen.push(`${request.method} ${request.url} ${Buffer.concat(chunks).toString()}`);
          response.end();
        });
      }),
    );
    await using client = open();
    await send(client, { url: `${server.url}/a/b/`, path: '/v1/x?q=1', body: Buffer.from('ü') }).ending;
    await send(client, { url: server.url, method: 'GET', path: '/v1/models', body: null }).ending;
    expect(seen).toEqual(['POST /a/b/v1/x?q=1 ü', 'GET /v1/models ']);
  });
});

describe('connections', () => {
  test('an unused one is closed before engines do, after five seconds', async () => {
    // The engine announces that it would keep it for longer.
    await using server = await listenHttp((_request, response) =>
      response.writeHead(200, { connection: 'keep-alive', 'keep-alive': 'timeout=60' }).end('ok'),
    );
    await using client = open(300);
    await send(client, { url: server.url }).ending;
    expect(server.sockets.size).toBe(1);
    await expect.poll(() => server.sockets.size, { timeout: 4500 }).toBe(0);
    expect(await send(client, { url: server.url }).ending).toEqual({ body: 'ok' });
    expect(server.accepted()).toBe(2);
  });

  test('other times hold from the next leg on; one that runs keeps its connection', async () => {
    const waiting: ServerResponse[] = [];
    await using server = await listenHttp((request, response) => {
      if (request.url === '/waits') waiting.push(response);
      else response.end('ok');
    });
    const options = { connectMs: 1000, keepAliveMs: 4000 };
    await using client = new EngineClient(options);
    const running = send(client, { url: server.url, path: '/waits' });
    await send(client, { url: server.url }).ending;
    await expect.poll(() => waiting.length).toBe(1);
    options.keepAliveMs = 3000;
    expect(await send(client, { url: server.url }).ending).toEqual({ body: 'ok' });
    expect(server.accepted()).toBe(3);
    waiting[0]?.end('late');
    expect(await running.ending).toEqual({ body: 'late' });
    // Nobody comes back to those of before.
    await expect.poll(() => server.sockets.size).toBe(1);
  });

  test('a fresh one is new, says so, and is closed afterwards', async () => {
    const announced: unknown[] = [];
    await using server = await listenHttp((request, response) => {
      announced.push(request.headers.connection);
      response.end('ok');
    });
    await using client = open();
    await send(client, { url: server.url }).ending;
    expect(server.sockets.size).toBe(1);
    expect(await send(client, { url: server.url, fresh: true }).ending).toEqual({ body: 'ok' });
    expect(server.accepted()).toBe(2);
    expect(announced).toEqual(['keep-alive', 'close']);
    // The kept one stays.
    await expect.poll(() => server.sockets.size).toBe(1);
    await send(client, { url: server.url }).ending;
    expect(server.accepted()).toBe(2);
  });

  test.each(['refused', 'reset', 'aborted'] as const)('a fresh one that is %s leaves nothing open', async (how) => {
    const arrived = Promise.withResolvers<Socket>();
    await using server = await listenHttp((request) => {
      arrived.resolve(request.socket);
      if (how === 'reset') request.socket.resetAndDestroy();
    });
    await using client = open();
    if (how === 'refused') await server.close();
    const leg = send(client, { url: server.url, fresh: true });
    if (how === 'aborted') {
      await arrived.promise;
      leg.control.abort(new Error('enough'));
    }
    const kind = how === 'refused' ? 'not_sent' : how;
    expect(await leg.ending).toMatchObject({ failure: { kind, reused: false } });
    await expect.poll(() => server.sockets.size).toBe(0);
  });

  test('disposing closes all of them, running legs too', async () => {
    let requests = 0;
    await using server = await listenHttp((request, response) => {
      requests += 1;
      if (request.url === '/ends') response.end('ok');
    });
    const client = open();
    await send(client, { url: server.url, path: '/ends' }).ending;
    const running = [send(client, { url: server.url }), send(client, { url: server.url, fresh: true })];
    await expect.poll(() => requests).toBe(3);
    await client[Symbol.asyncDispose]();
    for (const leg of running) expect(await leg.ending).toMatchObject({ failure: { kind: 'reset' } });
    await expect.poll(() => server.sockets.size).toBe(0);
  });
});
