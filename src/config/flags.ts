/**
 * What follows a flag: nothing; one text; a list of which a later occurrence replaces the earlier one, as in the example
 * proxies; or a list to which each occurrence adds.
 */
export type FlagKind = 'switch' | 'value' | 'list-replace' | 'list-add';

/** One flag of `baton serve`, which is also a `BATON_*` variable. */
export interface FlagSpec {
  readonly name: string;
  /** A second spelling. */
  readonly alias?: string;
  readonly kind: FlagKind;
  /** How its value is called in the help. */
  readonly value?: string;
  /** The keys of the file that it sets; none for flags that stand for engines or files. */
  readonly paths?: readonly (readonly string[])[];
  readonly group: string;
  readonly about: string;
}

type Row = Omit<FlagSpec, 'group'>;

const row =
  (kind: FlagKind) =>
  (name: string, value: string | undefined, about: string, ...keys: readonly string[]): Row => ({
    name,
    kind,
    about,
    ...(value !== undefined && { value }),
    ...(keys.length > 0 && { paths: keys.map((key) => key.split('.')) }),
  });

const one = row('value');
const many = row('list-add');

/** The example proxies spell it with or without an `s`. */
const list = (...[name, ...others]: Parameters<typeof one>): Row => ({
  ...row('list-replace')(name, ...others),
  alias: `${name}s`,
});

const toggle = (name: string, about: string, ...keys: readonly string[]) =>
  row('switch')(name, undefined, about, ...keys);

function group(title: string, rows: readonly Row[]): readonly FlagSpec[] {
  return rows.map((flag) => ({ ...flag, group: title }));
}

/**
 * Every flag of `baton serve` in the order of the help; a general one (`policy`) before those that refine it. A row has the
 * name, what its value is called, the line of the help, and the keys of the file.
 */
