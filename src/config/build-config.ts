import type { InstanceRole } from '../core/instance-spec.ts';
import type { TenantLimit } from '../core/tenant.ts';
import type { ValkeySettings } from '../core/valkey-settings.ts';
import type { BuildInput, Built, Sink } from './build-input.ts';
import { checkTogether } from './check-together.ts';
import type { Config, InstanceConfig, JwtConfig, RoleName, TlsConfig } from './config.ts';
import type { DiscoveryConfig, InstanceDefaults } from './discovery.ts';
import { buildInstances, placeOfInstance, poolDefaults } from './instances.ts';
import { buildReceivers, type LmcacheConfig } from './lmcache.ts';
import { connectorKey, resolveName, wordKey } from './names.ts';
import type { FileConfig } from './schema.ts';
import { parseHeaderName, parseSecret } from './values.ts';

/** Turns checked keys into settings: names resolved, pools applied to instances, contradictions reported. */
export function buildConfig(input: BuildInput): Built {
  const sink: Sink = { problems: [], warnings: [] };
  const { file, engines, locate } = input;
  const openaiApiKey = readSecret(input.env, 'OPENAI_API_KEY', sink);
  const at = (path: readonly string[]) => ({ where: locate(path), path });
  const kvConnector = resolveName(file.kv_connector, input.known.connectors, connectorKey, at(['kv_connector']), sink);
  const instanceDefaults = readPools(input, kvConnector, sink);
  const instances = engines.sim === undefined ? readInstances(input, instanceDefaults, sink) : [];
  const config: Config = {
    roles: file.roles,
    ...readPeers(input, sink),
    facade: {
      host: file.facade.host,
      port: file.facade.port,
      bodyLimitBytes: file.facade.body_limit,
      clientKvTransferParams: file.facade.client_kv_transfer_params,
      holdBytes: file.facade.hold,
      streamBufferBytes: file.facade.stream_buffer,
      metrics: file.facade.metrics,
      ...readTls(file.facade.tls, ['facade', 'tls'], '--tls', input, sink),
      maxConnections: file.facade.max_connections,
      headerBytes: file.facade.header_limit,
      headerCount: file.facade.max_headers,
      headerMs: file.facade.header_timeout,
    },
    auth: {
      ...(file.auth.api_keys_file === undefined ? {} : { apiKeysFile: file.auth.api_keys_file }),
      ...readJwt(input, sink),
    },
    tenant: readTenant(input, sink),
    rpc: readRpc(input, sink),
    rpcClient: readRpcClient(input, sink),
    admin: readAdmin(input, sink),
    store: {
      backend: resolveName(file.store.backend, input.known.stores, wordKey, at(['store', 'backend']), sink),
      ...(file.store.snapshot_file === undefined ? {} : { snapshotFile: file.store.snapshot_file }),
      maxBytes: file.store.max_bytes,
      tenantEntries: file.store.tenant_entries,
      tenantBytes: file.store.tenant_bytes,
      ...readValkey(input, sink),
    },
    kvConnector,
    policy: readPolicy(input, sink),
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
    kv: {
      remoteHost: file.kv.remote_host,
      leaseMarginMs: file.kv.lease_margin,
      forwardTokenIds: file.kv.forward_token_ids,
    },
    reuse: {
      guard: file.reuse.guard,
      unsafe: file.reuse.unsafe,
      autolink: file.reuse.autolink,
      pinWatermark: file.reuse.pin_watermark,
      decodeStream: file.reuse.decode_stream,
      minSavedTokens: file.reuse.min_saved_tokens,
    },
    disagg: {
      minUncachedTokens: file.disagg.min_uncached_tokens,
      localTailTokens: file.disagg.local_tail_tokens,
    },
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
    tracing: {
      ...(file.tracing.otlp_endpoint === undefined ? {} : { otlpEndpoint: file.tracing.otlp_endpoint.url }),
      sampleRatio: file.tracing.sample_ratio,
      serviceName: file.tracing.service_name,
    },
    lmcache: readLmcache(input, sink, instances),
    ...(engines.sim === undefined ? {} : { sim: engines.sim }),
  };
  checkTogether(config, input, sink);
  return { config, ...sink };
}

