import { afterEach, expect, test } from 'vitest';
import { startSimPools } from '../../src/sim/pools.ts';
import { configOf, post, startQuietly } from '../support/harness.ts';
import { startSwitchboard } from '../support/switchboard.ts';
import { chatBody, engine, errorOf, legsOf } from './ladder-support.ts';

let stack = new AsyncDisposableStack();
afterEach(async () => {
  await stack.disposeAsync();
  stack = new AsyncDisposableStack();
});

const FAST = 'health: { interval: 100ms, timeout: 1s, failures: 1, damping: 0 }';

/** Registry, router and facade apart from each other, with addresses in between that a test can part or stop. */
async function start(yaml = '', facadeFlags: Readonly<Record<string, string>> = {}) {
  const pools = stack.use(await startSimPools({ prefill: 1, decode: 2, engine: { recordRequests: true } }));
  const role = async (flags: Readonly<Record<string, string | readonly string[]>>, own = '') => {
    const { baton } = await startQuietly(configOf(flags, `${FAST}\n${own}`));
    stack.defer(() => baton.stop());
    return baton.addresses;
  };
  const urls = (sims: readonly { readonly url: string }[]) => sims.map(({ url }) => url);
  const registry = await role({ roles: 'registry', prefill: urls(pools.prefill), decode: urls(pools.decode) });
  const toRegistry = stack.use(await startSwitchboard([registry.rpc ?? '']));
  const registryUrl = `http://${toRegistry.address}`;
  const router = await role({ roles: 'router,kvstore', 'registry-url': registryUrl });
  const toRouter = stack.use(await startSwitchboard([router.rpc ?? '']));
  const routerUrl = `http://${toRouter.address}`;
  const facade = await role(
    { roles: 'facade', 'router-url': routerUrl, 'registry-url': registryUrl, ...facadeFlags },
    yaml,
  );
  const url = `http://${facade.facade}`;
  const readiness = async () => {
    const reply = await fetch(`${url}/readiness`);
    const { status } = (await reply.json()) as { readonly status: string };
    return `${reply.status} ${status}`;
  };
  const turns = (expected: string) => expect.poll(readiness, { timeout: 15_000 }).toBe(expected);
  await turns('200 ok');
  return { pools, url, turns, toRegistry, toRouter };
}

const chat = (url: string) => post(`${url}/v1/chat/completions`, chatBody());

test('a facade is not ready while its router does not answer, wherever it sees the engines', async () => {
  const { url, turns, toRouter } = await start('timeouts: { router: 500ms }');
  // As a stopped process: the connections stay, and nothing comes back.
  toRouter.delayMs = Number.POSITIVE_INFINITY;
  const begin = performance.now();
  const reply = await chat(url);
  const tookMs = performance.now() - begin;
  expect([reply.status, errorOf(reply).code]).toEqual([503, 'router_unavailable']);
  expect(Number(reply.headers.get('retry-after'))).toBeGreaterThan(0);
  // The connection itself is given up after 25 s.
  expect(tookMs).toBeLessThan(15_000);
  await turns('503 the router is away');
  toRouter.delayMs = 0;
  await turns('200 ok');
  expect((await chat(url)).status).toBe(200);
  const targets = toRouter.targets;
  toRouter.targets = [];
  toRouter.cut();
  await turns('503 the router is away');
  const refused = await chat(url);
  expect([refused.status, errorOf(refused).code]).toEqual([503, 'router_unavailable']);
  expect(Number(refused.headers.get('retry-after'))).toBeGreaterThan(0);
  toRouter.targets = targets;
  await turns('200 ok');
});

test('without the registry the engines are looked at from here: no pair is left, and one is again', async () => {
  const { pools, url, turns, toRegistry } = await start('timeouts: { queue: 300ms }');
  const targets = toRegistry.targets;
  toRegistry.targets = [];
  toRegistry.cut();
  for (const sim of pools.decode) await sim.setFault({ kind: 'refuse' });
  // Nobody asks: the engines' state is found out all the same.
  await turns('503 no routable engines');
  await engine(pools.decode, 1).clearFaults();
  await turns('200 ok');
  // The router looks for itself, too, and may be a little later than the facade.
  await expect.poll(async () => (await chat(url)).status, { timeout: 10_000 }).toBe(200);
  await engine(pools.decode, 1).setFault({ kind: 'refuse' });
  await turns('503 no routable engines');
  toRegistry.targets = targets;
  await engine(pools.decode, 0).clearFaults();
  await turns('200 ok');
});

test('keys do not cross the registry: a facade has those of its own settings, by instance, else by pool', async () => {
  const { pools, url } = await start(
    'pools: { prefill: { api_key: key-of-p, headers: { x-of: p } }, decode: { api_key: key-of-d } }',
  );
  expect((await chat(url)).status).toBe(200);
  const [prefill] = engine(pools.prefill).requests.filter(({ path }) => path.includes('completions'));
  expect(prefill?.headers).toMatchObject({ authorization: 'Bearer key-of-p', 'x-of': 'p' });
  const seen = () =>
    pools.decode.flatMap((sim) =>
      sim.requests.filter(({ path }) => path.includes('completions')).map((r) => r.headers),
    );
  expect(seen().map(({ authorization }) => authorization)).toEqual(['Bearer key-of-d']);
  expect(legsOf(engine(pools.prefill))).toHaveLength(1);
});