export const FLAGS: readonly FlagSpec[] = [
  ...group('Engines:', [
    many('prefill', 'url', 'prefill engine, http(s)://host[:port][/prefix] (repeatable)'),
    many('decode', 'url', 'decode engine (repeatable)'),
    one('pool-file', 'file', 'file with more engines, read again when it changes (none)', 'discovery.file'),
    many(
      'prefill-dns',
      'name',
      'DNS name:port whose addresses are prefill engines (repeatable)',
      'discovery.dns.prefill',
    ),
    many('decode-dns', 'name', 'the same for decode engines', 'discovery.dns.decode'),
    one(
      'kubernetes-selector',
      'labels',
      'EndpointSlices with these labels are engines (none)',
      'discovery.kubernetes.selector',
    ),
    one('kubernetes-namespace', 'name', 'their namespace (that of the pod); *: all', 'discovery.kubernetes.namespace'),
    one('engine-auth', 'mode', 'Authorization toward engines: auto, replace, forward, strip', 'engine_auth'),
    toggle('sim', 'start simulated engines in this process'),
    one('sim-prefill', 'n', 'simulated prefill engines (2)'),
    one('sim-decode', 'n', 'simulated decode engines (2)'),
  ]),
  ...group('Listening:', [
    one('host', 'addr', 'address of the OpenAI API (0.0.0.0)', 'facade.host'),
    one('port', 'port', 'its port (8000); 0: any free port, off: none', 'facade.port'),
    one('tls-cert', 'file', 'its certificate, PEM (no TLS)', 'facade.tls.cert'),
    one('tls-key', 'file', 'its private key', 'facade.tls.key'),
    one('tls-client-ca', 'file', 'clients need a certificate of these authorities (none)', 'facade.tls.client_ca'),
    one('api-keys-file', 'file', 'keys of clients, a tenant and a hash a line (none)', 'auth.api_keys_file'),
    one('jwks-url', 'url', 'keys of the issuer of tokens, JWKS (none)', 'auth.jwt.jwks_url'),
    one('jwks-file', 'file', 'file with these keys (none)', 'auth.jwt.jwks_file'),
    one('jwt-issuer', 'name', 'issuer of tokens', 'auth.jwt.issuer'),
    many('jwt-audience', 'name', 'audience of tokens (repeatable)', 'auth.jwt.audience'),
    one('tenant-header', 'name', 'header in which trusted proxies name the tenant (none)', 'tenant.header'),
    many('trusted-proxy', 'net', 'address or network of such proxies (repeatable)', 'tenant.trusted_proxies'),
    one('rpc-host', 'addr', 'address of the RPC services (127.0.0.1)', 'rpc.host'),
    one('rpc-port', 'port', 'their port (50051)', 'rpc.port'),
    toggle('insecure-rpc', 'let other machines reach RPC without authentication', 'rpc.insecure'),
    one('rpc-socket', 'path', 'unix socket beside the RPC port (none)', 'rpc.socket'),
    one('rpc-tokens-file', 'file', 'tokens of RPC callers, a tenant and a hash a line (none)', 'rpc.tokens_file'),
    one('rpc-tls-cert', 'file', 'certificate of the RPC port, PEM (no TLS)', 'rpc.tls.cert'),
    one('rpc-tls-key', 'file', 'its private key', 'rpc.tls.key'),
    one('rpc-tls-client-ca', 'file', 'RPC callers need a certificate of these authorities (none)', 'rpc.tls.client_ca'),
    one('admin-host', 'addr', 'address of metrics and administration (127.0.0.1)', 'admin.host'),
    one('admin-port', 'port', 'their port (29000)', 'admin.port'),
    one('admin-tokens-file', 'file', 'tokens of operators, a name and a hash a line (none)', 'admin.tokens_file'),
    one('admin-tls-cert', 'file', 'certificate of the admin port, PEM (no TLS)', 'admin.tls.cert'),
    one('admin-tls-key', 'file', 'its private key', 'admin.tls.key'),
    one(
      'admin-tls-client-ca',
      'file',
      'operators need a certificate of these authorities (none)',
      'admin.tls.client_ca',
    ),
    toggle('insecure-admin', 'let other machines reach admin without authentication', 'admin.insecure'),
  ]),
  ...group('Routing and KV:', [
    one('policy', 'name', 'how instances are chosen (round_robin)', 'policy.prefill', 'policy.decode'),
    one('prefill-policy', 'name', 'the same for prefill only', 'policy.prefill'),
    one('decode-policy', 'name', 'the same for decode only', 'policy.decode'),
    one(
      'cache-threshold',
      'share',
      'cache_aware: share of a prompt that must be known (0.3)',
      'policies.cache_aware.cache_threshold',
    ),
    one(
      'balance-abs-threshold',
      'n',
      'cache_aware: legs more than the idlest, too many by number (64)',
      'policies.cache_aware.balance_abs_threshold',
    ),
    one('balance-rel-threshold', 'factor', 'and by factor (1.5)', 'policies.cache_aware.balance_rel_threshold'),
    one('kv-connector', 'name', 'KV connector of the engines (nixl)', 'kv_connector'),
    one('reuse-guard', 'mode', 'proof before KV is reused: exact, history, off (exact)', 'reuse.guard'),
    one(
      'reuse-min-saved-tokens',
      'n',
      'tokens that a handle has to save; 0: use every one (64)',
      'reuse.min_saved_tokens',
    ),
    toggle('unsafe-reuse', 'allow the guards history and off', 'reuse.unsafe'),
    one('queue-timeout', 'time', 'how long a request waits for an instance (30s)', 'timeouts.queue'),
  ]),
  ...group('Process:', [
    one('config', 'file', 'YAML file; flags and BATON_* variables go before it'),
    one('store', 'name', 'where the KV cache store keeps entries: memory, valkey (memory)', 'store.backend'),
    one('valkey-url', 'url', 'server of the valkey store (none)', 'store.valkey.url'),
    one('store-snapshot', 'file', 'keeps the entries of the memory store over a restart (none)', 'store.snapshot_file'),
    one('registry-state', 'file', 'keeps registered engines and drains over a restart (none)', 'registry.state_file'),
    toggle('metrics-on-facade', 'also serve /metrics on the front door', 'facade.metrics'),
    one('otlp-endpoint', 'url', 'collector of traces, OTLP over HTTP (none)', 'tracing.otlp_endpoint'),
    one('log-level', 'level', 'trace, debug, info, warn, error, fatal, silent (info)', 'log.level'),
    one('log-format', 'form', 'json or pretty (pretty on a terminal)', 'log.format'),
    one('drain-timeout', 'time', 'how long a stop waits for running requests (180s)', 'timeouts.drain'),
    one(
      'drain-settle',
      'time',
      'how long SIGTERM only ends readiness before accepting ends (5s)',
      'timeouts.drain_settle',
    ),
  ]),
  ...group('Services in other processes:', [
    one('roles', 'list', 'services that run here: facade,router,kvstore,registry (all)', 'roles'),
    one('router-url', 'url', 'router in another process', 'router_url'),
    one('kvstore-url', 'url', 'KV cache store in another process', 'kvstore_url'),
    one('registry-url', 'url', 'pool registry in another process', 'registry_url'),
    one('rpc-client-token-file', 'file', 'token for their RPC ports (BATON_RPC_TOKEN)', 'rpc_client.token_file'),
    one('rpc-client-ca', 'file', 'authorities of their certificates, PEM', 'rpc_client.ca'),
    one('rpc-client-cert', 'file', 'certificate shown to them, PEM', 'rpc_client.cert'),
    one('rpc-client-key', 'file', 'its private key', 'rpc_client.key'),
  ]),
  ...group('Flags of the example proxies:', [
    list('prefiller-host', 'host', 'prefill hosts, one per port, or a comma list'),
    list('prefiller-port', 'port', 'prefill ports'),
    list('decoder-host', 'host', 'decode hosts'),
    list('decoder-port', 'port', 'decode ports'),
    one('num-prefillers', 'n', 'one host, one port: this many consecutive ports'),
    one('num-decoders', 'n', 'the same for decode'),
    list('decoder-init-port', 'port', 'LMCache handshake ports of the decoders (8300)', 'lmcache.decoder_init_ports'),
    list(
      'decoder-alloc-port',
      'port',
      'LMCache allocation ports of the decoders (8400)',
      'lmcache.decoder_alloc_ports',
    ),
    list('decoder-query-port', 'port', 'LMCache query ports of the decoders (none)', 'lmcache.decoder_query_ports'),
    one('pd-buffer-size', 'bytes', 'LMCache buffer of a decoder (2GiB)', 'lmcache.pd_buffer_size'),
    one('chunk-size', 'n', 'LMCache tokens of a chunk (256)', 'lmcache.chunk_size'),
    one('proxy-host', 'addr', 'LMCache notice socket (localhost)', 'lmcache.proxy_host'),
    one('proxy-port', 'port', 'its port (8500)', 'lmcache.proxy_port'),
  ]),
];