/** Where services of other processes are. */
function readPeers({ file, locate }: BuildInput, sink: Sink): Pick<Config, 'routerUrl' | 'kvstoreUrl' | 'registryUrl'> {
  const read = (key: 'router_url' | 'kvstore_url' | 'registry_url', role: RoleName) => {
    const where = locate([key]);
    // Variables of clients (baton pool, baton explain) lie in the same shell.
    const isForClients = file.roles.includes(role) && where.startsWith('BATON_');
    if (file[key] === undefined || !isForClients) return file[key]?.url;
    sink.warnings.push({ where, message: `ignored, because ${role} runs in this process (--roles)` });
    return undefined;
  };
  const [routerUrl, kvstoreUrl, registryUrl] = [
    read('router_url', 'router'),
    read('kvstore_url', 'kvstore'),
    read('registry_url', 'registry'),
  ];
  return {
    ...(routerUrl === undefined ? {} : { routerUrl }),
    ...(kvstoreUrl === undefined ? {} : { kvstoreUrl }),
    ...(registryUrl === undefined ? {} : { registryUrl }),
  };
}

function readPolicy({ file, known, locate }: BuildInput, sink: Sink): Config['policy'] {
  const read = (role: 'prefill' | 'decode', path: readonly string[] = ['policy', role]) => {
    const place = { where: locate(['policy', role]), path };
    return resolveName(file.policy[role], known.policies, wordKey, place, sink);
  };
  // One word for both is one mistake.
  const isOne =
    file.policy.prefill === file.policy.decode && locate(['policy', 'prefill']) === locate(['policy', 'decode']);
  const prefill = read('prefill', isOne ? ['policy'] : undefined);
  return { prefill, decode: isOne ? prefill : read('decode') };
}

function readSecret(env: BuildInput['env'], name: string, sink: Sink): string | undefined {
  const raw = env[name]?.trim();
  if (raw === undefined || raw === '') return undefined;
  const parsed = parseSecret(raw);
  if (parsed.kind === 'bad') sink.problems.push({ where: name, message: parsed.message });
  return parsed.kind === 'ok' ? parsed.value : undefined;
}

/** Names of algorithms as tokens have them. */
const ALGORITHM_NAMES: Readonly<Record<string, string>> = { eddsa: 'EdDSA', ed25519: 'Ed25519' };

function readJwt({ file, locate }: BuildInput, sink: Sink): { readonly jwt?: JwtConfig } {
  const { jwks_url: url, jwks_file: keyFile, issuer, audience = [], ...jwt } = file.auth.jwt;
  const at = (key: string) => locate(['auth', 'jwt', key]);
  const keys = url !== undefined ? { url } : keyFile !== undefined ? { file: keyFile } : undefined;
  if (url !== undefined && keyFile !== undefined) {
    sink.problems.push({ where: at('jwks_file'), message: 'the keys are at an address or in a file: leave one out' });
  }
  if (keys === undefined) {
    const given = issuer !== undefined ? 'issuer' : audience.length > 0 ? 'audience' : undefined;
    const message = 'needs the keys of the issuer: give --jwks-url or --jwks-file (auth.jwt)';
    if (given !== undefined) sink.problems.push({ where: at(given), message });
    return {};
  }
  for (const [key, flag] of [
    ['issuer', '--jwt-issuer'],
    ['audience', '--jwt-audience'],
  ] as const) {
    if (key === 'issuer' ? issuer !== undefined : audience.length > 0) continue;
    const message = `tokens need auth.jwt.${key} (${flag}): without it those made for others would count`;
    sink.problems.push({ where: at(url === undefined ? 'jwks_file' : 'jwks_url'), message });
  }
  return {
    jwt: {
      keys,
      issuer: issuer ?? '',
      audience,
      algorithms: jwt.algorithms.map((name) => ALGORITHM_NAMES[name] ?? name.toUpperCase()),
      tenantClaim: jwt.tenant_claim,
      clockToleranceMs: jwt.clock_tolerance,
      refreshMs: jwt.refresh,
    },
  };
}

