import { afterEach, expect, test } from 'vitest';
import type { Running } from '../../src/roles.ts';
import { type SimPools, startSimPools } from '../../src/sim/pools.ts';
import { type Sim, startSim } from '../../src/sim/start-sim.ts';
import { configOf, contentOf, post, startQuietly } from '../support/harness.ts';
import { chatBody, engine, errorOf, legsOf, metricOf } from './ladder-support.ts';

let stack = new AsyncDisposableStack();
afterEach(async () => {
  await stack.disposeAsync();
  stack = new AsyncDisposableStack();
});

interface Split {
  readonly pools: SimPools;
  readonly plain: Sim;
  readonly url: string;
  /** The process with the router and the registry: ends it, and starts it again on the same port. */
  readonly stopRouter: () => Promise<void>;
  readonly startRouter: () => Promise<void>;
  readonly stopFacade: () => Promise<void>;
  /** Value of a series of that process. */
  readonly metric: (series: string) => Promise<number>;
}

interface StartOptions {
  readonly prefill?: number;
  readonly decode?: number;
  /** Of the facade. */
  readonly timeouts?: string;
}

/** The front door in one process and the services in another, as far as one test process can have two. */
async function start(options: StartOptions = {}): Promise<Split> {
  const pools = stack.use(
    await startSimPools({
      prefill: options.prefill ?? 2,
      decode: options.decode ?? 2,
      engine: { recordRequests: true },
    }),
  );
  const plain = await startSim({ role: 'both', connector: 'none' });
  stack.defer(() => plain.close());
  let router: Running | undefined;
  let port = '0';
  const startRouter = async () => {
    const config = configOf({
      roles: 'router,registry,kvstore',
      prefill: pools.prefill.map(({ url }) => url),
      decode: pools.decode.map(({ url }) => url),
      'rpc-port': port,
    });
    router = (await startQuietly(config)).baton;
    port = router.addresses.rpc?.split(':').at(-1) ?? '';
  };
  const stopRouter = async () => {
    await router?.stop();
    router = undefined;
  };
  await startRouter();
  stack.defer(stopRouter);
  const config = configOf(
    { roles: 'facade', 'router-url': `http://127.0.0.1:${port}`, 'rpc-port': 'off', 'admin-port': 'off' },
    `timeouts: { ${options.timeouts ?? 'queue: 400ms, router: 300ms'} }`,
  );
  const { baton } = await startQuietly(config);
  stack.defer(() => baton.stop());
  const url = `http://${baton.addresses.facade}`;
  await untilReady(url, true);
  const metric = (series: string) => metricOf({ adminUrl: `http://${router?.addresses.admin}` }, series);
  return { pools, plain, url, stopRouter, startRouter, stopFacade: () => baton.stop(), metric };
}

async function untilReady(url: string, ready: boolean): Promise<void> {
  const status = async () => (await fetch(`${url}/readiness`)).status;
  await expect.poll(status, { timeout: 10_000 }).toBe(ready ? 200 : 503);
}

const chat = (url: string, body: unknown) => post(`${url}/v1/chat/completions`, body);

test.each([false, true])('chat goes through both engines, stream %s', async (stream) => {
  const { pools, plain, url, metric } = await start();
  const body = chatBody({ stream });
  const reply = await chat(url, body);
  expect(reply.status, reply.text).toBe(200);
  const { texts, finish, done } = contentOf(reply.text);
  expect({ texts, finish, done }).toMatchObject(
    (({ texts: right, finish: ends, done: ended }) => ({ texts: right, finish: ends, done: ended }))(
      contentOf((await chat(plain.url, body)).text),
    ),
  );
  expect(await metric('baton_rpc_duration_seconds_count{method="PlanRoute",outcome="ok"}')).toBe(1);
  const [prefill, decode] = [pools.prefill.flatMap(legsOf), pools.decode.flatMap(legsOf)];
  expect(prefill.map(({ params }) => params?.['do_remote_decode'])).toEqual([true]);
  expect(decode.map(({ params }) => params?.['do_remote_prefill'])).toEqual([true]);
});

