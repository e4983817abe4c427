import { readFileSync } from 'node:fs';
import { describe, expect, test } from 'vitest';
import type { Config } from '../../src/config/config.ts';
import { type LoadInput, loadConfig } from '../../src/config/load-config.ts';
import { formatProblem } from '../../src/config/problem.ts';

const KNOWN = {
  policies: ['round_robin', 'least_loaded'],
  connectors: ['nixl', 'nixl-push', 'lmcache', 'none'],
  stores: ['memory', 'valkey'],
};

function load(input: Partial<LoadInput> = {}) {
  return loadConfig({ flags: {}, env: {}, known: KNOWN, terminal: false, ...input });
}

function good(input: Partial<LoadInput> = {}): Config {
  const loaded = load(input);
  if (loaded.kind === 'error') throw new Error(loaded.problems.map(formatProblem).join('\n'));
  return loaded.config;
}

function problems(input: Partial<LoadInput>): readonly string[] {
  const loaded = load(input);
  return loaded.kind === 'error' ? loaded.problems.map(formatProblem) : [];
}

function warnings(input: Partial<LoadInput>): readonly string[] {
  const loaded = load(input);
  return loaded.kind === 'ok' ? loaded.warnings.map(formatProblem) : [];
}

function fixture(name: string): string {
  return readFileSync(new URL(`../fixtures/config/${name}`, import.meta.url), 'utf8');
}

describe('defaults', () => {
  test('nothing given: the whole of the settings, in front of the example engines', () => {
    const loaded = load();
    expect(loaded).toMatchObject({ kind: 'ok', warnings: [] });
    expect(good()).toEqual({
      roles: ['kvstore', 'registry', 'router', 'facade'],
      facade: {
        host: '0.0.0.0',
        port: 8000,
        bodyLimitBytes: 67_108_864,
        clientKvTransferParams: 'refuse',
        holdBytes: 65_536,
        streamBufferBytes: 262_144,
        metrics: false,
        maxConnections: 20_000,
        headerBytes: 32_768,
        headerCount: 200,
        headerMs: 30_000,
      },
      auth: {},
      rpc: { host: '127.0.0.1', port: 50_051, insecure: false, maxConnections: 4096 },
      rpcClient: {},
      admin: { host: '127.0.0.1', port: 29_000, insecure: false, maxConnections: 1024 },
      store: { backend: 'memory', maxBytes: 1024 ** 3, tenantEntries: 100_000, tenantBytes: 256 * 1024 ** 2 },
      kvConnector: 'nixl',
      policy: { prefill: 'round_robin', decode: 'round_robin' },
      policies: {
        consistentHash: { loadFactor: 1.25 },
        cacheAware: {
          cacheThreshold: 0.3,
          balanceAbsThreshold: 64,
          balanceRelThreshold: 1.5,
          maxBytes: 64 * 1024 ** 2,
          maxAgeMs: 600_000,
        },
        stickyLeastLoaded: { maxLegs: 8, sessions: 100_000 },
      },
      instances: [
        { ...engine('prefill'), id: 'localhost:8100', url: 'http://localhost:8100' },
        { ...engine('decode'), id: 'localhost:8200', url: 'http://localhost:8200' },
      ],
      engineAuth: 'auto',
      kv: { remoteHost: 'auto', leaseMarginMs: 10_000, forwardTokenIds: true },
      reuse: {
        guard: 'exact',
        unsafe: false,
        autolink: true,
        pinWatermark: 0.6,
        decodeStream: 'as_client',
        minSavedTokens: 64,
      },
      disagg: { minUncachedTokens: 0, localTailTokens: 0 },
      identity: { headers: ['x-session-id', 'session-id'], clientBound: false },
      timeouts: {
        connectMs: 3000,
        storeMs: 20,
        tokenizeMs: 500,
        prefillWarmMs: 60_000,
        prefillWarmPerTokenMs: 10,
        prefillColdMs: 1_800_000,
        firstContentMs: 600_000,
        wholeReplyMs: 1_800_000,
        idleMs: 300_000,
        clientStallMs: 60_000,
        queueMs: 30_000,
        routerMs: 10_000,
        drainMs: 180_000,
        drainSettleMs: 5000,
        keepAliveMs: 4000,
      },
      queue: { max: 1024, tenantMax: 0 },
      limits: { requests: 0, prefill: 0, decode: 0 },
      retry: { budgetPercent: 20 },
      breaker: { failures: 5, pairFailures: 3, openMs: 5000 },
      health: { intervalMs: 5000, timeoutMs: 2000, failures: 3, dampingMs: 2000, slowStartMs: 10_000 },
      log: { level: 'info', format: 'json' },
      instanceDefaults: { prefill: POOL, decode: POOL, both: POOL },
      discovery: { dns: { prefill: [], decode: [], both: [] }, dnsIntervalMs: 10_000 },
      registry: {},
      tenant: {
        trustedProxies: [],
        limits: { requestsPerMinute: 0, tokensPerMinute: 0, concurrency: 0 },
        ownLimits: {},
      },
      tracing: { sampleRatio: 1, serviceName: 'baton' },
      lmcache: {
        proxyHost: 'localhost',
        proxyPort: 8500,
        receivers: {},
        notices: {},
        noticeTimeoutMs: 15_000,
        bufferBytes: 2 ** 31,
        chunkTokens: 256,
        kvBytesPerToken: 131_072,
        uncarried: 'refuse',
      },
    } satisfies Config);
  });

  test('log lines are pretty on a terminal unless told otherwise', () => {
    expect(good({ terminal: true }).log.format).toBe('pretty');
    expect(good({ terminal: true, flags: { 'log-format': 'json' } }).log.format).toBe('json');
  });

  test.each(['', '# only a comment\n', 'timeouts:\n  # connect: 3s\n', '---\n'])(
    'an empty file changes nothing: %j',
    (fileText) => {
      expect(good({ fileText })).toEqual(good());
    },
  );
});

