import type { ValkeySettings } from '../core/valkey-settings.ts';
import { type DiscoveryConfig, type InstanceDefaults, remoteSources } from './discovery.ts';
import type { EngineChoice } from './engines.ts';
import { isLoopback } from './instance-url.ts';
import { buildInstances, poolDefaults } from './instances.ts';
import { buildReceivers, type LmcacheConfig } from './lmcache.ts';
import { connectorKey, resolveName, wordKey } from './names.ts';
import type { Problem } from './problem.ts';
import {
  type Config,
  type FileConfig,
  type InstanceConfig,
  type InstanceRole,
  ROLE_NAMES,
  type RoleName,
} from './schema.ts';
import { type ListenPort, parseHeaderName, parseSecret } from './values.ts';
import { isRecord } from './yaml-source.ts';

/** The names that this build of baton implements. */
export interface Known {
  readonly policies: readonly string[];
  readonly connectors: readonly string[];
  readonly stores: readonly string[];
}

/** What a checked file becomes settings with. */
export interface BuildInput {
  readonly file: FileConfig;
  /** How many of `file.instances` were written in the file; the others come from `engines`. */
  readonly fileInstances: number;
  readonly engines: EngineChoice;
  readonly env: Readonly<Record<string, string | undefined>>;
  readonly known: Known;
  readonly terminal: boolean;
  locate(path: readonly PropertyKey[]): string;
}

/** The settings with the mistakes that only show when several keys are seen together. */
export interface Built {
  readonly config: Config;
  readonly problems: readonly Problem[];
  readonly warnings: readonly Problem[];
}

interface Sink {
  readonly problems: Problem[];
  readonly warnings: Problem[];
}