test('the router’s refusals arrive in the envelope', async () => {
  const { url } = await start();
  const reply = await chat(url, chatBody({ model: 'nobody' }));
  expect(reply.status).toBe(404);
  expect(errorOf(reply)).toMatchObject({ code: 'model_not_found', param: 'model' });
});

test('models and health are read from the watch', async () => {
  const { url } = await start();
  const models = (await (await fetch(`${url}/v1/models`)).json()) as {
    readonly data: readonly { readonly id: string }[];
  };
  expect(models.data.map(({ id }) => id)).toEqual(['sim-model']);
  expect(await (await fetch(`${url}/health`)).json()).toMatchObject({ ready: true, instances: { ready: 4 } });
});

test('the router goes and comes back', async () => {
  const { url, stopRouter, startRouter } = await start();
  await stopRouter();
  const reply = await chat(url, chatBody({ stream: true }));
  expect(reply.status).toBe(503);
  expect(errorOf(reply)).toMatchObject({ type: 'service_unavailable_error', code: 'router_unavailable' });
  // The last view stays: the engines have not gone because nobody watches them.
  expect(await (await fetch(`${url}/health`)).json()).toMatchObject({ ready: false, instances: { ready: 4 } });
  const readiness = await fetch(`${url}/readiness`);
  expect([readiness.status, await readiness.json()]).toEqual([503, { status: 'the router is away' }]);
  await startRouter();
  await expect.poll(async () => (await chat(url, chatBody())).status, { timeout: 10_000 }).toBe(200);
  await untilReady(url, true);
});

test('an engine that goes is seen through the watch, and so is its return', async () => {
  const { pools, url } = await start({ decode: 1 });
  await engine(pools.decode).setFault({ kind: 'refuse' });
  // The request finds out before the next probe does, and tells the router.
  expect((await chat(url, chatBody())).status).toBe(503);
  await untilReady(url, false);
  const reply = await chat(url, chatBody());
  expect(reply.status).toBe(503);
  expect(Number(reply.headers.get('retry-after'))).toBeGreaterThan(0);
  expect(errorOf(reply).code).toBe('no_routable_pair');
  await engine(pools.decode).clearFaults();
  await untilReady(url, true);
  expect((await chat(url, chatBody())).status).toBe(200);
});

test('a client that leaves while the router lets it wait: the next one is served', async () => {
  const { pools, url } = await start({ decode: 1 });
  await engine(pools.decode).setFault({ kind: 'refuse' });
  await chat(url, chatBody());
  await untilReady(url, false);
  const client = new AbortController();
  const asked = fetch(`${url}/v1/chat/completions`, {
    method: 'POST',
    body: JSON.stringify(chatBody()),
    signal: client.signal,
  });
  client.abort();
  await expect(asked).rejects.toThrow();
  await engine(pools.decode).clearFaults();
  await untilReady(url, true);
  expect((await chat(url, chatBody())).status).toBe(200);
});

test('a request that waits for an engine does not hold a router up, and is served by the next one', async () => {
  // The wait is longer than this test may take.
  const { pools, url, stopRouter, startRouter, metric } = await start({
    decode: 1,
    timeouts: 'queue: 60s, router: 60s',
  });
  await engine(pools.decode).setFault({ kind: 'refuse' });
  await chat(url, chatBody());
  await untilReady(url, false);
  const waiting = chat(url, chatBody());
  await expect.poll(() => metric('baton_queue_depth'), { timeout: 10_000 }).toBe(1);
  await stopRouter();
  await startRouter();
  await engine(pools.decode).clearFaults();
  expect((await waiting).status).toBe(200);
});

