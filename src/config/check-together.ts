import type { BuildInput, Sink } from './build-input.ts';
import { type AdminConfig, type Config, ROLE_NAMES, type RoleName } from './config.ts';
import { remoteSources } from './discovery.ts';
import { isLoopback } from './instance-url.ts';
import type { ListenPort } from './values.ts';
import { isRecord } from './yaml-source.ts';

/** Reports what only shows when several settings are seen together: contradictions, and what has no effect. */
export function checkTogether(config: Config, input: BuildInput, sink: Sink): void {
  checkRoles(config, input, sink);
  checkListeners(config, input, sink);
  checkAuth(config, input, sink);
  checkTenants(config, input, sink);
  checkStore(config, input, sink);
  checkReuse(config, input, sink);
  checkEngines(config, input, sink);
  checkFlagsOfOthers(config, input, sink);
}

/** What one role alone looks at, beside the sources of the registry. */
const READ_BY: Readonly<Partial<Record<RoleName, readonly (readonly string[])[]>>> = {
  facade: [['facade', 'host'], ['facade', 'port'], ['router_url'], ['timeouts', 'queue']],
  router: [
    ['policy', 'prefill'],
    ['policy', 'decode'],
    ['policies', 'cache_aware', 'cache_threshold'],
    ['policies', 'cache_aware', 'balance_abs_threshold'],
    ['policies', 'cache_aware', 'balance_rel_threshold'],
  ],
  kvstore: [
    ['store', 'backend'],
    ['store', 'valkey', 'url'],
    ['store', 'snapshot_file'],
  ],
};

/** A command line is for this process alone; a file and variables may be those of all processes. */
function checkFlagsOfOthers({ roles }: Config, { locate }: BuildInput, sink: Sink): void {
  for (const role of ROLE_NAMES) {
    if (roles.includes(role)) continue;
    const flags = (READ_BY[role] ?? []).map(locate).filter((where) => where.startsWith('--'));
    for (const where of new Set(flags)) {
      sink.warnings.push({ where, message: `has no effect, because the ${role} does not run here (--roles)` });
    }
  }
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
  if (admin.port !== 'off' && !isLoopback(admin.host)) checkReach('admin', admin, input, sink);
  if (rpc.port !== 'off' && !isLoopback(rpc.host)) checkReach('rpc', rpc, input, sink);
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

/** The RPC or the admin port on an address that other machines reach. */
function checkReach(name: 'rpc' | 'admin', listener: AdminConfig, input: BuildInput, sink: Sink): void {
  const { host, tls, tokensFile, insecure } = listener;
  const where = input.locate([name, 'host']);
  const known = tokensFile !== undefined || tls?.clientCa !== undefined;
  if (!known && !insecure) {
    sink.problems.push({
      where,
      message: `other machines reach ${host}, and the ${name} port knows no callers; give tokens (--${name}-tokens-file) or authorities of certificates (--${name}-tls-client-ca), use 127.0.0.1, or allow it with --insecure-${name}`,
    });
  }
  if (tokensFile !== undefined && tls === undefined) {
    sink.warnings.push({ where, message: `tokens cross the network to ${host} without TLS (--${name}-tls-cert)` });
  }
}

function overlap(a: string, b: string): boolean {
  return (
    a === b ||
    [a, b].some((host) => host === '0.0.0.0' || host === '::') ||
    (isLoopback(a) && isLoopback(b) && [a, b].includes('localhost'))
  );
}

/** What limits tenants where anybody can come as another one. */
function checkTenants({ roles, auth, tenant }: Config, input: BuildInput, sink: Sink): void {
  const hasLimits = [tenant.limits, ...Object.values(tenant.ownLimits)].some((limit) =>
    Object.values(limit).some((value) => value > 0),
  );
  const isKnown = auth.apiKeysFile !== undefined || auth.jwt !== undefined || tenant.header !== undefined;
  if (!hasLimits || isKnown || !roles.includes('facade')) return;
  sink.warnings.push({
    where: input.locate(['tenant']),
    message:
      'limits nobody who wants more: without keys (--api-keys-file) a client with another credential is another tenant',
  });
}

function checkAuth(config: Config, input: BuildInput, sink: Sink): void {
  const { apiKeysFile, jwt } = config.auth;
  if (apiKeysFile === undefined && jwt === undefined) return;
  const where = input.locate(apiKeysFile === undefined ? ['auth', 'jwt'] : ['auth', 'api_keys_file']);
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
  for (const role of ['prefill', 'decode'] as const) {
    if (sim?.[role] !== 0) continue;
    sink.warnings.push({
      where: `--sim-${role} 0`,
      message: `no ${role} engine is simulated; requests wait for one in the queue and then fail`,
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
    ![...instances, ...Object.values(config.instanceDefaults)].some(({ apiKey }) => apiKey !== undefined)
  ) {
    sink.problems.push({
      where: input.locate(['engine_auth']),
      message: '"replace" needs a key: set OPENAI_API_KEY or an api_key',
    });
  }
}
