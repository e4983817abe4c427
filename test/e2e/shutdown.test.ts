import { once } from 'node:events';
import { type AddressInfo, connect, createServer, type Socket } from 'node:net';
import { Code } from '@connectrpc/connect';
import { expect, test } from 'vitest';
import { StartError } from '../../src/roles/listen.ts';
import type { Running } from '../../src/roles.ts';
import { connectRemote } from '../../src/rpc/clients.ts';
import { startSimPools } from '../../src/sim/pools.ts';
import type { Sim } from '../../src/sim/start-sim.ts';
import { configOf, contentOf, startQuietly } from '../support/harness.ts';
import { chatBody, engine } from './ladder-support.ts';

interface Started extends AsyncDisposable {
  readonly baton: Running;
  readonly decode: Sim;
  readonly url: string;
}

async function start(flags: Readonly<Record<string, string>> = {}): Promise<Started> {
  await using stack = new AsyncDisposableStack();
  const pools = stack.use(await startSimPools({ prefill: 1, decode: 1 }));
  const urls = { prefill: pools.prefill.map(({ url }) => url), decode: pools.decode.map(({ url }) => url) };
  const { baton } = await startQuietly(configOf({ ...urls, ...flags }));
  stack.defer(() => baton.stop());
  const resources = stack.move();
  return {
    baton,
    decode: engine(pools.decode),
    url: `http://${baton.addresses.facade}`,
    [Symbol.asyncDispose]: () => resources.disposeAsync(),
  };
}

/** A stream of `tokens` tokens, `ms` apart, that has shown its first content. */
async function openStream({ url, decode }: Started, tokens: number, ms: number) {
  await decode.setFault({ kind: 'slow', ms, leg: 'decode' });
  const reply = await fetch(`${url}/v1/chat/completions`, {
    method: 'POST',
    body: JSON.stringify(chatBody({ stream: true, ignore_eos: true, max_tokens: tokens })),
  });
  const reader = reply.body?.getReader();
  if (reader === undefined) throw new Error('no body');
  const decoder = new TextDecoder();
  let text = decoder.decode((await reader.read()).value, { stream: true });
  return {
    async rest(): Promise<string> {
      for (;;) {
        const { value, done } = await reader.read();
        if (done) return text;
        text += decoder.decode(value, { stream: true });
      }
    },
  };
}

async function open(address: string): Promise<Socket> {
  const [host, port] = address.split(':');
  const socket = connect(Number(port), host);
  socket.on('error', () => undefined);
  await once(socket, 'connect');
  return socket;
}

async function refuses(address: string): Promise<boolean> {
  const [host, port] = address.split(':');
  const socket = connect(Number(port), host);
  return new Promise((resolve) => {
    socket.once('connect', () => {
      socket.destroy();
      resolve(false);
    });
    socket.once('error', () => resolve(true));
  });
}

test('a running stream is finished, idle connections are closed, new ones refused', async () => {
  await using started = await start();
  const { baton } = started;
  const facade = baton.addresses.facade ?? '';
  const idle = await open(facade);
  idle.write('GET /liveness HTTP/1.1\r\nhost: baton\r\n\r\n');
  await once(idle, 'data');
  const idleClosed = once(idle, 'close');
  const silentClosed = [facade, baton.addresses.admin ?? ''].map(async (address) => once(await open(address), 'close'));
  const stream = await openStream(started, 20, 20);
  const stopped = baton.stop();
  await Promise.all([idleClosed, silentClosed[0]]);
  await expect.poll(() => refuses(facade)).toBe(true);
  const { errors, done, finish } = contentOf(await stream.rest());
  expect({ errors, done, finish }).toEqual({ errors: [], done: true, finish: ['length'] });
  await stopped;
  await Promise.all(silentClosed);
  for (const address of Object.values(baton.addresses)) expect(await refuses(address)).toBe(true);
  // A second call waits for the same end.
  await baton.stop();
});

test('with time to settle it is not ready, serves on, and then stops accepting', async () => {
  await using started = await start({ 'drain-settle': '2s' });
  const { baton, url } = started;
  await expect.poll(async () => (await fetch(`${url}/readiness`)).status, { timeout: 10_000 }).toBe(200);
  const stream = await openStream(started, 20, 150);
  let isStopped = false;
  const stopped = baton.stop({ settle: true }).then(() => {
    isStopped = true;
  });
  const readiness = await fetch(`${url}/readiness`);
  expect([readiness.status, await readiness.json()]).toEqual([503, { status: 'stopping' }]);
  const late = await fetch(`${url}/v1/chat/completions`, { method: 'POST', body: JSON.stringify(chatBody()) });
  expect([late.status, late.headers.get('connection'), isStopped]).toEqual([200, 'close', false]);
  expect(contentOf(await late.text()).finish).toEqual([expect.any(String)]);
  expect(contentOf(await stream.rest())).toMatchObject({ done: true, errors: [] });
  await stopped;
  await expect(fetch(`${url}/readiness`)).rejects.toThrow();
});