test('a facade that stops keeps its router until the last request is served', async () => {
  // The wait is longer than this test may take.
  const { pools, url, stopFacade, metric } = await start({ decode: 1, timeouts: 'queue: 60s, router: 60s' });
  await engine(pools.decode).setFault({ kind: 'refuse' });
  await chat(url, chatBody());
  await untilReady(url, false);
  const waiting = chat(url, chatBody());
  await expect.poll(() => metric('baton_queue_depth'), { timeout: 10_000 }).toBe(1);
  const stopped = stopFacade();
  await expect.poll(() => fetch(`${url}/readiness`).catch(() => 'closed'), { timeout: 10_000 }).toBe('closed');
  await engine(pools.decode).clearFaults();
  expect((await waiting).status).toBe(200);
  await stopped;
  // A planning that is asked for anew finds what the first one has taken.
  const waited = (outcome: string) => metric(`baton_queue_wait_seconds_count{outcome="${outcome}"}`);
  expect([await waited('client_gone'), await waited('routed')]).toEqual([0, 1]);
});

/** What a store in another process has found must not depend on how busy the machine is. */
const PATIENT = 'timeouts: { store: 10s }';

test('each role in a process of its own: the facade sees the pools through its router', async () => {
  await using pools = await startSimPools({ prefill: 1, decode: 1, engine: { bidirectional: true, eosEvery: 0 } });
  await using stack = new AsyncDisposableStack();
  const start = async (flags: Readonly<Record<string, string | readonly string[]>>) => {
    const { baton } = await startQuietly(configOf(flags, PATIENT));
    stack.defer(() => baton.stop());
    return baton.addresses;
  };
  const urls = (sims: readonly { readonly url: string }[]) => sims.map(({ url }) => url);
  const store = await start({ roles: 'kvstore' });
  const registry = await start({ roles: 'registry', prefill: urls(pools.prefill), decode: urls(pools.decode) });
  const router = await start({
    roles: 'router',
    'kvstore-url': `http://${store.rpc}`,
    'registry-url': `http://${registry.rpc}`,
  });
  const facade = await start({ roles: 'facade', 'router-url': `http://${router.rpc}` });
  expect(facade.rpc).toBeUndefined();
  const url = `http://${facade.facade}`;
  await untilReady(url, true);
  expect(await (await fetch(`${url}/v1/models`)).json()).toMatchObject({ data: [{ id: 'sim-model' }] });
  const messages = [{ role: 'user', content: 'a turn of some length '.repeat(8) }];
  const ask = async () => {
    const body = JSON.stringify({ model: 'sim-model', messages, max_tokens: 20, conversation_id: 'split' });
    const reply = await fetch(`${url}/v1/chat/completions`, {
      method: 'POST',
      body,
      headers: { 'x-baton-debug': '1' },
    });
    expect(reply.status).toBe(200);
    const { choices } = (await reply.json()) as { choices: [{ message: { content: string } }] };
    return { text: choices[0].message.content, plan: reply.headers.get('x-baton-plan') };
  };
  const first = await ask();
  messages.push({ role: 'assistant', content: first.text }, { role: 'user', content: 'and then?' });
  expect((await ask()).plan).toMatch(/outcome=hit;/);
});