function readTenant({ file, locate }: BuildInput, sink: Sink): Config['tenant'] {
  const { header, trusted_proxies: trustedProxies = [], limits: all, own_limits: own = [] } = file.tenant;
  const limits: TenantLimit = {
    requestsPerMinute: all.requests_per_minute,
    tokensPerMinute: all.tokens_per_minute,
    concurrency: all.concurrency,
  };
  const ownLimits: Record<string, TenantLimit> = {};
  for (const [i, { name, ...mine }] of own.entries()) {
    if (Object.hasOwn(ownLimits, name)) {
      const where = locate(['tenant', 'own_limits', i, 'name']);
      sink.problems.push({ where, message: `"${name}" is there twice; a tenant has one entry` });
    }
    ownLimits[name] = {
      requestsPerMinute: mine.requests_per_minute ?? limits.requestsPerMinute,
      tokensPerMinute: mine.tokens_per_minute ?? limits.tokensPerMinute,
      concurrency: mine.concurrency ?? limits.concurrency,
    };
  }
  if (header !== undefined && trustedProxies.length === 0) {
    const where = locate(['tenant', 'header']);
    sink.warnings.push({
      where,
      message: 'has no effect without tenant.trusted_proxies (--trusted-proxy): nobody else may name tenants',
    });
  }
  return { ...(header === undefined ? {} : { header }), trustedProxies, limits, ownLimits };
}

function readRpc(input: BuildInput, sink: Sink): Config['rpc'] {
  const {
    host,
    port,
    insecure,
    socket,
    tokens_file: tokensFile,
    tls,
    max_connections: maxConnections,
  } = input.file.rpc;
  return {
    host,
    port,
    insecure,
    ...(socket === undefined ? {} : { socket }),
    ...(tokensFile === undefined ? {} : { tokensFile }),
    ...readTls(tls, ['rpc', 'tls'], '--rpc-tls', input, sink),
    maxConnections,
  };
}

function readAdmin(input: BuildInput, sink: Sink): Config['admin'] {
  const { host, port, insecure, tokens_file: tokensFile, tls, max_connections: maxConnections } = input.file.admin;
  return {
    host,
    port,
    insecure,
    ...(tokensFile === undefined ? {} : { tokensFile }),
    ...readTls(tls, ['admin', 'tls'], '--admin-tls', input, sink),
    maxConnections,
  };
}

/** A certificate and its key go together, and authorities of clients with both. */
function readTls(
  { cert, key, client_ca: clientCa }: FileConfig['rpc']['tls'],
  path: readonly string[],
  flag: string,
  { locate }: BuildInput,
  sink: Sink,
): { readonly tls?: TlsConfig } {
  if (cert !== undefined && key !== undefined) {
    return { tls: { cert, key, ...(clientCa === undefined ? {} : { clientCa }) } };
  }
  if ((cert ?? key ?? clientCa) !== undefined) {
    const missing = cert === undefined ? 'cert' : 'key';
    sink.problems.push({ where: locate(path), message: `TLS needs ${path.join('.')}.${missing} (${flag}-${missing})` });
  }
  return {};
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
    const path = ['pools', role, 'connector'];
    const connector =
      pool.connector === undefined
        ? kvConnector
        : resolveName(pool.connector, known.connectors, connectorKey, { where: locate(path), path }, sink);
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
    return [{ item, ...placeOfInstance(i, locate) }];
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