const POOL = {
  connector: 'nixl',
  headers: {},
  labels: {},
  kvLeaseMs: 30_000,
  decoderTtlMs: 480_000,
  bidirectional: 'auto' as const,
  loadFailurePolicy: 'fail' as const,
};

function engine(role: 'prefill' | 'decode') {
  return { ...POOL, role };
}

describe('the file', () => {
  test('every key arrives', () => {
    const config = good({ fileText: fixture('full.yaml'), env: { OPENAI_API_KEY: 'sk-1' } });
    expect(config).toMatchObject({
      roles: ['kvstore', 'registry', 'router', 'facade'],
      facade: {
        host: '127.0.0.1',
        port: 9000,
        bodyLimitBytes: 8_388_608,
        clientKvTransferParams: 'drop',
        holdBytes: 1024,
        streamBufferBytes: 2048,
        metrics: true,
      },
      rpc: { port: 'off' },
      kvConnector: 'nixl',
      policy: { prefill: 'round_robin', decode: 'round_robin' },
      policies: {
        consistentHash: { loadFactor: 1.1 },
        cacheAware: {
          cacheThreshold: 0.5,
          balanceAbsThreshold: 32,
          balanceRelThreshold: 1.1,
          maxBytes: 1024 ** 2,
          maxAgeMs: 60_000,
        },
        stickyLeastLoaded: { maxLegs: 4, sessions: 500 },
      },
      engineAuth: 'strip',
      openaiApiKey: 'sk-1',
      kv: { remoteHost: 'keep', leaseMarginMs: 5000, forwardTokenIds: true },
      reuse: {
        guard: 'history',
        unsafe: true,
        autolink: false,
        pinWatermark: 0.25,
        decodeStream: 'convert',
        minSavedTokens: 200,
      },
      disagg: { minUncachedTokens: 32, localTailTokens: 16 },
      identity: { headers: ['x-conversation'], clientBound: true },
      timeouts: { connectMs: 1000, prefillWarmPerTokenMs: 2, idleMs: 0, storeMs: 20 },
      queue: { max: 5, tenantMax: 2 },
      limits: { requests: 90, prefill: 8, decode: 32 },
      retry: { budgetPercent: 50 },
      breaker: { failures: 7, pairFailures: 0, openMs: 9000 },
      health: { intervalMs: 1000, timeoutMs: 300, failures: 2, dampingMs: 0, slowStartMs: 3000 },
      log: { level: 'warn', format: 'json' },
    });
    expect(config.instances).toEqual([
      {
        ...engine('prefill'),
        id: 'big-prefill',
        url: 'http://10.0.0.1:8100',
        labels: { zone: 'a', gpus: '8' },
        headers: { 'x-pool': 'p' },
        kvLeaseMs: 60_000,
        bidirectional: 'on',
        weight: 2.5,
        dataParallelSize: 4,
      },
      {
        ...engine('decode'),
        id: '10.0.0.2:443/decode',
        url: 'https://10.0.0.2/decode',
        apiKey: 'own-key',
        headers: { 'x-team': 'two', 'x-pool': 'd' },
        loadFailurePolicy: 'recompute',
        decoderTtlMs: 600_000,
        weight: 0.5,
      },
    ]);
  });

  test('each mistake has its line, its path and what to write', () => {
    expect(problems({ fileText: fixture('broken.yaml') })).toEqual([
      'baton.yaml:2:3: facade.prot: unknown key; did you mean facade.port?',
      'baton.yaml:3:3: facade.port: expected a port from 0 to 65535 (0 takes any free port) or "off", got 70000',
      'baton.yaml:5:3: timeouts.connect: expected a duration like "3s", "500ms" or 0 for off, got "3 seconds"',
      'baton.yaml:6:3: timeouts.conect: unknown key; did you mean timeouts.connect?',
      'baton.yaml:8:5: instances[0].url: "10.0.0.1:8100" has no scheme; write "http://10.0.0.1:8100"',
      'baton.yaml:9:5: instances[0].role: expected one of prefill, decode, both, got "prefil"; did you mean prefill?',
      'baton.yaml:10:5: instances[1].url: expected a URL like "http://10.0.0.1:8100", got nothing',
      'baton.yaml:11:1: rpc: expected a section with host, port, insecure, socket ..., got 50051',
      'baton.yaml:12:1: port: unknown key; did you mean facade.port?',
    ]);
  });

  test('a text that is no YAML, or no mapping, says where', () => {
    expect(problems({ fileText: 'a: [1, 2\n', fileName: 'x.yaml' })[0]).toMatch(/^x\.yaml:\d+:\d+: /);
    expect(problems({ fileText: 'facade: {}\nfacade: {}\n' })[0]).toMatch(/^baton\.yaml:2:1: /);
    expect(problems({ fileText: '- a\n' })).toEqual([
      'baton.yaml:1:1: expected keys with values, like "policy: round_robin"',
    ]);
    expect(problems({ fileText: 'just text' })).toHaveLength(1);
    expect(problems({ fileText: 'queue: *nowhere\n' })).toHaveLength(1);
    expect(problems({ fileText: 'instances: http://x:1\n' })).toEqual([
      'baton.yaml:1:1: instances: expected a list, got "http://x:1"',
    ]);
    expect(problems({ fileText: 'instances: [http://x:1]\n' })[0]).toContain(
      'instances[0]: expected a section with url, role',
    );
  });

  test.each([
    ['a: 1\n---\nb: 2\n', '2:1: a second document begins here ("---"); a file is one document'],
    ['facade: {}\nfacade: {}\n', '2:1: this key stands here a second time; leave one of the two out'],
    ['facade:\n\tport: 1\n', '2:1: a tab; indent with spaces'],
    ['policy: *none\n', '1:9: *none: no anchor &none stands before it'],
    ['policy: a: b\n', '1:9: a second ": " on one line; begin a new line, or put the text into quotes'],
    ['policy: "a\n', '2:1: something is missing: a closing quote or bracket, a comma, or the ": " behind a key'],
    ['policy: @a\n', '1:9: a text cannot begin with this character; put it into quotes'],
  ])('%j is told in our words', (fileText, message) => {
    expect(problems({ fileText })).toContain(`baton.yaml:${message}`);
  });

  test('all mistakes are found in one run, and none is told that only follows from another', () => {
    const fileText = [
      'policy: {prefil: round_robin, decode: nope}',
      'health: {intervall: 3s}',
      'instances:',
      '  - {url: "http://a:1", role: prefil}',
      '  - {url: "http://b:1", role: decode, connector: zz}',
      '  - {url: "http://b:1", role: decode}',
      'store: {backend: disk}',
      'rpc: {tls: {cert: 1, key: k}}',
      'engine_auth: replace',
    ].join('\n');
    expect(problems({ fileText }).map((line) => line.replace(/(: expected one of).*/, '$1'))).toEqual([
      'baton.yaml:1:10: policy.prefil: unknown key; did you mean policy.prefill?',
      'baton.yaml:1:31: policy.decode: expected one of',
      'baton.yaml:2:10: health.intervall: unknown key; did you mean health.interval?',
      'baton.yaml:4:25: instances[0].role: expected one of',
      'baton.yaml:5:39: instances[1].connector: expected one of',
      'baton.yaml:6:5: http://b:1 is named twice, here and at baton.yaml:5:5; one server that does both has role both',
      'baton.yaml:7:9: store.backend: expected one of',
      'baton.yaml:8:13: rpc.tls.cert: expected a text, got 1',
    ]);
    expect(problems({ fileText: 'policy: fastest\n' })).toEqual([
      'baton.yaml:1:1: policy: expected one of round_robin, least_loaded, got "fastest"',
    ]);
  });

  test('a variable that clients use does not keep a service from running here; a flag does', () => {
    const url = 'http://127.0.0.1:50051';
    const env = { BATON_REGISTRY_URL: url, BATON_ROUTER_URL: url, BATON_KVSTORE_URL: url };
    const config = good({ env });
    expect([config.registryUrl, config.routerUrl, config.kvstoreUrl]).toEqual([undefined, undefined, undefined]);
    expect(warnings({ env })).toContain('BATON_REGISTRY_URL: ignored, because registry runs in this process (--roles)');
    expect(good({ env, flags: { roles: 'facade' } }).routerUrl).toBe(url);
    expect(problems({ flags: { 'registry-url': url } })[0]).toMatch(/^--registry-url: is for a registry in another/);
  });

  test('an empty list of instances means none', () => {
    expect(good({ fileText: 'instances: []\n' }).instances).toEqual([]);
    expect(warnings({ fileText: 'instances: []\n' })).toEqual([
      'no prefill engine is configured (--prefill URL); requests for it wait in the queue and then fail',
      'no decode engine is configured (--decode URL); requests for it wait in the queue and then fail',
    ]);
  });

  test('keys and headers in it are not shown when they are wrong', () => {
    const fileText =
      'instances:\n  - {url: "http://x:1", role: both, api_key: "my secret", headers: {x-key: "se\\ncret"}}\n';
    expect(problems({ fileText })).toHaveLength(2);
    expect(problems({ fileText }).join()).not.toMatch(/my secret|se\\?ncret/);
  });
});

