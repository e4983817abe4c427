import { describe, expect, test } from 'vitest';
import type { RawFlags } from '../../src/config/flag-layers.ts';
import { loadConfig } from '../../src/config/load-config.ts';
import { formatProblem } from '../../src/config/problem.ts';

function load(flags: RawFlags, fileText?: string) {
  const known = { policies: ['round_robin'], connectors: ['nixl', 'lmcache'], stores: ['memory', 'valkey'] };
  const text = fileText === undefined ? {} : { fileText };
  return loadConfig({ flags: { 'kv-connector': 'lmcache', ...flags }, env: {}, known, terminal: false, ...text });
}

/** Receivers as `host:init/alloc/query`, or what is wrong. */
function receivers(flags: RawFlags, fileText?: string): unknown {
  const loaded = load(flags, fileText);
  if (loaded.kind === 'error') return loaded.problems.map(formatProblem);
  return Object.fromEntries(
    Object.entries(loaded.config.lmcache.receivers).map(([id, { host, initPorts, allocPorts, queryPorts }]) => [
      id,
      `${host}:${initPorts}/${allocPorts}/${queryPorts}`,
    ]),
  );
}

describe('receivers', () => {
  test("the example's command line", () => {
    const flags = {
      'decoder-host': ['localhost'],
      'decoder-port': ['7200'],
      'num-decoders': '2',
      'decoder-init-port': ['7300'],
      'decoder-alloc-port': ['7400'],
    };
    expect(receivers(flags)).toEqual({
      'localhost:7200': 'localhost:7300/7400/',
      'localhost:7201': 'localhost:7301/7401/',
    });
  });

  test('several ranks: the ports of two decoders of one host never meet', () => {
    const flags = { 'decoder-init-port': ['7300,7301'], 'decoder-alloc-port': ['7400,7401'] };
    const both = {
      'localhost:7200': 'localhost:7300,7301/7400,7401/',
      'localhost:7201': 'localhost:7302,7303/7402,7403/',
    };
    expect(receivers({ ...flags, 'decoder-port': ['7200'], 'num-decoders': '2' })).toEqual(both);
    expect(receivers({ ...flags, 'decoder-host': ['localhost'], 'decoder-port': ['7200,7201'] })).toEqual(both);
    const gaps = { 'decoder-init-port': ['7300,7304'], 'decoder-alloc-port': ['7400,7401'] };
    expect(receivers({ ...gaps, 'decoder-port': ['7200'], 'num-decoders': '2' })).toEqual({
      'localhost:7200': 'localhost:7300,7304/7400,7401/',
      'localhost:7201': 'localhost:7305,7309/7405,7406/',
    });
  });

  test('several hosts use the same numbers', () => {
    expect(receivers({ 'decoder-host': ['a,b'], 'decoder-port': ['7200'], 'decoder-query-port': ['8500'] })).toEqual({
      'a:7200': 'a:8300/8400/8500',
      'b:7200': 'b:8300/8400/8500',
    });
  });

  test('a decoder of the file may have its own', () => {
    const fileText = `
kv_connector: lmcache
lmcache: { notices: 1 }
instances:
  - { url: "http://10.0.0.1:8100", role: prefill, lmcache: { notices: 4 } }
  - { url: "http://10.0.0.3:8200", role: decode }
  - { url: "http://10.0.0.3:8201", role: decode, lmcache: { receiver_host: kv.d2, init_ports: [1, 2], alloc_ports: [3, 4] } }
  - { url: "http://[fd00::3]:8200", role: decode }
`;
    expect(receivers({}, fileText)).toEqual({
      '10.0.0.3:8200': '10.0.0.3:8300/8400/',
      '10.0.0.3:8201': 'kv.d2:1,2/3,4/',
      '[fd00::3]:8200': 'fd00::3:8300/8400/',
    });
    const loaded = load({}, fileText);
    expect(loaded.kind === 'ok' && loaded.config.lmcache).toMatchObject({
      notices: { '10.0.0.1:8100': 4 },
      defaultNotices: 1,
    });
  });

  test('lists that do not fit are refused', () => {
    expect(receivers({ 'decoder-init-port': ['7300,7301'] })).toEqual([
      'give as many init, alloc and query ports, one per rank',
    ]);
    expect(receivers({ 'decoder-init-port': ['7300'], 'decoder-alloc-port': ['7301'], 'num-decoders': '2' })).toEqual([
      '--decoder-init-port: decoders localhost:8200 and localhost:8201 would both take KV at localhost:7301; ' +
        'give each its ports (instances[].lmcache)',
    ]);
    expect(receivers({ 'decoder-init-port': ['65535'], 'num-decoders': '2' })).toEqual([
      '--decoder-init-port: the ports of decoder localhost:8201 go beyond 65535',
    ]);
    const half = 'instances: [{ url: "http://d:1", role: decode, lmcache: { init_ports: [1, 2] } }]';
    expect(receivers({}, half)).toEqual(['decoder d:1 needs as many init, alloc and query ports, one per rank']);
  });
});

describe('notices for several replicas', () => {
  const lmcacheOf = (text: string, flags: RawFlags = {}) => {
    const loaded = load(flags, `lmcache: { ${text} }`);
    return loaded.kind === 'ok' ? loaded.config.lmcache : loaded.problems.map(formatProblem);
  };

  test('one publishes, the others have its address; neither by default', () => {
    const publish = lmcacheOf('notice_publish: "tcp://0.0.0.0:8501"');
    expect(publish).toMatchObject({ noticePublish: { host: '0.0.0.0', port: 8501 } });
    expect(lmcacheOf('notice_hub: "tcp://[::1]:8501"')).toMatchObject({ noticeHub: { host: '::1', port: 8501 } });
    expect(Object.keys(lmcacheOf('chunk_size: 256')).filter((key) => /Publish|Hub/.test(key))).toEqual([]);
  });

  test('mistakes', () => {
    for (const address of ['10.0.0.1:8501', 'tcp://10.0.0.1', 'tcp://a:0', 'tcp://*:8501', 'ipc:///x:1', '8501']) {
      expect(lmcacheOf(`notice_hub: "${address}"`), address).toEqual([
        expect.stringContaining('lmcache.notice_hub: expected an address like "tcp://10.0.0.1:8501"'),
      ]);
    }
    expect(lmcacheOf('notice_hub: "tcp://a:1", notice_publish: "tcp://b:1"')).toEqual([
      expect.stringContaining('leave one of the two keys out'),
    ]);
    expect(lmcacheOf('notice_hub: "tcp://a:1"', { sim: 'true' })).toEqual([
      expect.stringContaining('leave the key out'),
    ]);
  });
});
