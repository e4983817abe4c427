import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, expect, test } from 'vitest';
import { Document } from 'yaml';
import { describeKeys } from '../../src/config/describe-keys.ts';
import { loadConfig } from '../../src/config/load-config.ts';
import type { SimOptions } from '../../src/sim/options.ts';
import { type Sim, startSim } from '../../src/sim/start-sim.ts';
import { freePort } from '../support/free-port.ts';
import { checked, loadInput, post, startQuietly } from '../support/harness.ts';
import { FakeKubeApi } from '../support/kube-api.ts';
import { OTHER } from '../support/live-keys.ts';
import { waitUntil } from '../support/wait.ts';

let stack = new AsyncDisposableStack();
afterEach(async () => {
  await stack.disposeAsync();
  stack = new AsyncDisposableStack();
});

/** Of these the other value is only looked up: with it there would be nothing to send a request to. */
const ONLY_LOOKED_UP = /^instances\[\]\.(url|role|connector|lmcache\..*)$|^pools\.\w+\.connector$/;
/** What is made of these keys is elsewhere: what an instance has of its own for lmcache is in the receivers. */
const ONLY_INPUT = /^instances\[\]\.lmcache/;

/** The same, with the values of `OTHER` that `wants` picks, over what engines there are. */
function yamlOf(base: object, wants: (path: string) => boolean): string {
  const document = new Document(base);
  for (const [path, value] of Object.entries(OTHER)) {
    if (wants(path)) document.setIn(path.replace('[]', '.0').split('.'), value);
  }
  return document.toString();
}

function read(yaml: string) {
  const input = loadInput({});
  // It would go before the file.
  const { 'reuse-min-saved-tokens': _flag, ...flags } = input.flags;
  return checked(loadConfig({ ...input, flags, fileText: yaml, fileName: 'baton.yaml' }));
}

/** The members of the settings that have no members, by path. */
function leavesOf(value: unknown, path: readonly string[] = []): Map<string, unknown> {
  if (typeof value !== 'object' || value === null) return new Map([[path.join(' '), value]]);
  return new Map(Object.entries(value).flatMap(([key, inner]) => [...leavesOf(inner, [...path, key])]));
}

/** A path with each number of a list as `[]`, and each id as `*`. */
const nameOf = (path: string) =>
  path
    .replaceAll(/ \d+(?= |$)/g, '[]')
    .replace(/^(lmcache (?:receivers|notices)|tenant ownLimits) [^ ]+/, '$1 *')
    .replaceAll(' ', '.');

/** The settings, with a note of each of their members that somebody reads, unless to compare settings with settings. */
function noted<T extends object>(value: T, seen: Set<string>, path: readonly string[] = []): T {
  return new Proxy(value, {
    get(target, key): unknown {
      const inner: unknown = Reflect.get(target, key);
      if (typeof key === 'symbol' || !Object.hasOwn(target, key) || key === 'length') return inner;
      const at = [...path, key];
      if (new Error().stack?.includes('util/comparisons') !== true) seen.add(nameOf(at.join(' ')));
      return typeof inner === 'object' && inner !== null ? noted(inner, seen, at) : inner;
    },
  });
}

async function engine(role: 'prefill' | 'decode', options: SimOptions = {}): Promise<Sim> {
  const sim = await startSim({ bidirectional: true, dataParallel: 2, ...options, role });
  stack.defer(() => sim.close());
  return sim;
}

/** baton whose settings are changed once while it runs, to ones that note what is read of them. */
async function setUp(before: string) {
  const folder = mkdtempSync(join(tmpdir(), 'baton-'));
  stack.defer(() => rmSync(folder, { recursive: true }));
  const file = join(folder, 'baton.yaml');
  writeFileSync(file, before);
  const seen = new Set<string>();
  let after = before;
  const load = () => {
    const loaded = read(after);
    return { ...loaded, config: noted(loaded.config, seen) };
  };
  const running = read(before);
  const { baton, log } = await startQuietly(running.config, { running, file, load });
  stack.defer(() => baton.stop());
  const url = `http://${baton.addresses.facade}`;
  await waitUntil(async () => (await fetch(`${url}/readiness`)).status === 200);
  const change = (yaml: string) => {
    after = yaml;
    seen.clear();
    baton.reload('request');
    expect(log.filter(({ level }) => level === 'error')).toEqual([]);
  };
  const ask = (more: object = {}, headers: Readonly<Record<string, string>> = {}) =>
    post(`${url}/v1/chat/completions`, { ...CHAT, ...more }, { headers });
  return { baton, log, folder, seen, change, ask };
}

const CHAT = { messages: [{ role: 'user', content: 'tell me '.repeat(40) }], max_tokens: 4, ignore_eos: true };

