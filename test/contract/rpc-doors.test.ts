import { once } from 'node:events';
import { mkdtempSync, renameSync, rmSync, statSync, writeFileSync } from 'node:fs';
import { connect as connectHttp2 } from 'node:http2';
import { connect, createServer } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { connect as connectTls } from 'node:tls';
import { Code } from '@connectrpc/connect';
import { afterEach, describe, expect, test } from 'vitest';
import { type ClientTls, connectRemote, type RemoteOptions } from '../../src/rpc/clients.ts';
import { type RpcListener, type RpcListenerOptions, startRpcListener } from '../../src/rpc/listener.ts';
import { EVERYTHING } from '../../src/services/kv-cache-store.ts';
import { CLIENT_TLS, pem, SERVER_TLS } from '../support/tls.ts';

let stack = new AsyncDisposableStack();
afterEach(async () => {
  await stack.disposeAsync();
  stack = new AsyncDisposableStack();
});

async function start(options: Partial<RpcListenerOptions>): Promise<RpcListener> {
  return stack.use(
    await startRpcListener({
      host: '127.0.0.1',
      port: 'off',
      services: { router: { planRoute: () => ({}) } },
      callerOf: () => EVERYTHING,
      onFault: () => undefined,
      ...options,
    }),
  );
}

/** Makes a call; the code of the error, or undefined. */
async function call(options: RemoteOptions): Promise<string | undefined> {
  using clients = connectRemote(options);
  const error = await clients.router.planRoute({}).then(
    () => undefined,
    (thrown: { readonly code: Code }) => thrown,
  );
  return error === undefined ? undefined : Code[error.code];
}

function folder(): string {
  const path = mkdtempSync(join(tmpdir(), 'baton-'));
  stack.defer(() => rmSync(path, { recursive: true }));
  return path;
}

describe('a unix socket', () => {
  test('is for its owner alone, serves beside the port, and goes with its listener', async () => {
    const socketPath = join(folder(), 'rpc');
    const listener = await start({ port: 0, socketPath });
    expect(statSync(socketPath).mode & 0o777).toBe(0o600);
    expect(await call({ url: `unix:${socketPath}` })).toBeUndefined();
    expect(await call({ url: `http://127.0.0.1:${listener.port}` })).toBeUndefined();
    await listener.close(0);
    expect(() => statSync(socketPath)).toThrow('ENOENT');
    expect(await call({ url: `unix:${socketPath}` })).toBe('Unavailable');
  });

  test('that a dead process left is replaced; a live one, a file and a long path are errors', async () => {
    const path = folder();
    const stale = join(path, 'stale');
    // As kill -9 leaves it: the file is there and nobody listens.
    const child = createServer().listen(stale);
    await once(child, 'listening');
    renameSync(stale, `${stale}-kept`);
    await new Promise((done) => child.close(done));
    renameSync(`${stale}-kept`, stale);
    await start({ socketPath: stale });
    expect(await call({ url: `unix:${stale}` })).toBeUndefined();

    await expect(start({ socketPath: stale })).rejects.toThrow('another process listens on');
    expect(await call({ url: `unix:${stale}` })).toBeUndefined();
    const file = join(path, 'file');
    writeFileSync(file, 'x');
    await expect(start({ socketPath: file })).rejects.toThrow('is no socket');
    await expect(start({ socketPath: join(path, 'x'.repeat(100)) })).rejects.toThrow('at most 103 bytes');
    await expect(start({ socketPath: join(path, 'none', 'rpc') })).rejects.toThrow('does not exist');
  });

  test('that cannot be opened leaves no port open', async () => {
    const path = folder();
    writeFileSync(join(path, 'file'), 'x');
    const probe = createServer().listen(0, '127.0.0.1');
    await once(probe, 'listening');
    const { port } = probe.address() as { readonly port: number };
    await new Promise((done) => probe.close(done));
    await expect(start({ port, socketPath: join(path, 'file') })).rejects.toThrow();
    const socket = connect(port, '127.0.0.1');
    const [error] = await once(socket, 'error');
    expect(error).toMatchObject({ code: 'ECONNREFUSED' });
  });
});