test('a store of its own: two facades give the handles back that nobody can use any more', async () => {
  // One carrier for two queues.
  await using pools = await startSimPools({ prefill: 1, decode: 2, engine: { bidirectional: true, eosEvery: 0 } });
  await using running = new AsyncDisposableStack();
  const start = async (flags: Readonly<Record<string, string | readonly string[]>>, yaml?: string) => {
    const { baton } = await startQuietly(configOf(flags, yaml));
    running.defer(() => baton.stop());
    return baton.addresses;
  };
  const store = await start({ roles: 'kvstore' });
  const router = await start(
    {
      roles: 'router,registry',
      'kvstore-url': `http://${store.rpc}`,
      prefill: pools.prefill.map(({ url }) => url),
      decode: pools.decode.map(({ url }) => url),
    },
    `pools: { prefill: { bidirectional: on }, decode: { bidirectional: on } }\n${PATIENT}`,
  );
  const elsewhere = { 'router-url': `http://${router.rpc}`, 'kvstore-url': `http://${store.rpc}` };
  const facades = [await start({ roles: 'facade', ...elsewhere }), await start({ roles: 'facade', ...elsewhere })];
  for (const { facade } of facades) await untilReady(`http://${facade}`, true);
  const pins = () => pools.decode.map((sim) => sim.state().pins);
  const ask = async (conversation: string, about: string) => {
    const messages = [{ role: 'user', content: `${about} ${'and so on '.repeat(20)}` }];
    const body = { model: 'sim-model', messages, max_tokens: 20, conversation_id: conversation };
    const headers = { 'x-baton-debug': '1' };
    return post(`http://${facades[0]?.facade}/v1/chat/completions`, body, { headers });
  };
  const talks = ['one', 'two'];
  for (const talk of talks) await ask(talk, 'first');
  await expect.poll(pins, { timeout: 10_000 }).toEqual([1, 1]);
  // Another text under the same name: what is stored is compared, and no turn can use it.
  for (const talk of talks) {
    const reply = await ask(talk, 'something else');
    expect(reply.headers.get('x-baton-plan')).toMatch(/outcome=miss_mismatch;/);
  }
  const total = async (result: string) => {
    const series = `baton_releases_total{result="${result}"}`;
    const counts = await Promise.all(facades.map(({ admin }) => metricOf({ adminUrl: `http://${admin}` }, series)));
    return counts.reduce((sum, count) => sum + count, 0);
  };
  await expect.poll(() => total('sent'), { timeout: 20_000 }).toBe(2);
  // What is left is of the last turns, and could be read for minutes.
  expect(pins().reduce((sum, count) => sum + count, 0)).toBe(2);
  expect([await total('failed'), await total('unusable')]).toEqual([0, 0]);
  for (const sim of [...pools.prefill, ...pools.decode]) {
    const { doubleReads, expiredReads, mismatchedPulls, hung } = sim.state();
    expect({ doubleReads, expiredReads, mismatchedPulls, hung }).toEqual({
      doubleReads: 0,
      expiredReads: 0,
      mismatchedPulls: 0,
      hung: 0,
    });
  }
});

test('a router and a registry apart: what is found out of who reads is enough to give handles back', async () => {
  await using pools = await startSimPools({ prefill: 1, decode: 1, engine: { bidirectional: true, eosEvery: 0 } });
  await using running = new AsyncDisposableStack();
  const start = async (flags: Readonly<Record<string, string | readonly string[]>>) => {
    const { baton } = await startQuietly(configOf(flags, PATIENT));
    running.defer(() => baton.stop());
    return baton.addresses;
  };
  const store = await start({ roles: 'kvstore' });
  const registry = await start({
    roles: 'registry',
    prefill: pools.prefill.map(({ url }) => url),
    decode: pools.decode.map(({ url }) => url),
  });
  const stored = { 'kvstore-url': `http://${store.rpc}` };
  const router = await start({ roles: 'router', 'registry-url': `http://${registry.rpc}`, ...stored });
  const { facade, admin } = await start({ roles: 'facade', 'router-url': `http://${router.rpc}`, ...stored });
  await untilReady(`http://${facade}`, true);
  const ask = async (conversation: string, messages: readonly object[]) => {
    const body = { model: 'sim-model', messages, max_tokens: 20, conversation_id: conversation };
    const headers = { 'x-baton-debug': '1' };
    const reply = await post(`http://${facade}/v1/chat/completions`, body, { headers });
    const [content = ''] = contentOf(reply.text).texts;
    return { content, plan: reply.headers.get('x-baton-plan') };
  };
  const user = (about: string) => ({ role: 'user', content: `${about} ${'and so on '.repeat(20)}` });
  const first = await ask('read', [user('read')]);
  const second = await ask('read', [user('read'), { role: 'assistant', content: first.content }, user('more')]);
  expect(second.plan).toMatch(/outcome=hit;/);
  await ask('lost', [user('first')]);
  expect((await ask('lost', [user('something else')])).plan).toMatch(/outcome=miss_mismatch;/);
  const sent = () => metricOf({ adminUrl: `http://${admin}` }, 'baton_releases_total{result="sent"}');
  await expect.poll(sent, { timeout: 20_000 }).toBeGreaterThan(0);
  const { doubleReads, mismatchedPulls, hung } = pools.prefill[0]!.state();
  expect({ doubleReads, mismatchedPulls, hung }).toEqual({ doubleReads: 0, mismatchedPulls: 0, hung: 0 });
});
