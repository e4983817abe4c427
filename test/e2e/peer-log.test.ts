import { createHash } from 'node:crypto';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, expect, test } from 'vitest';
import { startSimPools } from '../../src/sim/pools.ts';
import { freePort } from '../support/free-port.ts';
import { configOf, post, startQuietly } from '../support/harness.ts';
import { TLS_FOLDER } from '../support/tls.ts';
import { chatBody } from './ladder-support.ts';

const PATIENCE = { timeout: 15_000 };

type Flags = Readonly<Record<string, string | readonly string[]>>;

let stack = new AsyncDisposableStack();
afterEach(async () => {
  await stack.disposeAsync();
  stack = new AsyncDisposableStack();
});

/** Starts roles; `told` is what the log says of other processes. */
async function start(flags: Flags) {
  const { baton, log } = await startQuietly(configOf(flags, 'health: { interval: 100ms }\ntimeouts: { store: 5s }'));
  stack.defer(() => baton.stop());
  const told = () =>
    log.flatMap(({ level, msg, cause }) => {
      const what = /^the (?:router|registry|store) (?:does not answer|refuses this process|answers again)/.exec(
        `${msg}`,
      );
      return what === null ? [] : [`${level}: ${what[0]}${cause === undefined ? '' : `: ${cause}`}`];
    });
  return { ...baton.addresses, stop: () => baton.stop(), told };
}

const startRouter = (flags: Flags = {}) => start({ roles: 'kvstore,registry,router', ...flags });

const SERVER = { 'rpc-tls-cert': join(TLS_FOLDER, 'server.pem'), 'rpc-tls-key': join(TLS_FOLDER, 'server.key') };

test.each([
  ['is not there', async () => `http://127.0.0.1:${await freePort()}`, /: nothing listens there$/],
  ['is a socket that is not there', async () => 'unix:/nope', /: there is no such socket$/],
  ['is not trusted', async () => `https://${(await startRouter(SERVER)).rpc}`, /: its certificate is of an authority/],
  ['has no TLS behind https:', async () => `https://${(await startRouter()).rpc}`, /: it does not speak TLS/],
])('a router that %s: the log says so once, in words', async (_, urlOf, cause) => {
  const facade = await start({ roles: 'facade', 'router-url': await urlOf(), 'registry-url': 'http://127.0.0.1:1' });
  const ofRouter = () => facade.told().filter((line) => line.includes('the router'));
  await expect.poll(ofRouter, PATIENCE).not.toEqual([]);
  // It asks again every quarter of a second.
  await new Promise((resolve) => setTimeout(resolve, 600));
  expect(ofRouter()).toEqual([expect.stringMatching(cause)]);
  expect(ofRouter()[0]).toMatch(/^warn: the router does not answer/);
});

test('a router that goes and comes back: one line for each, of the router and of the pools it relays', async () => {
  const port = String(await freePort());
  const first = await startRouter({ 'rpc-port': port });
  const facade = await start({ roles: 'facade', 'router-url': `http://127.0.0.1:${port}` });
  const ready = async () => {
    const reply = await fetch(`http://${facade.facade}/readiness`);
    return ((await reply.json()) as { readonly status: string }).status;
  };
  await expect.poll(ready, PATIENCE).toBe('no routable engines');
  expect(facade.told()).toEqual([]);
  await first.stop();
  await expect.poll(() => facade.told().length, PATIENCE).toBe(2);
  await startRouter({ 'rpc-port': port });
  await expect.poll(() => facade.told().length, PATIENCE).toBe(4);
  const lines = facade.told().map((line) => line.split(': ').slice(0, 2).join(': '));
  expect(lines.toSorted()).toEqual([
    'info: the registry answers again',
    'info: the router answers again',
    'warn: the registry does not answer',
    'warn: the router does not answer',
  ]);
});

test('a registry that is something else, and a store that does not let a router act for all', async () => {
  const folder = mkdtempSync(join(tmpdir(), 'baton-'));
  stack.defer(() => rmSync(folder, { recursive: true }));
  const [tokens, token] = [join(folder, 'tokens'), join(folder, 'token')];
  writeFileSync(tokens, `front sha256:${createHash('sha256').update('abc').digest('hex')} operator\n`);
  writeFileSync(token, 'abc');
  const store = await start({ roles: 'kvstore', 'rpc-tokens-file': tokens });
  const url = `http://${store.rpc}`;
  const lost = await start({ roles: 'router,kvstore', 'registry-url': url, 'rpc-client-token-file': token });
  await expect
    .poll(lost.told, PATIENCE)
    .toEqual([expect.stringMatching(/^error: the registry refuses .*PoolRegistry/)]);
  const pools = stack.use(await startSimPools({ prefill: 1, decode: 1 }));
  const front = await start({
    roles: 'registry,router,facade',
    prefill: pools.prefill.map((sim) => sim.url),
    decode: pools.decode.map((sim) => sim.url),
    'kvstore-url': url,
    'rpc-client-token-file': token,
  });
  const turn = () =>
    post(`http://${front.facade}/v1/chat/completions`, chatBody(), { headers: { 'x-session-id': 'one' } });
  for (let turns = 0; turns < 3; turns++) await expect.poll(async () => (await turn()).status, PATIENCE).toBe(200);
  await expect.poll(front.told, PATIENCE).toEqual([expect.stringMatching(/^error: the store refuses .*tenant/)]);
});