describe('precedence', () => {
  const fileText = 'rpc: {port: 1001}\nadmin: {port: 1001}\nfacade: {port: 1001, host: 127.0.0.9}\n';

  test('flags before variables before the file before defaults', () => {
    const config = good({ fileText, env: { BATON_RPC_PORT: '1002', BATON_PORT: '1003' }, flags: { port: '1004' } });
    expect([config.facade.port, config.rpc.port, config.admin.port]).toEqual([1004, 1002, 1001]);
    expect(config.facade.host).toBe('127.0.0.9');
  });

  test('a mistake is named as the user wrote it', () => {
    expect(problems({ flags: { 'rpc-port': 'x' } })[0]).toMatch(/^--rpc-port: expected a port/);
    expect(problems({ env: { BATON_RPC_PORT: 'x' } })[0]).toMatch(/^BATON_RPC_PORT: expected a port/);
    expect(problems({ fileText: 'rpc:\n  port: x\n', flags: { 'rpc-port': '5' } })).toEqual([]);
  });

  test('a variable can switch off what the file switches on', () => {
    const open = 'rpc: {host: 0.0.0.0, insecure: true}\n';
    expect(problems({ fileText: open })).toEqual([]);
    expect(problems({ fileText: open, env: { BATON_INSECURE_RPC: 'false' } })).toHaveLength(1);
  });

  test('an empty variable is none, and Kubernetes service variables are not ours', () => {
    expect(good({ env: { BATON_PORT: '' } }).facade.port).toBe(8000);
    const env = { BATON_PORT: 'tcp://10.0.0.1:8000', BATON_SERVICE_HOST: '10.0.0.1', BATON_PORT_8000_TCP: 'x' };
    expect(good({ env }).facade.port).toBe(8000);
    expect(warnings({ env })).toEqual(['BATON_PORT: ignored, because Kubernetes set it for a service of that name']);
  });

  test('a mistyped variable is warned about', () => {
    expect(warnings({ env: { BATON_RPC_PROT: '1' } })).toEqual([
      'BATON_RPC_PROT: ignored; did you mean BATON_RPC_PORT?',
    ]);
  });

  test('flags replace the engines of their role in the file', () => {
    const instances =
      'instances:\n  - {url: "http://f:1", role: prefill}\n  - {url: "http://f:2", role: decode}\n  - {url: "http://f:3", role: both}\n';
    const config = good({ fileText: instances, flags: { prefill: ['http://g:1'] } });
    expect(config.instances.map(({ id, role }) => `${id} ${role}`)).toEqual(['f:2 decode', 'f:3 both', 'g:1 prefill']);
    const pooled = good({
      fileText: 'pools: {prefill: {api_key: k}}\n',
      flags: { prefill: ['http://g:1'], decode: ['http://g:2'] },
    });
    expect(pooled.instances.map(({ apiKey }) => apiKey)).toEqual(['k', undefined]);
  });

  test('the variables of the examples keep their names', () => {
    expect(good({ env: { OPENAI_API_KEY: ' sk-1 ' } }).openaiApiKey).toBe('sk-1');
    expect(good({ env: { OPENAI_API_KEY: '' } })).not.toHaveProperty('openaiApiKey');
    expect(problems({ env: { OPENAI_API_KEY: 'a b' } })).toEqual([
      'OPENAI_API_KEY: expected a key without white space',
    ]);
    expect(good({ env: { CLIENT_BOUND: 'true' } }).identity).toEqual({ headers: ['session-id'], clientBound: true });
    expect(good({ env: { CLIENT_BOUND: 'True', CLIENT_BOUND_KEY: 'X-Chat' } }).identity).toEqual({
      headers: ['x-chat'],
      clientBound: true,
    });
    expect(good({ env: { CLIENT_BOUND: 'false', CLIENT_BOUND_KEY: 'x-chat' } }).identity).toEqual(good().identity);
    expect(problems({ env: { CLIENT_BOUND: 'true', CLIENT_BOUND_KEY: 'a b' } })[0]).toMatch(/^CLIENT_BOUND_KEY: /);
  });
});

