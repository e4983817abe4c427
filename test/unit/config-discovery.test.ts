import { describe, expect, test } from 'vitest';
import { loadConfig } from '../../src/config/load-config.ts';
import { readPoolFile } from '../../src/config/pool-file.ts';
import { formatProblem } from '../../src/config/problem.ts';

const KNOWN = { policies: ['round_robin'], connectors: ['nixl', 'lmcache'], stores: ['memory'] };

function load(flags: Readonly<Record<string, string | readonly string[]>>, fileText = '') {
  const loaded = loadConfig({ flags, env: {}, known: KNOWN, terminal: false, fileText });
  if (loaded.kind === 'error') throw new Error(loaded.problems.map(formatProblem).join('\n'));
  return loaded;
}

const DEFAULTS = load({}, 'pools: { decode: { api_key: pool-key, labels: { pool: d } } }').config.instanceDefaults;
const read = (text: string) => readPoolFile(text, 'pools.yaml', { defaults: DEFAULTS, connectors: KNOWN.connectors });

describe('a pool file', () => {
  test('names instances as baton.yaml does, with the defaults of their pool', () => {
    const file = read(
      'instances:\n' +
        '  - { url: "http://10.0.0.1:8100", role: prefill, name: p1 }\n' +
        '  - { url: "http://10.0.0.2:8200/d", role: decode, labels: { zone: a }, connector: LMCacheConnectorV1 }\n',
    );
    expect(file).toMatchObject({
      kind: 'ok',
      problems: [],
      instances: [
        { id: 'p1', url: 'http://10.0.0.1:8100', role: 'prefill', connector: 'nixl', labels: {} },
        {
          id: '10.0.0.2:8200/d',
          role: 'decode',
          connector: 'lmcache',
          apiKey: 'pool-key',
          labels: { pool: 'd', zone: 'a' },
        },
      ],
    });
  });

  test('may be JSON, and may name none', () => {
    expect(read('{"instances": [{"url": "http://a:1", "role": "both"}]}')).toMatchObject({
      kind: 'ok',
      instances: [{ id: 'a:1', role: 'both' }],
    });
    expect(read('instances: []')).toEqual({ kind: 'ok', instances: [], problems: [] });
  });

  test('with bad entries gives the rest, and the line of each mistake', () => {
    const file = read(
      [
        'instances:',
        '  - { url: "http://a:1", role: prefill }',
        '  - url: "not a url"',
        '    role: prefill',
        '  - { url: "http://a:3", role: cook }',
        '  - { url: "http://a:4" }',
        '  - { url: "http://a:1", role: decode }',
        '  - { url: "http://a:5", role: decode, conector: nixl }',
        '  - { url: "http://a:6", role: decode, connector: pigeon }',
        '  - nonsense',
        '  - { url: "http://a:7", role: decode }',
        'pools: {}',
      ].join('\n'),
    );
    expect(file.kind === 'ok' ? file.instances.map(({ id }) => id) : file).toEqual(['a:1', 'a:7']);
    expect(file.problems.map(({ where }) => where)).toEqual([
      'pools.yaml:12:1',
      'pools.yaml:3:5',
      'pools.yaml:5:26',
      'pools.yaml:6:5',
      'pools.yaml:8:40',
      'pools.yaml:10:5',
      'pools.yaml:7:5',
      'pools.yaml:9:40',
    ]);
    expect(file.problems.map(formatProblem)[4]).toBe(
      'pools.yaml:8:40: instances[5].conector: unknown key; did you mean instances[5].connector?',
    );
  });

  test.each([
    ['nothing', ''],
    ['a list without its name', '- { url: "http://a:1", role: both }'],
    ['a name without its list', 'instances:\n'],
    ['another thing', 'instances: 5'],
    ['broken YAML', 'instances: [{ url: "http://a:1"'],
    ['nothing but mistakes', 'instances: [{ url: x, role: both }]'],
  ])('with %s in it cannot be used, and says where', (_, text) => {
    const file = read(text);
    expect(file.kind).toBe('error');
    expect(file.problems[0]?.where).toMatch(/^pools\.yaml/);
  });
});

describe('discovery in the settings', () => {
  test('takes the place of the example engines', () => {
    expect(load({}).config.instances).toHaveLength(2);
    for (const loaded of [
      load({ 'pool-file': 'pools.yaml' }),
      load({ 'prefill-dns': ['p.svc:8100'], 'decode-dns': ['d.svc:8200'] }),
      load({}, 'discovery: { file: pools.yaml }'),
    ]) {
      expect([loaded.config.instances, loaded.warnings]).toEqual([[], []]);
    }
    expect(load({ 'pool-file': 'p.yaml', prefill: ['http://a:1'] }).config.instances.map(({ id }) => id)).toEqual([
      'a:1',
    ]);
  });

  test('reads DNS names of both kinds', () => {
    const flags = { 'prefill-dns': ['P.svc:8100', 'https://p.svc:8443/x'], 'decode-dns': ['_vllm._tcp.d.svc'] };
    expect(load(flags, 'discovery: { dns: { both: "b:80", interval: 3s } }').config.discovery).toEqual({
      dns: {
        prefill: [
          { kind: 'address', name: 'p.svc', scheme: 'http', port: 8100, prefix: '' },
          { kind: 'address', name: 'p.svc', scheme: 'https', port: 8443, prefix: '/x' },
        ],
        decode: [{ kind: 'srv', name: '_vllm._tcp.d.svc', scheme: 'http', prefix: '' }],
        both: [{ kind: 'address', name: 'b', scheme: 'http', port: 80, prefix: '' }],
      },
      dnsIntervalMs: 3000,
    });
  });

  test('says which settings nobody looks at', () => {
    const flags = { roles: 'router', 'registry-url': 'http://r:1', 'kvstore-url': 'http://k:1' };
    const { warnings } = load(
      { ...flags, 'pool-file': 'p.yaml', 'registry-state': 's' },
      'discovery:\n  kubernetes:\n    selector: app=x\n',
    );
    expect(warnings.map(({ where }) => where).sort()).toEqual(['--pool-file', '--registry-state', 'baton.yaml:3:5']);
    expect(() => load({ 'kubernetes-namespace': 'x' })).toThrow(/--kubernetes-namespace: .*--kubernetes-selector/);
  });

  test.each(['p.svc', 'http://', '_vllm._tcp.d.svc:80', 'p.svc:0', 'user@p.svc:80'])('refuses %j', (name) => {
    expect(() => load({ 'prefill-dns': [name] })).toThrow(/--prefill-dns: /);
  });
});
