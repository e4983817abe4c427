import { describe, expect, test } from 'vitest';
import { describeKeys } from '../../src/config/describe-keys.ts';
import { type Loaded, loadConfig } from '../../src/config/load-config.ts';
import { planReload } from '../../src/config/reload.ts';
import { derive, follow, Settings } from '../../src/config/settings.ts';
import { configOf } from '../support/harness.ts';
import { OTHER } from '../support/live-keys.ts';

const KNOWN = { policies: ['round_robin', 'least_loaded'], connectors: ['nixl', 'lmcache'], stores: ['memory'] };

function load(fileText: string, flags: Readonly<Record<string, string>> = {}): Loaded {
  const loaded = loadConfig({ flags, env: { BATON_QUEUE_TIMEOUT: '7s' }, fileText, known: KNOWN, terminal: false });
  if (loaded.kind === 'error') throw new Error(JSON.stringify(loaded.problems));
  return loaded;
}

function plan(before: string, after: string, flags: Readonly<Record<string, string>> = {}) {
  const planned = planReload(load(before, flags), load(after, flags));
  if (planned.kind === 'error') throw new Error(JSON.stringify(planned.problems));
  return planned;
}

describe('a reload', () => {
  test('tells keys whose value is another one, and no others', () => {
    const before = 'timeouts: {idle: 60s}\npolicy: round_robin\n';
    expect(plan(before, 'policy: {prefill: round_robin}\ntimeouts:\n  idle: 1m\n')).toMatchObject({
      applied: [],
      restart: [],
    });
    const changed = plan(before, 'policy: {decode: least-loaded}\nqueue: {max: 5}\n');
    expect(changed).toMatchObject({ applied: ['policy.decode', 'timeouts.idle', 'queue.max'], restart: [] });
    expect(changed.loaded.config).toMatchObject({ policy: { decode: 'least_loaded' }, queue: { max: 5 } });
  });

  test('leaves keys that need a restart as they were, also over the next reload', () => {
    const before = 'rpc: {port: 1001}\nroles: [registry]\n';
    const after = 'rpc: {port: 1002, socket: /s}\nlimits: {decode: 3}\n';
    const first = plan(before, after);
    expect(first).toMatchObject({ applied: ['limits.decode'], restart: ['roles', 'rpc.port', 'rpc.socket'] });
    const { config } = first.loaded;
    expect(config).toMatchObject({ roles: ['registry'], rpc: { port: 1001 }, limits: { decode: 3 } });
    expect(config.rpc.socket).toBeUndefined();
    expect(planReload(first.loaded, load(after))).toMatchObject({ applied: [], restart: first.restart });
    expect(planReload(first.loaded, load(`${before}limits: {decode: 3}`))).toMatchObject({ applied: [], restart: [] });
  });

  test('does not touch what flags and variables say', () => {
    const flags = { 'rpc-port': '1003', 'drain-timeout': '9s' };
    const same = plan('timeouts: {drain: 1s, queue: 1s}', 'timeouts: {drain: 2s, queue: 2s}\nrpc: {port: 5}', flags);
    expect(same).toMatchObject({ applied: [], restart: [] });
    expect(same.loaded.config).toMatchObject({ timeouts: { drainMs: 9000, queueMs: 7000 }, rpc: { port: 1003 } });
  });

  test('takes instances as a whole, and gives the example engines only to a file that names no others', () => {
    const one = 'instances: [{url: "http://p:1", role: both}]\n';
    const two = `${one}pools: {both: {weight: 2}}\n`;
    expect(plan(one, 'instances: []').loaded.config.instances).toEqual([]);
    expect(plan(one, two)).toMatchObject({ applied: ['pools.both.weight'] });
    expect(plan(one, two).loaded.config.instances[0]).toMatchObject({ weight: 2 });
    expect(plan('', one)).toMatchObject({ applied: ['instances'] });
    expect(plan('discovery: {file: a}', 'discovery: {file: b}').loaded.config).toMatchObject({
      instances: [],
      discovery: { file: 'b' },
    });
  });

  test('is refused as a whole where keys contradict those that wait for a restart', () => {
    const first = '{url: "http://d:1", role: decode, lmcache: {init_ports: 8300, alloc_ports: 8401}}';
    const before = `kv_connector: lmcache\ninstances: [${first}]\n`;
    const after = `${before.replace(']', ', {url: "http://d:2", role: decode}]')}lmcache: {decoder_init_ports: 11}\n`;
    const planned = planReload(load(before), load(after));
    expect(planned.kind === 'error' && planned.problems[0]?.message).toMatch(
      /^decoders d:1 and d:2 would both take KV at d:8300.* \(as long as lmcache\.decoder_init_ports wait for a restart\)$/,
    );
  });
});

test('the proof of live keys has another value for each of them (test/support/live-keys.ts)', () => {
  const live = describeKeys().flatMap((key) => (key.live ? [key.path] : []));
  expect(Object.keys(OTHER).toSorted()).toEqual(live.toSorted());
});

test('settings are read when they are used, and what is made of them is made anew when they have changed', () => {
  const settings = new Settings(configOf({}, 'queue: {max: 1}'));
  const queue = follow(() => settings.current.queue);
  const made: number[] = [];
  const idle = derive(
    settings,
    ({ timeouts }) => timeouts.idleMs,
    (ms) => {
      made.push(ms);
      return ms;
    },
  );
  const heard: number[] = [];
  const stop = settings.onChange(() => heard.push(queue.max));
  expect([queue.max, idle()]).toEqual([1, 300_000]);
  settings.replace(configOf({}, 'queue: {max: 2}'));
  expect([queue.max, idle()]).toEqual([2, 300_000]);
  settings.replace(configOf({}, 'queue: {max: 3}\ntimeouts: {idle: 1s}'));
  expect([idle(), made, heard]).toEqual([1000, [300_000, 1000], [2, 3]]);
  stop();
  settings.replace(configOf({}));
  expect(heard).toEqual([2, 3]);
});