/** Turns checked keys into settings: names resolved, pools applied to instances, contradictions reported. */
export function buildConfig(input: BuildInput): Built {
  const sink: Sink = { problems: [], warnings: [] };
  const { file, engines, locate } = input;
  const openaiApiKey = readSecret(input.env, 'OPENAI_API_KEY', sink);
  const kvConnector = resolveName(
    file.kv_connector,
    input.known.connectors,
    connectorKey,
    locate(['kv_connector']),
    sink,
  );
  const instanceDefaults = readPools(input, kvConnector, sink);
  const instances = engines.sim === undefined ? readInstances(input, instanceDefaults, sink) : [];
  const config: Config = {
    roles: file.roles,
    ...(file.router_url === undefined ? {} : { routerUrl: file.router_url.url }),
    ...(file.kvstore_url === undefined ? {} : { kvstoreUrl: file.kvstore_url.url }),
    ...(file.registry_url === undefined ? {} : { registryUrl: file.registry_url.url }),
    facade: {
      host: file.facade.host,
      port: file.facade.port,
      bodyLimitBytes: file.facade.body_limit,
      clientKvTransferParams: file.facade.client_kv_transfer_params,
      holdBytes: file.facade.hold,
      streamBufferBytes: file.facade.stream_buffer,
      metrics: file.facade.metrics,
    },
    auth: file.auth.api_keys_file === undefined ? {} : { apiKeysFile: file.auth.api_keys_file },
    rpc: readRpc(input, sink),
    rpcClient: readRpcClient(input, sink),
    admin: file.admin,
    store: {
      backend: resolveName(file.store.backend, input.known.stores, wordKey, locate(['store', 'backend']), sink),
      ...(file.store.snapshot_file === undefined ? {} : { snapshotFile: file.store.snapshot_file }),
      maxBytes: file.store.max_bytes,
      tenantEntries: file.store.tenant_entries,
      tenantBytes: file.store.tenant_bytes,
      ...readValkey(input, sink),
    },
    kvConnector,
    policy: {
      prefill: resolveName(file.policy.prefill, input.known.policies, wordKey, locate(['policy', 'prefill']), sink),
      decode: resolveName(file.policy.decode, input.known.policies, wordKey, locate(['policy', 'decode']), sink),
    },
    policies: {
      consistentHash: { loadFactor: file.policies.consistent_hash.load_factor },
      cacheAware: {
        cacheThreshold: file.policies.cache_aware.cache_threshold,
        balanceAbsThreshold: file.policies.cache_aware.balance_abs_threshold,
        balanceRelThreshold: file.policies.cache_aware.balance_rel_threshold,
        maxBytes: file.policies.cache_aware.max_bytes,
        maxAgeMs: file.policies.cache_aware.max_age,
      },
      stickyLeastLoaded: {
        maxLegs: file.policies.sticky_least_loaded.max_legs,
        sessions: file.policies.sticky_least_loaded.sessions,
      },
    },
    instances,
    instanceDefaults,
    discovery: readDiscovery(file.discovery),
    registry: file.registry.state_file === undefined ? {} : { stateFile: file.registry.state_file },
    engineAuth: file.engine_auth,
    ...(openaiApiKey === undefined ? {} : { openaiApiKey }),
    kv: { remoteHost: file.kv.remote_host, leaseMarginMs: file.kv.lease_margin },
    reuse: file.reuse,
    disagg: { minUncachedTokens: file.disagg.min_uncached_tokens },
    identity: readIdentity(input, sink),
    timeouts: {
      connectMs: file.timeouts.connect,
      storeMs: file.timeouts.store,
      tokenizeMs: file.timeouts.tokenize,
      prefillWarmMs: file.timeouts.prefill_warm,
      prefillWarmPerTokenMs: file.timeouts.prefill_warm_per_token,
      prefillColdMs: file.timeouts.prefill_cold,
      firstContentMs: file.timeouts.first_content,
      wholeReplyMs: file.timeouts.whole_reply,
      idleMs: file.timeouts.idle,
      clientStallMs: file.timeouts.client_stall,
      routerMs: file.timeouts.router,
      queueMs: file.timeouts.queue,
      drainMs: file.timeouts.drain,
      drainSettleMs: file.timeouts.drain_settle,
      keepAliveMs: file.timeouts.keep_alive,
    },
    queue: { max: file.queue.max, tenantMax: file.queue.tenant_max },
    limits: { requests: file.limits.requests, prefill: file.limits.prefill, decode: file.limits.decode },
    retry: { budgetPercent: file.retry.budget_percent },
    breaker: {
      failures: file.breaker.failures,
      pairFailures: file.breaker.pair_failures,
      openMs: file.breaker.open,
    },
    health: {
      intervalMs: file.health.interval,
      timeoutMs: file.health.timeout,
      failures: file.health.failures,
      dampingMs: file.health.damping,
      slowStartMs: file.health.slow_start,
    },
    log: { level: file.log.level, format: file.log.format ?? (input.terminal ? 'pretty' : 'json') },
    lmcache: readLmcache(input, sink, instances),
    ...(engines.sim === undefined ? {} : { sim: engines.sim }),
  };
  checkRoles(config, input, sink);
  checkListeners(config, input, sink);
  checkAuth(config, input, sink);
  checkStore(config, input, sink);
  checkReuse(config, input, sink);
  checkEngines(config, input, sink);
  return { config, ...sink };
}

function readSecret(env: BuildInput['env'], name: string, sink: Sink): string | undefined {
  const raw = env[name]?.trim();
  if (raw === undefined || raw === '') return undefined;
  const parsed = parseSecret(raw);
  if (parsed.kind === 'bad') sink.problems.push({ where: name, message: parsed.message });
  return parsed.kind === 'ok' ? parsed.value : undefined;
}

function readRpc({ file, locate }: BuildInput, sink: Sink): Config['rpc'] {
  const { host, port, insecure, socket, tokens_file: tokensFile, tls } = file.rpc;
  const { cert, key, client_ca: clientCa } = tls;
  if ((cert ?? key ?? clientCa) !== undefined && (cert === undefined || key === undefined)) {
    const missing = cert === undefined ? 'cert' : 'key';
    sink.problems.push({
      where: locate(['rpc', 'tls']),
      message: `TLS needs rpc.tls.${missing} (--rpc-tls-${missing})`,
    });
  }
  return {
    host,
    port,
    insecure,
    ...(socket === undefined ? {} : { socket }),
    ...(tokensFile === undefined ? {} : { tokensFile }),
    ...(cert === undefined || key === undefined
      ? {}
      : { tls: { cert, key, ...(clientCa === undefined ? {} : { clientCa }) } }),
  };
}