const LIVE = describeKeys().flatMap(({ path, live }) => (live ? [path] : []));

test('every live key is read when it is used, after the settings have changed', { timeout: 60_000 }, async () => {
  const all = new Set<string>();
  const [p, p2, d, d2] = await Promise.all([engine('prefill'), engine('prefill'), engine('decode'), engine('decode')]);
  const instances = [p, p2, d, d2].map(({ url, role }) => ({ url, role }));
  const tenant = { own_limits: [{ name: 'team-b' }] };
  const nixl = await setUp(yamlOf({ instances, tenant }, () => false));
  const api = stack.use(await FakeKubeApi.start('engines'));
  const files = { kubeconfig: join(nixl.folder, 'kubeconfig'), pool: join(nixl.folder, 'pool.yaml') };
  writeFileSync(files.kubeconfig, api.kubeconfig);
  writeFileSync(files.pool, 'instances: [{url: "http://127.0.0.1:9004", role: both}]\n');
  api.put('p', { labels: { app: 'llm', part: 'prefill' }, addresses: ['127.0.0.1'] });
  const changed = yamlOf({ instances, tenant }, (path) => !ONLY_LOOKED_UP.test(path))
    .replace('kubeconfig: kubeconfig', `kubeconfig: ${files.kubeconfig}`)
    .replace('file: pool.yaml', `file: ${files.pool}`);
  nixl.change(changed);
  // A conversation that reuses KV, more requests than may run, and an engine that fails and then is gone.
  for (const turn of [1, 2]) {
    const messages = [...CHAT.messages, ...(turn === 1 ? [] : [{ role: 'assistant', content: 'x' }, ...CHAT.messages])];
    const reply = await nixl.ask({ messages }, { 'x-other-id': 'c' });
    expect(reply.status, reply.text).toBe(200);
  }
  const crowd = await Promise.all([nixl.ask({ stream: true }), nixl.ask(), nixl.ask()]);
  expect(crowd.map(({ status }) => status)).toEqual([200, 200, 200]);
  for (const sim of [d, d2]) await sim.setFault({ kind: 'status', status: 500 });
  expect((await nixl.ask()).status).toBeGreaterThanOrEqual(500);
  await waitUntil(() => api.openWatches > 0);
  await waitUntil(() => nixl.seen.has('discovery.kubernetes.scheme') && nixl.seen.has('instanceDefaults.both.weight'));
  await d2.crash();
  await waitUntil(() => nixl.seen.has('health.failures'));
  for (const name of nixl.seen) all.add(name);
  for (const policy of ['consistent_hash', 'sticky_least_loaded']) {
    nixl.change(changed.replace('prefill: cache_aware', `prefill: ${policy}`));
    await nixl.ask({}, { 'x-other-id': 'c' });
    for (const name of nixl.seen) all.add(name);
  }
  nixl.seen.clear();
  await nixl.baton.stop({ settle: true });
  for (const name of nixl.seen) all.add(name);

  const port = await freePort();
  const own = { connector: 'lmcache', noticeEndpoint: `tcp://127.0.0.1:${port}`, dataParallel: 1 } as const;
  const [lp, ld] = await Promise.all([engine('prefill', own), engine('decode', own)]);
  const { init, alloc } = ld.receiverPorts;
  const base = {
    kv_connector: 'lmcache',
    lmcache: { proxy_host: '127.0.0.1', proxy_port: port },
    instances: [
      { url: ld.url, role: 'decode', lmcache: { init_ports: init, alloc_ports: alloc } },
      { url: lp.url, role: 'prefill', lmcache: { notices: 1 } },
    ],
  };
  const lmcache = await setUp(yamlOf(base, () => false));
  lmcache.change(yamlOf(base, (path) => path.startsWith('timeouts') || /lmcache\.(query_ports|notices)$/.test(path)));
  await lmcache.ask();
  for (const name of lmcache.seen) all.add(name);

  const unread = LIVE.flatMap((path) => {
    const from = path.includes('lmcache')
      ? base
      : { instances, tenant, discovery: { kubernetes: { selector: 'app=other' } } };
    const [before, after] = [
      leavesOf(read(yamlOf(from, () => false)).config),
      leavesOf(read(yamlOf(from, (one) => one === path)).config),
    ];
    const leaves = [...after].flatMap(([at, value]) => (before.get(at) === value ? [] : [nameOf(at)]));
    if (leaves.length === 0) return [`${path} changes nothing`];
    return leaves
      .filter((leaf) => !all.has(leaf) && !ONLY_INPUT.test(leaf))
      .map((leaf) => `${path}: ${leaf} is not read`);
  });
  expect(unread).toEqual([]);
});