describe('policies and connectors', () => {
  test('one policy is for both, unless one is named', () => {
    expect(good({ flags: { policy: 'least-loaded' } }).policy).toEqual({
      prefill: 'least_loaded',
      decode: 'least_loaded',
    });
    expect(good({ flags: { policy: 'least_loaded', 'decode-policy': 'round_robin' } }).policy).toEqual({
      prefill: 'least_loaded',
      decode: 'round_robin',
    });
    expect(good({ fileText: 'policy: least_loaded\n', flags: { 'prefill-policy': 'round_robin' } }).policy).toEqual({
      prefill: 'round_robin',
      decode: 'least_loaded',
    });
    expect(good({ env: { BATON_DECODE_POLICY: 'least_loaded' }, flags: { policy: 'round_robin' } }).policy.decode).toBe(
      'round_robin',
    );
  });

  test('an unknown name lists the known ones', () => {
    expect(problems({ flags: { 'prefill-policy': 'leastloded' } })).toEqual([
      '--prefill-policy: expected one of round_robin, least_loaded, got "leastloded"; did you mean least_loaded?',
    ]);
    expect(problems({ flags: { 'kv-connector': 'zmq' } })[0]).toBe(
      '--kv-connector: expected one of nixl, nixl-push, lmcache, none, got "zmq"',
    );
    const fileText = 'instances:\n  - {url: "http://x:1", role: both, connector: zmq}\n';
    expect(problems({ fileText })[0]).toMatch(/^baton\.yaml:2:37: instances\[0\]\.connector: expected one of nixl/);
  });

  test.each([
    ['nixl', 'nixl'],
    ['NixlConnector', 'nixl'],
    ['NIXL', 'nixl'],
    ['NixlPushConnector', 'nixl-push'],
    ['nixl_push', 'nixl-push'],
    ['LMCacheConnectorV1', 'lmcache'],
  ])('%s is the connector %s', (name, connector) => {
    expect(good({ flags: { 'kv-connector': name } }).kvConnector).toBe(connector);
  });
});