function readRpcClient(input: BuildInput, sink: Sink): Config['rpcClient'] {
  const { token_file: tokenFile, ca, cert, key } = input.file.rpc_client;
  const token = readSecret(input.env, 'BATON_RPC_TOKEN', sink);
  if ((cert === undefined) !== (key === undefined)) {
    const missing = cert === undefined ? 'cert' : 'key';
    const message = `a certificate and its key go together: set rpc_client.${missing} (--rpc-client-${missing})`;
    sink.problems.push({ where: input.locate(['rpc_client']), message });
  }
  return {
    ...(tokenFile === undefined ? {} : { tokenFile }),
    ...(token === undefined ? {} : { token }),
    ...(ca === undefined ? {} : { ca }),
    ...(cert === undefined ? {} : { cert }),
    ...(key === undefined ? {} : { key }),
  };
}

// The LMCache example: CLIENT_BOUND=true binds by the header that CLIENT_BOUND_KEY names, session-id by default.
function readIdentity(input: BuildInput, sink: Sink): Config['identity'] {
  const { identity } = input.file;
  if (input.env['CLIENT_BOUND']?.trim().toLowerCase() !== 'true')
    return { headers: identity.headers, clientBound: identity.client_bound };
  const key = input.env['CLIENT_BOUND_KEY']?.trim();
  const header = parseHeaderName(key === undefined || key === '' ? 'session-id' : key);
  if (header.kind === 'bad') sink.problems.push({ where: 'CLIENT_BOUND_KEY', message: header.message });
  return { headers: header.kind === 'ok' ? [header.value] : identity.headers, clientBound: true };
}

function readPools({ file, known, locate }: BuildInput, kvConnector: string, sink: Sink): InstanceDefaults {
  const of = (role: InstanceRole) => {
    const pool = file.pools[role];
    const where = locate(['pools', role, 'connector']);
    const connector =
      pool.connector === undefined
        ? kvConnector
        : resolveName(pool.connector, known.connectors, connectorKey, where, sink);
    return poolDefaults(pool, connector);
  };
  return { prefill: of('prefill'), decode: of('decode'), both: of('both') };
}

function readInstances(input: BuildInput, defaults: InstanceDefaults, sink: Sink): readonly InstanceConfig[] {
  const { file, engines, locate } = input;
  const items = (file.instances ?? []).flatMap((item, i) => {
    if (i < input.fileInstances && item.role !== 'both' && engines.replaces.includes(item.role)) return [];
    // The example's engines are for a pool that would be empty, and only the registry keeps the pool.
    if (!file.roles.includes('registry') && engines.engines[i - input.fileInstances]?.isDefault === true) return [];
    return [{ item, where: locate(['instances', i]), connectorAt: locate(['instances', i, 'connector']) }];
  });
  return buildInstances(items, defaults, input.known.connectors, sink);
}

function readDiscovery({ file, dns, kubernetes }: FileConfig['discovery']): DiscoveryConfig {
  const { selector, namespace, port, kubeconfig } = kubernetes;
  return {
    ...(file === undefined ? {} : { file }),
    dns: { prefill: dns.prefill ?? [], decode: dns.decode ?? [], both: dns.both ?? [] },
    dnsIntervalMs: dns.interval,
    ...(selector === undefined
      ? {}
      : {
          kubernetes: {
            selector,
            roleLabel: kubernetes.role_label,
            scheme: kubernetes.scheme,
            ...(namespace === undefined ? {} : { namespace }),
            ...(port === undefined ? {} : { port }),
            ...(kubeconfig === undefined ? {} : { kubeconfig }),
          },
        }),
  };
}