test.each(['http', 'https'])(
  'a peer that dies: its calls end, and a stop does not wait for them, %s',
  async (scheme) => {
    const inCall = Promise.withResolvers<AbortSignal>();
    const planRoute = (_: unknown, { signal }: { readonly signal: AbortSignal }) => {
      inCall.resolve(signal);
      return once(signal, 'abort').then(() => ({}));
    };
    const { cert, key } = SERVER_TLS;
    const tls = scheme === 'https' ? { tls: { cert, key } } : {};
    const listener = await start({ port: 0, ...tls, services: { router: { planRoute } } });
    const socket = connect(listener.port, '127.0.0.1');
    const secured = () => connectTls({ socket, ca: pem('ca.pem'), servername: 'localhost', ALPNProtocols: ['h2'] });
    const session = connectHttp2(`${scheme}://localhost`, {
      createConnection: () => (scheme === 'https' ? secured() : socket),
    });
    session.on('error', () => undefined);
    const request = () =>
      session
        .request({ ':method': 'POST', ':path': '/baton.v1.Router/PlanRoute', 'content-type': 'application/proto' })
        .on('error', () => undefined);
    // One call whose message does not come to its end, and one that runs.
    request().write('x');
    request().end();
    const signal = await inCall.promise;
    // What the kernel sends for a process that was killed, and all that it sends.
    socket.end();
    if (!signal.aborted) await once(signal, 'abort');
    await listener.close(60_000);
  },
);

describe('TLS', () => {
  const { cert, key } = SERVER_TLS;
  const ca = { ca: pem('ca.pem') };
  const stranger: ClientTls = { ...ca, cert: pem('stranger.pem'), key: pem('stranger.key') };
  const versions = ['1.1', '2'] as const;

  test.each(versions)(
    'without authorities of clients: whoever trusts the certificate, HTTP/%s',
    async (httpVersion) => {
      const { port } = await start({ port: 0, tls: { cert, key } });
      const url = `https://localhost:${port}`;
      expect(await call({ url, httpVersion, tls: ca })).toBeUndefined();
      expect(await call({ url, httpVersion, tls: { ca: pem('stranger-ca.pem') } })).toBeDefined();
      expect(await call({ url: `http://localhost:${port}`, httpVersion })).toBeDefined();
    },
  );

  test.each(versions)('with authorities: their certificates alone, HTTP/%s', async (httpVersion) => {
    const { port } = await start({ port: 0, tls: SERVER_TLS });
    const url = `https://127.0.0.1:${port}`;
    expect(await call({ url, httpVersion, tls: CLIENT_TLS })).toBeUndefined();
    expect(await call({ url, httpVersion, tls: ca })).toBeDefined();
    expect(await call({ url, httpVersion, tls: stranger })).toBeDefined();
  });

  test('new certificates hold for new connections, and those that do not fit change nothing', async () => {
    const listener = await start({ port: 0, tls: { cert, key } });
    const shown = async () => {
      const socket = connectTls({ port: listener.port, host: '127.0.0.1', ...ca });
      await once(socket, 'secureConnect');
      const { subject } = socket.getPeerCertificate();
      socket.destroy();
      return subject.CN;
    };
    const url = `https://127.0.0.1:${listener.port}`;
    using clients = connectRemote({ url, tls: ca });
    await clients.router.planRoute({});
    expect(() => listener.useTls({ cert: pem('server-2.pem'), key })).toThrow();
    expect(await shown()).toBe('server');
    listener.useTls({ cert: pem('server-2.pem'), key: pem('server-2.key') });
    expect(await shown()).toBe('server-2');
    await clients.router.planRoute({});
  });

  test('silence before, in and after the handshake is given up', async () => {
    const { port } = await start({ port: 0, tls: { cert, key }, silentMs: 50 });
    const silent = connect(port, '127.0.0.1');
    silent.on('error', () => undefined);
    await once(silent, 'close');
    for (const protocol of ['h2', 'http/1.1']) {
      const socket = connectTls({ port, host: '127.0.0.1', ...ca, ALPNProtocols: [protocol] });
      // On a busy machine the time may be over in the handshake.
      socket.on('error', () => undefined).resume();
      await new Promise((closed) => void socket.once('close', closed));
    }
  });

  test('closing lets calls finish and ends the connections', async () => {
    const gate = Promise.withResolvers<void>();
    const inCall = Promise.withResolvers<void>();
    let calls = 0;
    const planRoute = async () => {
      if (++calls === 2) inCall.resolve();
      await gate.promise;
      return {};
    };
    const listener = await start({ port: 0, tls: { cert, key }, services: { router: { planRoute } } });
    const url = `https://127.0.0.1:${listener.port}`;
    const idle = connectHttp2(url, ca);
    await once(idle, 'remoteSettings');
    const idleClosed = once(idle, 'close');
    const answers = versions.map((httpVersion) => call({ url, httpVersion, tls: ca }));
    await inCall.promise;
    const closed = listener.close(60_000);
    await idleClosed;
    gate.resolve();
    expect(await Promise.all(answers)).toEqual([undefined, undefined]);
    await closed;
  });
});