test('a kept connection that was busy is closed after its reply', async () => {
  await using started = await start();
  const { baton, decode } = started;
  await decode.setFault({ kind: 'slow', ms: 30, leg: 'decode' });
  const socket = await open(baton.addresses.facade ?? '');
  const body = JSON.stringify(chatBody({ max_tokens: 8, ignore_eos: true }));
  socket.write(`POST /v1/chat/completions HTTP/1.1\r\nhost: baton\r\ncontent-length: ${body.length}\r\n\r\n${body}`);
  await expect.poll(() => decode.state().running).toBe(1);
  const closed = once(socket, 'close');
  const stopped = baton.stop();
  let reply = '';
  for await (const chunk of socket) reply += String(chunk);
  expect(reply).toMatch(/^HTTP\/1\.1 200 OK\r\n/);
  expect(reply).toContain('"finish_reason":"length"');
  await closed;
  await stopped;
});

test('when the drain time is over, a stream that still runs ends with an error in it', async () => {
  await using started = await start({ 'drain-timeout': '200ms' });
  const stream = await openStream(started, 5000, 20);
  await started.baton.stop();
  const rest = await stream.rest();
  expect(rest).toMatch(/data: \{"error":\{[^\n]*"code":"shutting_down"\}\}\n\ndata: \[DONE\]\n\n$/);
  await expect.poll(() => started.decode.state().running).toBe(0);
});

test('when the drain time is over, a reply that has not begun is a 503', async () => {
  await using started = await start({ 'drain-timeout': '200ms' });
  await started.decode.setFault({ kind: 'hang', leg: 'decode' });
  const body = JSON.stringify({ model: 'sim-model', prompt: 'x', max_tokens: 4 });
  const reply = fetch(`http://${started.baton.addresses.facade}/v1/completions`, { method: 'POST', body });
  await expect.poll(() => started.decode.state().requests).toBe(1);
  await started.baton.stop();
  const { status, headers } = await reply;
  expect([status, headers.get('retry-after')]).toEqual([503, '1']);
});

test('stop ends a process whose engines are away', async () => {
  await using started = await start();
  await started.decode.setFault({ kind: 'refuse' });
  await started.baton.stop();
});

const PORT_FLAGS = ['port', 'rpc-port', 'admin-port'] as const;

test.each(PORT_FLAGS)('a start that fails because of --%s leaves nothing open', async (taken) => {
  const other = createServer().listen(0, '127.0.0.1');
  await once(other, 'listening');
  const ports = new Map<string, string>();
  for (const flag of PORT_FLAGS) ports.set(flag, await freePort());
  const port = String((other.address() as AddressInfo).port);
  ports.set(taken, port);
  const config = configOf({ sim: 'true', ...Object.fromEntries(ports) });
  const failed = startQuietly(config);
  await expect(failed).rejects.toThrow(StartError);
  await expect(failed).rejects.toThrow(`port ${port} is in use (--${taken})`);
  ports.delete(taken);
  for (const free of ports.values()) expect(await refuses(`127.0.0.1:${free}`)).toBe(true);
  other.close();
});

test('simulated engines of the process end with it', async () => {
  const { baton, log } = await startQuietly(configOf({ sim: 'true', 'sim-prefill': '1', 'sim-decode': '1' }));
  const instances = log.flatMap(({ msg, instance }) => (msg === 'instance changed state' ? [String(instance)] : []));
  expect(instances).toHaveLength(2);
  await baton.stop();
  for (const address of instances) expect(await refuses(address)).toBe(true);
});

/** A port that nothing listens on at this moment. */
async function freePort(): Promise<string> {
  const server = createServer().listen(0, '127.0.0.1');
  await once(server, 'listening');
  const { port } = server.address() as AddressInfo;
  await new Promise((resolve) => server.close(resolve));
  return String(port);
}

// The drain is 180 s here: a stop that used it up would end these tests first.
test('half of a question at the admin and the RPC port does not hold the stop up', async () => {
  await using started = await start();
  const { admin = '', rpc = '' } = started.baton.addresses;
  for (const address of [admin, rpc]) (await open(address)).write('GET /metrics HTTP/1.1\r\nhost: baton\r\n');
  await started.baton.stop();
});

test('a router stops whose registry and store take everything and answer nothing', async () => {
  const sockets: Socket[] = [];
  const silent = createServer((socket) => void sockets.push(socket.on('error', () => undefined).resume()));
  await once(silent.listen(0, '127.0.0.1'), 'listening');
  const url = `http://127.0.0.1:${(silent.address() as AddressInfo).port}`;
  const { baton } = await startQuietly(configOf({ roles: 'router', 'registry-url': url, 'kvstore-url': url }));
  using client = connectRemote({ url: `http://${baton.addresses.rpc}` });
  // A watch that the router would pass on, and a view of its own that waits for its first message.
  const watch = client.poolRegistry.watchInstances({})[Symbol.asyncIterator]().next();
  const ended = watch.catch((error: unknown) => error);
  await expect.poll(() => sockets.length).toBeGreaterThan(1);
  await baton.stop();
  expect(await ended).toMatchObject({ code: Code.Unavailable });
  for (const socket of sockets) socket.destroy();
  silent.close();
});