function readLmcache(input: BuildInput, sink: Sink, instances: readonly InstanceConfig[]): LmcacheConfig {
  const { file, locate } = input;
  const decoders = instances
    .filter(({ role, connector }) => role === 'decode' && connector === 'lmcache')
    .map(({ id, url, lmcache }) => ({ id, url, own: lmcache, where: locate(['lmcache', 'decoder_init_ports']) }));
  const { receivers, problems } = buildReceivers(decoders, {
    initPorts: file.lmcache.decoder_init_ports,
    allocPorts: file.lmcache.decoder_alloc_ports,
    queryPorts: file.lmcache.decoder_query_ports ?? [],
    where: locate(['lmcache', 'decoder_alloc_ports']),
  });
  if (decoders.length > 0) sink.problems.push(...problems);
  const { notice_publish: noticePublish, notice_hub: noticeHub } = file.lmcache;
  if (noticePublish !== undefined && noticeHub !== undefined) {
    const message = 'one replica publishes the notices and the others have its address: leave one of the two keys out';
    sink.problems.push({ where: locate(['lmcache', 'notice_hub']), message });
  }
  const notices = instances.flatMap(({ id, lmcache }) =>
    lmcache?.notices === undefined ? [] : [[id, lmcache.notices] as const],
  );
  return {
    proxyHost: file.lmcache.proxy_host,
    proxyPort: file.lmcache.proxy_port,
    ...(noticePublish === undefined ? {} : { noticePublish }),
    ...(noticeHub === undefined ? {} : { noticeHub }),
    receivers,
    notices: Object.fromEntries(notices),
    ...(file.lmcache.notices === undefined ? {} : { defaultNotices: file.lmcache.notices }),
    noticeTimeoutMs: file.lmcache.notice_timeout,
    bufferBytes: file.lmcache.pd_buffer_size,
    chunkTokens: file.lmcache.chunk_size,
    kvBytesPerToken: file.lmcache.kv_bytes_per_token,
    uncarried: file.lmcache.uncarried,
  };
}

interface Peer {
  readonly role: RoleName;
  readonly key: string;
  readonly flag: string;
  readonly url: string | undefined;
  readonly neededBy: RoleName;
}

function checkRoles(config: Config, input: BuildInput, sink: Sink): void {
  const peers: readonly Peer[] = [
    { role: 'router', key: 'router_url', flag: '--router-url', url: config.routerUrl, neededBy: 'facade' },
    { role: 'kvstore', key: 'kvstore_url', flag: '--kvstore-url', url: config.kvstoreUrl, neededBy: 'router' },
    { role: 'registry', key: 'registry_url', flag: '--registry-url', url: config.registryUrl, neededBy: 'router' },
  ];
  for (const { role, key, flag, url, neededBy } of peers) {
    const here = config.roles.includes(role);
    if (here && url !== undefined) {
      sink.problems.push({
        where: input.locate([key]),
        message: `is for a ${role} in another process, but roles (--roles) lists ${role} as well`,
      });
    }
    if (!here && url === undefined && config.roles.includes(neededBy)) {
      sink.problems.push({
        where: flag,
        message: `is needed, because ${neededBy} runs here and ${role} does not (--roles)`,
      });
    }
  }
  const served = ROLE_NAMES.filter((role) => role !== 'facade' && config.roles.includes(role));
  if (
    !config.roles.includes('facade') &&
    config.rpc.port === 'off' &&
    config.rpc.socket === undefined &&
    served.length > 0
  ) {
    sink.problems.push({
      where: input.locate(['rpc', 'port']),
      message: `without the RPC port nothing reaches ${served.join(', ')}; open it, or a socket (--rpc-socket)`,
    });
  }
}

interface Listener {
  readonly name: 'facade' | 'rpc' | 'admin';
  readonly host: string;
  readonly port: ListenPort;
}

/** The server of the valkey backend, which has none of its own. */
function readValkey(input: BuildInput, sink: Sink): { readonly valkey?: ValkeySettings } {
  const { backend, valkey } = input.file.store;
  if (backend.toLowerCase() !== 'valkey') return {};
  const url = valkey.url ?? (valkey.sentinels === undefined ? undefined : 'valkey://sentinels');
  if (url === undefined) {
    const where = input.locate(['store', 'backend']);
    sink.problems.push({ where, message: '"valkey" needs a server: give --valkey-url or store.valkey.url' });
    return {};
  }
  return {
    valkey: {
      url,
      cluster: valkey.cluster,
      sentinels: valkey.sentinels ?? [],
      sentinelName: valkey.sentinel_name,
      prefix: valkey.prefix,
      ...(valkey.password_file === undefined ? {} : { passwordFile: valkey.password_file }),
      ...(valkey.ca === undefined ? {} : { caFile: valkey.ca }),
    },
  };
}

