import { mkdirSync, mkdtempSync, renameSync, rmSync, symlinkSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, describe, expect, test, vi } from 'vitest';
import { loadConfigFile } from '../../src/config/load.ts';
import type { SimOptions } from '../../src/sim/options.ts';
import { startSim } from '../../src/sim/start-sim.ts';
import { checked, configOf, contentOf, loadInput, post, startQuietly } from '../support/harness.ts';
import { waitUntil } from '../support/wait.ts';

let stack = new AsyncDisposableStack();
afterEach(async () => {
  await stack.disposeAsync();
  stack = new AsyncDisposableStack();
});

/** A prefill and a decode engine, as the list of a file. */
async function engines(options: SimOptions): Promise<string> {
  const roles = ['prefill', 'decode'] as const;
  const sims = await Promise.all(roles.map((role) => startSim({ role, fixedMs: 1, ...options })));
  for (const sim of sims) stack.defer(() => sim.close());
  return `instances: [${sims.map(({ url, role }) => `{url: "${url}", role: ${role}}`).join(', ')}]\n`;
}

const bodyOf = (tokens: number, more: object = {}) =>
  JSON.stringify({
    messages: [{ role: 'user', content: 'hello' }],
    stream: true,
    max_tokens: tokens,
    ignore_eos: true,
    ...more,
  });

/** baton on a file that lies as in a ConfigMap: a link through a link that is swapped. */
async function setUp(text: string, flags: Readonly<Record<string, string>> = {}) {
  const dir = mkdtempSync(join(tmpdir(), 'baton-'));
  stack.defer(() => rmSync(dir, { recursive: true }));
  let version = 0;
  const publish = (next: string) => {
    version += 1;
    mkdirSync(join(dir, `..v${version}`));
    writeFileSync(join(dir, `..v${version}`, 'baton.yaml'), next);
    symlinkSync(`..v${version}`, join(dir, '..data_tmp'));
    renameSync(join(dir, '..data_tmp'), join(dir, '..data'));
  };
  publish(text);
  const file = join(dir, 'baton.yaml');
  symlinkSync(join('..data', 'baton.yaml'), file);
  const load = () => loadConfigFile(loadInput({ config: file, ...flags }));
  const running = checked(load());
  const { baton, log } = await startQuietly(running.config, { running, file, load });
  stack.defer(() => baton.stop());
  const admin = `http://${baton.addresses.admin}`;
  const reload = async () => {
    const reply = await fetch(`${admin}/-/reload`, { method: 'POST' });
    return { status: reply.status, body: (await reply.json()) as { readonly problems: readonly string[] } };
  };
  const metrics = async (): Promise<readonly string[]> =>
    (await (await fetch(`${admin}/metrics`)).text()).match(/^baton_.*$/gm) ?? [];
  const told = (message: string) => log.filter(({ msg }) => String(msg).includes(message));
  const { facade, rpc } = baton.addresses;
  return {
    url: `http://${facade}`,
    admin,
    rpc,
    publish,
    remove: () => rmSync(join(dir, '..data')),
    reload,
    metrics,
    told,
    file,
  };
}

const NONE = 'instances: []\n';
const ENGINE = 'instances: [{url: "http://127.0.0.1:1", role: both}]\n';

test('a file that is swapped is read again; an empty list of instances is told loudly', async () => {
  const { publish, told, metrics } = await setUp(ENGINE);
  publish('instances: []\nadmin: {port: 1}\nstore: {backend: memory, max_bytes: 2GiB}\n');
  await waitUntil(() => told('needs a restart').length > 0);
  expect(told('are in force')).toMatchObject([{ cause: 'file', keys: ['instances'] }]);
  expect(told('name no instances any more')).toMatchObject([{ level: 'warn', instances: 1 }]);
  // The port is a flag's, which goes before the file.
  expect(told('needs a restart')).toMatchObject([{ level: 'warn', msg: 'needs a restart: store.max_bytes' }]);
  expect(await metrics()).toContain('baton_config_reloads_total{result="applied"} 1');
});

