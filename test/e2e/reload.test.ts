import { mkdirSync, mkdtempSync, renameSync, rmSync, symlinkSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, expect, test, vi } from 'vitest';
import { loadConfigFile } from '../../src/config/load.ts';
import { startSim } from '../../src/sim/start-sim.ts';
import { checked, configOf, contentOf, loadInput, startQuietly } from '../support/harness.ts';
import { waitUntil } from '../support/wait.ts';

let stack = new AsyncDisposableStack();
afterEach(async () => {
  await stack.disposeAsync();
  stack = new AsyncDisposableStack();
});

/** baton on a file that lies as in a ConfigMap: a link through a link that is swapped. */
async function setUp(text: string) {
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
  const load = () => loadConfigFile(loadInput({ config: file }));
  const running = checked(load());
  const { baton, log } = await startQuietly(running.config, { running, file, load });
  stack.defer(() => baton.stop());
  const admin = `http://${baton.addresses.admin}`;
  const reload = async () => {
    const reply = await fetch(`${admin}/-/reload`, { method: 'POST' });
    return { status: reply.status, body: (await reply.json()) as { readonly problems: readonly string[] } };
  };
  const metrics = async () => (await (await fetch(`${admin}/metrics`)).text()).match(/^baton_config_.*$/gm) ?? [];
  const told = (message: string) => log.filter(({ msg }) => String(msg).includes(message));
  return {
    url: `http://${baton.addresses.facade}`,
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
  expect(await reload()).toEqual({ status: 200, body: { applied: [], needs_restart: [] } });
  expect(await metrics()).toContain('baton_config_last_reload_successful 1');
  expect(told('are in force')).toEqual([]);
});

test('a request that runs keeps the times with which it began', async () => {
  const sims = await Promise.all(
    (['prefill', 'decode'] as const).map((role) => startSim({ role, fixedMs: 1, decodeMsPerToken: 200 })),
  );
  for (const sim of sims) stack.defer(() => sim.close());
  const list = `instances: [${sims.map(({ url, role }) => `{url: "${url}", role: ${role}}`).join(', ')}]\n`;
  const { publish, reload, url } = await setUp(list);
  await waitUntil(async () => (await fetch(`${url}/readiness`)).status === 200);
  const ask = () => {
    const body = { messages: [{ role: 'user', content: 'hello' }], stream: true, max_tokens: 4, ignore_eos: true };
    return fetch(`${url}/v1/chat/completions`, { method: 'POST', body: JSON.stringify(body) });
  };
  // Its status is there with its first content.
  const running = await ask();
  publish(`${list}timeouts: {idle: 50ms}\n`);
  expect((await reload()).body).toEqual({ applied: ['timeouts.idle'], needs_restart: [] });
  expect(contentOf(await running.text())).toMatchObject({ finish: ['length'], errors: [], done: true });
  expect(contentOf(await (await ask()).text()).errors).toMatchObject([{ code: 'engine_timeout' }]);
});

test('without a file a reload says that there is nothing to read', async () => {
  const { baton, log } = await startQuietly(configOf({}, NONE));
  stack.defer(() => baton.stop());
  baton.reload('SIGHUP');
  const told = { level: 'warn', cause: 'SIGHUP', msg: expect.stringContaining('no file of settings') };
  await vi.waitFor(() => expect(log.at(-1)).toMatchObject(told));
  const reply = await fetch(`http://${baton.addresses.admin}/-/reload`, { method: 'POST' });
  expect([reply.status, await reply.json()]).toEqual([409, { problems: [log.at(-1)?.['msg']] }]);
});