/** Settings of a backend that is not the chosen one. */
function checkStore({ roles, store }: Config, { file, locate }: BuildInput, sink: Sink): void {
  if (!roles.includes('kvstore')) return;
  if (store.backend !== 'memory' && store.snapshotFile !== undefined) {
    const message = `has no effect with the ${store.backend} store, which keeps its entries on its server`;
    sink.warnings.push({ where: locate(['store', 'snapshot_file']), message });
  }
  const key = (['url', 'sentinels', 'password_file', 'ca'] as const).find(
    (name) => file.store.valkey[name] !== undefined,
  );
  if (store.backend !== 'valkey' && key !== undefined) {
    const message = `has no effect with the ${store.backend} store: nothing is kept on that server; choose it with --store valkey (store.backend)`;
    sink.warnings.push({ where: locate(['store', 'valkey', key]), message });
  }
}

function checkListeners(config: Config, input: BuildInput, sink: Sink): void {
  const { rpc, admin, facade } = config;
  if (admin.port !== 'off' && !admin.insecure && !isLoopback(admin.host)) {
    sink.problems.push({
      where: input.locate(['admin', 'host']),
      message: `other machines reach ${admin.host}, and the admin port has no authentication; use 127.0.0.1, or allow it with --insecure-admin`,
    });
  }
  if (rpc.port !== 'off' && !isLoopback(rpc.host)) checkRpcReach(rpc, input, sink);
  const open: readonly Listener[] = [
    ...(config.roles.includes('facade') ? [{ name: 'facade' as const, host: facade.host, port: facade.port }] : []),
    { name: 'rpc', host: rpc.host, port: rpc.port },
    { name: 'admin', host: admin.host, port: admin.port },
  ];
  for (const [i, second] of open.entries()) {
    const first = open
      .slice(0, i)
      .find(
        (other) =>
          other.port === second.port &&
          typeof other.port === 'number' &&
          other.port > 0 &&
          overlap(other.host, second.host),
      );
    if (first !== undefined) {
      sink.problems.push({
        where: input.locate([second.name, 'port']) || input.locate([first.name, 'port']),
        message: `port ${second.port} is both the ${first.name} and the ${second.name} port; give them different ports`,
      });
    }
  }
}

/** The RPC port on an address that other machines reach. */
function checkRpcReach(rpc: Config['rpc'], input: BuildInput, sink: Sink): void {
  const where = input.locate(['rpc', 'host']);
  const known = rpc.tokensFile !== undefined || rpc.tls?.clientCa !== undefined;
  if (!known && !rpc.insecure) {
    sink.problems.push({
      where,
      message: `other machines reach ${rpc.host}, and the rpc port knows no callers; give tokens (--rpc-tokens-file) or authorities of certificates (--rpc-tls-client-ca), use 127.0.0.1, or allow it with --insecure-rpc`,
    });
  }
  if (rpc.tokensFile !== undefined && rpc.tls === undefined) {
    sink.warnings.push({ where, message: `tokens cross the network to ${rpc.host} without TLS (--rpc-tls-cert)` });
  }
}

function overlap(a: string, b: string): boolean {
  return (
    a === b ||
    [a, b].some((host) => host === '0.0.0.0' || host === '::') ||
    (isLoopback(a) && isLoopback(b) && [a, b].includes('localhost'))
  );
}

function checkAuth(config: Config, input: BuildInput, sink: Sink): void {
  if (config.auth.apiKeysFile === undefined) return;
  const where = input.locate(['auth', 'api_keys_file']);
  if (!config.roles.includes('facade')) {
    sink.warnings.push({ where, message: 'has no effect, because the facade does not run here (--roles)' });
  } else if (config.engineAuth === 'forward') {
    sink.warnings.push({
      where: input.locate(['engine_auth']),
      message: '"forward" sends the keys with which clients come to baton on to the engines',
    });
  }
}