test('a file with mistakes, an empty one and none at all change nothing', async () => {
  const { publish, remove, reload, metrics, told, file } = await setUp(NONE);
  publish(`${NONE}queue: {maxx: 1}\npolicy: fastest\n`);
  const refused = await reload();
  expect(refused).toMatchObject({ status: 500, body: { problems: [expect.any(String), expect.any(String)] } });
  expect(refused.body.problems[0]).toBe(`${file}:2:9: queue.maxx: unknown key; did you mean queue.max?`);
  expect(refused.body.problems[1]).toContain(`${file}:3:1: policy: expected one of round_robin, `);
  expect(await metrics()).toEqual(
    expect.arrayContaining([
      // The watch of the file may have seen it too.
      expect.stringMatching(/^baton_config_reloads_total\{result="refused"\} [12]$/),
      'baton_config_last_reload_successful 0',
      expect.stringMatching(/^baton_config_last_reload_success_timestamp_seconds 1\d{9}/),
    ]),
  );
  publish('');
  expect((await reload()).body).toEqual({ problems: [`${file}: the file is empty`] });
  remove();
  expect((await reload()).body).toEqual({ problems: [`--config: ${file} does not exist`] });
  publish(NONE);
  expect(await reload()).toEqual({ status: 200, body: { applied: [], needs_restart: [], left_out: [] } });
  expect(await metrics()).toContain('baton_config_last_reload_successful 1');
  expect(told('are in force')).toEqual([]);
});

test('a request keeps the times with which it began; one that waits is placed by the limits of now', async () => {
  const sims = await engines({ decodeMsPerToken: 100 });
  const { publish, reload, url, metrics } = await setUp(`${sims}limits: {requests: 1}\n`);
  await waitUntil(async () => (await fetch(`${url}/readiness`)).status === 200);
  const stop = new AbortController();
  // The status is there with the first content.
  await fetch(`${url}/v1/chat/completions`, { method: 'POST', body: bodyOf(100), signal: stop.signal });
  const waiting = post(`${url}/v1/chat/completions`, bodyOf(4));
  await waitUntil(async () => (await metrics()).includes('baton_queue_depth 1'));
  publish(`${sims}timeouts: {idle: 30ms}\n`);
  const { body } = await reload();
  expect(body).toEqual({ applied: ['timeouts.idle', 'limits.requests'], needs_restart: [], left_out: [] });
  expect(contentOf((await waiting).text)).toMatchObject({ finish: ['length'], errors: [], done: true });
  // It had not to wait for the end of the first.
  expect(await metrics()).toContain('baton_requests_in_flight{api="chat.completions"} 1');
  const late = await post(`${url}/v1/chat/completions`, bodyOf(4));
  expect(contentOf(late.text).errors).toMatchObject([{ code: 'engine_timeout' }]);
  stop.abort();
});

test('each process of a split setup reads its own file', async () => {
  const sims = await engines({});
  const router = await setUp(sims, { roles: 'kvstore,registry,router' });
  const facade = await setUp('log: {level: info}\n', { roles: 'facade', 'router-url': `http://${router.rpc}` });
  await waitUntil(async () => (await fetch(`${facade.url}/readiness`)).status === 200);
  const ask = () =>
    post(`${facade.url}/v1/chat/completions`, bodyOf(2, { kv_transfer_params: {} }), {
      headers: { 'x-baton-debug': '1' },
    });
  expect((await ask()).status).toBe(400);
  facade.publish('facade: {client_kv_transfer_params: drop}\n');
  await facade.reload();
  expect((await ask()).headers.get('x-baton-plan')).toMatch(/^mode=prefill_decode;/);
  router.publish(`${sims}disagg: {min_uncached_tokens: 100000}\n`);
  await router.reload();
  expect((await ask()).headers.get('x-baton-plan')).toMatch(/^mode=decode_local;/);
});