describe('what belongs together', () => {
  test('open ports need to be allowed', () => {
    expect(problems({ flags: { 'rpc-host': '0.0.0.0' } })).toEqual([
      '--rpc-host: other machines reach 0.0.0.0, and the rpc port knows no callers; give tokens (--rpc-tokens-file) or authorities of certificates (--rpc-tls-client-ca), use 127.0.0.1, or allow it with --insecure-rpc',
    ]);
    expect(problems({ flags: { 'admin-host': '::' } })[0]).toContain('--insecure-admin');
    expect(problems({ flags: { 'admin-host': '::', 'admin-tokens-file': 'tokens.txt' } })).toEqual([]);
    expect(
      problems({
        flags: { 'rpc-host': '0.0.0.0', 'insecure-rpc': 'true', 'admin-host': '10.0.0.1', 'insecure-admin': 'true' },
      }),
    ).toEqual([]);
    expect(problems({ flags: { 'rpc-host': '0.0.0.0', 'rpc-port': 'off' } })).toEqual([]);
    expect(problems({ flags: { 'rpc-host': '::1', 'admin-host': 'localhost' } })).toEqual([]);
  });

  test('an open RPC port knows its callers by tokens or by certificates', () => {
    const open = { 'rpc-host': '0.0.0.0' };
    const tls = { 'rpc-tls-cert': 'c.pem', 'rpc-tls-key': 'k.pem' };
    expect(problems({ flags: { ...open, ...tls } })[0]).toContain('knows no callers');
    expect(problems({ flags: { ...open, ...tls, 'rpc-tls-client-ca': 'ca.pem' } })).toEqual([]);
    expect(warnings({ flags: { ...open, ...tls, 'rpc-tokens-file': 't' } })).toEqual([]);
    expect(warnings({ flags: { ...open, 'rpc-tokens-file': 't' } })).toEqual([
      '--rpc-host: tokens cross the network to 0.0.0.0 without TLS (--rpc-tls-cert)',
    ]);
  });

  test('a certificate needs its key', () => {
    expect(problems({ flags: { 'rpc-tls-cert': 'c.pem' } })[0]).toContain('rpc.tls.key (--rpc-tls-key)');
    expect(problems({ fileText: 'rpc: {tls: {client_ca: ca.pem}}' })).toEqual([
      'baton.yaml:1:7: TLS needs rpc.tls.cert (--rpc-tls-cert)',
    ]);
    expect(problems({ flags: { 'rpc-client-key': 'k.pem' } })[0]).toContain('rpc_client.cert (--rpc-client-cert)');
  });

  test('a token comes from a variable or a file', () => {
    expect(good({ env: { BATON_RPC_TOKEN: 'secret' } }).rpcClient).toEqual({ token: 'secret' });
    expect(good({ flags: { 'rpc-client-token-file': 'f' } }).rpcClient).toEqual({ tokenFile: 'f' });
    const bad = problems({ env: { BATON_RPC_TOKEN: 'sec ret' } });
    expect(bad).toEqual(['BATON_RPC_TOKEN: expected a key without white space']);
  });

  test('two listeners cannot share a port', () => {
    expect(problems({ flags: { port: '29000' } })).toEqual([
      '--port: port 29000 is both the facade and the admin port; give them different ports',
    ]);
    expect(problems({ flags: { 'rpc-port': '7', 'admin-port': '7' } })[0]).toMatch(
      /^--admin-port: port 7 is both the rpc and the admin port/,
    );
    expect(problems({ flags: { 'rpc-port': '0', 'admin-port': '0', port: '0' } })).toEqual([]);
    expect(problems({ flags: { 'rpc-port': '7', 'admin-port': '7', 'admin-host': '127.0.0.2' } })).toEqual([]);
  });

  test('unsafe reuse must be asked for', () => {
    for (const guard of ['history', 'off']) {
      expect(problems({ flags: { 'reuse-guard': guard } })[0]).toMatch(/^--reuse-guard: .*--unsafe-reuse/);
      expect(problems({ flags: { 'reuse-guard': guard, 'unsafe-reuse': 'true' } })).toEqual([]);
      expect(warnings({ flags: { 'reuse-guard': guard, 'unsafe-reuse': 'true' } })[0]).toMatch(
        /^--reuse-guard: .*unsafe/,
      );
    }
    expect(problems({ flags: { 'reuse-guard': 'exact' } })).toEqual([]);
    expect(problems({ flags: { 'reuse-guard': 'none' } })[0]).toContain('expected one of exact, history, off');
  });

  test('a role needs those that it calls', () => {
    expect(problems({ flags: { roles: 'facade' } })).toEqual([
      '--router-url: is needed, because facade runs here and router does not (--roles)',
    ]);
    expect(problems({ flags: { roles: 'router' } }).map((line) => line.split(':')[0])).toEqual([
      '--kvstore-url',
      '--registry-url',
    ]);
    expect(good({ flags: { roles: 'facade', 'router-url': 'http://r:50051/' } })).toMatchObject({
      roles: ['facade'],
      routerUrl: 'http://r:50051',
      instances: [],
    });
    expect(problems({ flags: { 'router-url': 'http://r:1' } })[0]).toMatch(
      /^--router-url: is for a router in another process/,
    );
    expect(problems({ flags: { roles: 'facade', 'router-url': 'r:50051' } })[0]).toMatch(
      /^--router-url: "r:50051" has no scheme/,
    );
    expect(problems({ flags: { roles: 'kvstore', 'rpc-port': 'off' } })[0]).toMatch(
      /^--rpc-port: without the RPC port nothing reaches kvstore/,
    );
    expect(problems({ flags: { roles: 'kvstore', 'rpc-port': 'off', 'rpc-socket': '/run/b' } })).toEqual([]);
    expect(good({ flags: { roles: 'facade', 'router-url': 'unix:///run/baton.sock' } }).routerUrl).toBe(
      'unix:/run/baton.sock',
    );
    expect(problems({ flags: { roles: 'facade', 'router-url': 'unix:baton.sock' } })[0]).toMatch(
      /^--router-url: expected the absolute path of a socket/,
    );
    expect(problems({ flags: { roles: 'facade,routr' } })[0]).toContain('did you mean router?');
    expect(problems({ flags: { roles: ',' } })[0]).toMatch(/^--roles: expected at least one of/);
  });

  test('a flag of a role that runs elsewhere is named; a file and variables may be those of all processes', () => {
    const store = { roles: 'kvstore', port: '1', policy: 'round_robin', 'queue-timeout': '1s' };
    const noEffect = (flag: string, role: string) =>
      `${flag}: has no effect, because the ${role} does not run here (--roles)`;
    expect(warnings({ flags: store })).toEqual([
      noEffect('--policy', 'router'),
      noEffect('--port', 'facade'),
      noEffect('--queue-timeout', 'facade'),
    ]);
    const router = {
      roles: 'router,registry',
      policy: 'round_robin',
      'kvstore-url': 'http://s:1',
      'store-snapshot': '/s',
    };
    expect(warnings({ flags: { ...router, 'pool-file': '/p' } })).toEqual([noEffect('--store-snapshot', 'kvstore')]);
    expect(
      warnings({ flags: { port: '1', policy: 'round_robin', 'store-snapshot': '/s', 'pool-file': '/p' } }),
    ).toEqual([]);
    const fileText = 'facade: {port: 1}\npolicy: round_robin\n';
    expect(warnings({ flags: { roles: 'kvstore' }, env: { BATON_PORT: '1' }, fileText })).toEqual([]);
  });

  test('engines are only for the registry', () => {
    const flags = { roles: 'facade', 'router-url': 'http://r:1', prefill: ['http://x:1'] };
    expect(warnings({ flags })).toEqual(['--prefill: has no effect, because the registry does not run here (--roles)']);
    // A file may be that of all processes, and a facade has the keys of engines from it.
    const fileText = 'instances: [{url: "http://x:1", role: prefill, api_key: k}]\n';
    expect(warnings({ flags: { roles: 'facade', 'router-url': 'http://r:1' }, fileText })).toEqual([]);
  });

  test('replace needs a key', () => {
    expect(problems({ flags: { 'engine-auth': 'replace' } })).toEqual([
      '--engine-auth: "replace" needs a key: set OPENAI_API_KEY or an api_key',
    ]);
    expect(problems({ flags: { 'engine-auth': 'replace' }, env: { OPENAI_API_KEY: 'k' } })).toEqual([]);
    const elsewhere = { 'engine-auth': 'replace', roles: 'facade', 'router-url': 'http://r:1' };
    expect(problems({ flags: elsewhere, fileText: 'pools: {decode: {api_key: k}}\n' })).toEqual([]);
    expect(problems({ fileText: 'pools: {prefill: {api_key: k}}\n', flags: { 'engine-auth': 'replace' } })).toEqual([]);
  });

  test('a file of keys is for the facade, and its keys are not for engines', () => {
    const flags = { 'api-keys-file': 'keys.txt' };
    expect(good({ flags }).auth).toEqual({ apiKeysFile: 'keys.txt' });
    expect(good({ env: { BATON_API_KEYS_FILE: 'keys.txt' } }).auth).toEqual({ apiKeysFile: 'keys.txt' });
    expect(good({ fileText: 'auth:\n  api_keys_file: keys.txt\n' }).auth).toEqual({ apiKeysFile: 'keys.txt' });
    expect(warnings({ flags })).toEqual([]);
    expect(warnings({ flags: { ...flags, 'engine-auth': 'forward' } })).toEqual([
      '--engine-auth: "forward" sends the keys with which clients come to baton on to the engines',
    ]);
    expect(warnings({ flags: { ...flags, roles: 'kvstore' } })).toEqual([
      '--api-keys-file: has no effect, because the facade does not run here (--roles)',
    ]);
    expect(problems({ fileText: 'auth: {api_keys_file: [a]}\n' })[0]).toMatch(
      /^baton\.yaml:1:8: auth\.api_keys_file: expected a text/,
    );
    expect(problems({ fileText: 'api_keys_file: a\n' })[0]).toContain('did you mean auth.api_keys_file?');
  });

  test('flags of another connector are accepted with a warning', () => {
    const flags = { 'decoder-init-port': ['7300,7301'], 'proxy-port': '7500' };
    expect(warnings({ flags })).toEqual([
      '--decoder-init-port: has no effect with the nixl connector',
      '--proxy-port: has no effect with the nixl connector',
    ]);
    const lmcache = { ...flags, 'decoder-alloc-port': ['8400,8401'], 'kv-connector': 'lmcache' };
    expect(good({ flags: lmcache }).lmcache).toMatchObject({
      receivers: { 'localhost:8200': { initPorts: [7300, 7301], allocPorts: [8400, 8401] } },
      proxyPort: 7500,
    });
    expect(problems({ flags: { 'decoder-init-port': ['7300', 'x'] } })[0]).toMatch(
      /^--decoder-init-port: expected a port/,
    );
  });
});