function checkReuse(config: Config, input: BuildInput, sink: Sink): void {
  const { guard, unsafe } = config.reuse;
  if (guard === 'exact') return;
  const where = input.locate(['reuse', 'guard']);
  if (!unsafe) {
    sink.problems.push({
      where,
      message: `"${guard}" can give wrong answers; it needs --unsafe-reuse (reuse.unsafe: true)`,
    });
  } else {
    sink.warnings.push({ where, message: `"${guard}" is unsafe: KV may be reused for a prompt with other tokens` });
  }
}

const LMCACHE_FLAG_KEYS = [
  'decoder_init_ports',
  'decoder_alloc_ports',
  'decoder_query_ports',
  'proxy_host',
  'proxy_port',
  'pd_buffer_size',
  'chunk_size',
] as const;

/** What only the registry looks at. */
const SOURCE_KEYS = [
  ['discovery', 'file'],
  ['discovery', 'dns', 'prefill'],
  ['discovery', 'dns', 'decode'],
  ['discovery', 'dns', 'both'],
  ['discovery', 'kubernetes', 'selector'],
  ['registry', 'state_file'],
] as const;

function isSet(file: unknown, path: readonly string[]): boolean {
  let value = file;
  for (const key of path) value = isRecord(value) ? value[key] : undefined;
  return value !== undefined;
}

function checkEngines(config: Config, input: BuildInput, sink: Sink): void {
  const { instances, roles, sim } = config;
  const registry = roles.includes('registry');
  const isDiscovering = config.discovery.file !== undefined || remoteSources(config.discovery).length > 0;
  if (sim !== undefined && !registry) {
    sink.problems.push({
      where: input.locate(['roles']),
      message: 'simulated engines (--sim) need the registry in this process',
    });
  }
  if (sim !== undefined && config.lmcache.noticeHub !== undefined) {
    sink.problems.push({
      where: input.locate(['lmcache', 'notice_hub']),
      message: 'simulated engines (--sim) tell the notice socket of this process: leave the key out',
    });
  }
  if (config.discovery.kubernetes === undefined && input.file.discovery.kubernetes.namespace !== undefined) {
    sink.problems.push({
      where: input.locate(['discovery', 'kubernetes', 'namespace']),
      message: 'tells nothing without --kubernetes-selector (discovery.kubernetes.selector)',
    });
  }
  for (const path of SOURCE_KEYS) {
    const where = input.locate(path);
    if (registry || !/^(--|BATON_)|:\d+:\d+$/.test(where) || !isSet(input.file, path)) continue;
    sink.warnings.push({ where, message: 'has no effect, because the registry does not run here (--roles)' });
  }
  const given = input.engines.engines.find((engine) => !engine.isDefault);
  if (!registry && given !== undefined) {
    sink.warnings.push({
      where: given.where,
      message: 'has no effect, because the registry does not run here (--roles)',
    });
  }
  if (registry && sim === undefined && !isDiscovering) {
    for (const role of ['prefill', 'decode'] as const) {
      if (instances.some((instance) => instance.role === role || instance.role === 'both')) continue;
      sink.warnings.push({
        where: '',
        message: `no ${role} engine is configured (--${role} URL); requests for it wait in the queue and then fail`,
      });
    }
  }
  if (config.kvConnector !== 'lmcache') {
    for (const key of LMCACHE_FLAG_KEYS) {
      const where = input.locate(['lmcache', key]);
      if (/^(--|BATON_)/.test(where))
        sink.warnings.push({ where, message: `has no effect with the ${config.kvConnector} connector` });
    }
  }
  if (
    config.engineAuth === 'replace' &&
    config.openaiApiKey === undefined &&
    !instances.some((instance) => instance.apiKey !== undefined)
  ) {
    sink.problems.push({
      where: input.locate(['engine_auth']),
      message: '"replace" needs a key: set OPENAI_API_KEY or an api_key',
    });
  }
}