// The executable gets the settings of tests in a file.
test.skipIf(process.env['BATON_BIN'] !== undefined)(
  'without a file a reload says that there is nothing to read',
  async () => {
    const { baton, log } = await startQuietly(configOf({}, NONE));
    stack.defer(() => baton.stop());
    baton.reload('SIGHUP');
    const told = { level: 'warn', cause: 'SIGHUP', msg: expect.stringContaining('no file of settings') };
    await vi.waitFor(() => expect(log.at(-1)).toMatchObject(told));
    const reply = await fetch(`http://${baton.addresses.admin}/-/reload`, { method: 'POST' });
    expect([reply.status, await reply.json()]).toEqual([409, { problems: [log.at(-1)?.['msg']] }]);
  },
);

describe('the only decode engine', () => {
  const isServed = async (url: string) => (await post(`${url}/v1/chat/completions`, bodyOf(2))).status === 200;
  const isReady = (url: string) => async () => (await fetch(`${url}/readiness`)).status === 200;
  /** baton has a pair in service, and this is its decode engine. */
  const servesAs = (url: string, admin: string, id: string) => async () => {
    const worker = await (await fetch(`${admin}/workers/${id}`)).text();
    return worker.includes('"is_healthy":true') && (await isServed(url)) && (await isReady(url)());
  };

  test('serves under its new name when the pool file renames it', async () => {
    const list = await engines({});
    const dir = mkdtempSync(join(tmpdir(), 'baton-'));
    stack.defer(() => rmSync(dir, { recursive: true }));
    const pools = join(dir, 'pools.yaml');
    writeFileSync(pools, list);
    const { baton, log } = await startQuietly(configOf({ 'pool-file': pools }));
    stack.defer(() => baton.stop());
    const [url, admin] = [`http://${baton.addresses.facade}`, `http://${baton.addresses.admin}`];
    await waitUntil(isReady(url));
    writeFileSync(pools, list.replace('role: decode', 'role: decode, name: d1'));
    await waitUntil(servesAs(url, admin, 'd1'));
    expect(log.filter(({ msg }) => String(msg).includes('left out'))).toEqual([]);
  });

  test('serves after a reload that renames it, and one that moves it from the settings to a pool file', async () => {
    const list = await engines({});
    const { publish, reload, url, admin, told } = await setUp(list);
    await waitUntil(isReady(url));
    publish(list.replace('role: decode', 'role: decode, name: d1'));
    // The look at the file may have been faster.
    expect((await reload()).body).toMatchObject({ needs_restart: [], left_out: [] });
    await waitUntil(servesAs(url, admin, 'd1'));
    const dir = mkdtempSync(join(tmpdir(), 'baton-'));
    stack.defer(() => rmSync(dir, { recursive: true }));
    const pools = join(dir, 'pools.yaml');
    writeFileSync(pools, list.replace('role: decode', 'role: decode, name: d2'));
    const followed = `discovery: {file: "${pools}"}\n`;
    // As long as the settings name it too, the file's name for it waits, and each reload says so.
    publish(`${list.replace('role: decode', 'role: decode, name: d1')}${followed}`);
    const waits = { instance: 'd2', source: 'file', why: 'its URL is that of d1; it waits until that has it no more' };
    const { body } = await reload();
    expect(body).toMatchObject({ left_out: [expect.anything(), waits] });
    expect((await reload()).body).toMatchObject({ applied: [], left_out: [expect.anything(), waits] });
    // Another process's log comes on a way of its own.
    await waitUntil(() => told('left out of the pool').length >= 2);
    publish(`instances: []\n${followed}`);
    expect((await reload()).body).toMatchObject({ left_out: [] });
    await waitUntil(servesAs(url, admin, 'd2'));
  });
});
