import type { Problem } from './problem.ts';
import { suggest } from './suggest.ts';

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

/** Raw values by flag name, not yet checked; a switch given as a flag is the text `true`. */
export type RawFlags = Readonly<Record<string, string | readonly string[]>>;

/** The values of one source, with the name under which the user knows each. */
export interface Layer {
  readonly values: RawFlags;
  nameOf(flag: string): string;
}

const LISTEN = 'Listening:';
const ENGINES = 'Engines:';
const ROUTING = 'Routing and KV:';
const PROCESS = 'Process:';
const SPLIT = 'Services in other processes:';
const EXAMPLES = 'Flags of the example proxies:';

/** Every flag of `baton serve` in the order of the help; a general one (`policy`) before those that refine it. */
export const FLAGS: readonly FlagSpec[] = [
  {
    name: 'prefill',
    kind: 'list-add',
    value: 'url',
    group: ENGINES,
    about: 'prefill engine, http(s)://host[:port][/prefix] (repeatable)',
  },
  { name: 'decode', kind: 'list-add', value: 'url', group: ENGINES, about: 'decode engine (repeatable)' },
  {
    name: 'pool-file',
    kind: 'value',
    value: 'file',
    paths: [['discovery', 'file']],
    group: ENGINES,
    about: 'file with more engines, read again when it changes (none)',
  },
  {
    name: 'prefill-dns',
    kind: 'list-add',
    value: 'name',
    paths: [['discovery', 'dns', 'prefill']],
    group: ENGINES,
    about: 'DNS name:port whose addresses are prefill engines (repeatable)',
  },
  {
    name: 'decode-dns',
    kind: 'list-add',
    value: 'name',
    paths: [['discovery', 'dns', 'decode']],
    group: ENGINES,
    about: 'the same for decode engines',
  },
  {
    name: 'kubernetes-selector',
    kind: 'value',
    value: 'labels',
    paths: [['discovery', 'kubernetes', 'selector']],
    group: ENGINES,
    about: 'EndpointSlices with these labels are engines (none)',
  },
  {
    name: 'kubernetes-namespace',
    kind: 'value',
    value: 'name',
    paths: [['discovery', 'kubernetes', 'namespace']],
    group: ENGINES,
    about: 'their namespace (that of the pod); *: all',
  },
  {
    name: 'engine-auth',
    kind: 'value',
    value: 'mode',
    paths: [['engine_auth']],
    group: ENGINES,
    about: 'Authorization toward engines: auto, replace, forward, strip',
  },
  { name: 'sim', kind: 'switch', group: ENGINES, about: 'start simulated engines in this process' },
  { name: 'sim-prefill', kind: 'value', value: 'n', group: ENGINES, about: 'simulated prefill engines (2)' },
  { name: 'sim-decode', kind: 'value', value: 'n', group: ENGINES, about: 'simulated decode engines (2)' },

  {
    name: 'host',
    kind: 'value',
    value: 'addr',
    paths: [['facade', 'host']],
    group: LISTEN,
    about: 'address of the OpenAI API (0.0.0.0)',
  },
  {
    name: 'port',
    kind: 'value',
    value: 'port',
    paths: [['facade', 'port']],
    group: LISTEN,
    about: 'its port (8000); 0: any free port, off: none',
  },
  {
    name: 'api-keys-file',
    kind: 'value',
    value: 'file',
    paths: [['auth', 'api_keys_file']],
    group: LISTEN,
    about: 'keys of clients, a tenant and a hash a line (none)',
  },
  {
    name: 'rpc-host',
    kind: 'value',
    value: 'addr',
    paths: [['rpc', 'host']],
    group: LISTEN,
    about: 'address of the RPC services (127.0.0.1)',
  },
  {
    name: 'rpc-port',
    kind: 'value',
    value: 'port',
    paths: [['rpc', 'port']],
    group: LISTEN,
    about: 'their port (50051)',
  },
  {
    name: 'insecure-rpc',
    kind: 'switch',
    paths: [['rpc', 'insecure']],
    group: LISTEN,
    about: 'let other machines reach RPC without authentication',
  },
  {
    name: 'rpc-socket',
    kind: 'value',
    value: 'path',
    paths: [['rpc', 'socket']],
    group: LISTEN,
    about: 'unix socket beside the RPC port (none)',
  },
  {
    name: 'rpc-tokens-file',
    kind: 'value',
    value: 'file',
    paths: [['rpc', 'tokens_file']],
    group: LISTEN,
    about: 'tokens of RPC callers, a tenant and a hash a line (none)',
  },
  {
    name: 'rpc-tls-cert',
    kind: 'value',
    value: 'file',
    paths: [['rpc', 'tls', 'cert']],
    group: LISTEN,
    about: 'certificate of the RPC port, PEM (no TLS)',
  },
  {
    name: 'rpc-tls-key',
    kind: 'value',
    value: 'file',
    paths: [['rpc', 'tls', 'key']],
    group: LISTEN,
    about: 'its private key',
  },
  {
    name: 'rpc-tls-client-ca',
    kind: 'value',
    value: 'file',
    paths: [['rpc', 'tls', 'client_ca']],
    group: LISTEN,
    about: 'RPC callers need a certificate of these authorities (none)',
  },
  {
    name: 'admin-host',
    kind: 'value',
    value: 'addr',
    paths: [['admin', 'host']],
    group: LISTEN,
    about: 'address of metrics and administration (127.0.0.1)',
  },
  {
    name: 'admin-port',
    kind: 'value',
    value: 'port',
    paths: [['admin', 'port']],
    group: LISTEN,
    about: 'their port (29000)',
  },
  {
    name: 'insecure-admin',
    kind: 'switch',
    paths: [['admin', 'insecure']],
    group: LISTEN,
    about: 'let other machines reach admin without authentication',
  },

  {
    name: 'policy',
    kind: 'value',
    value: 'name',
    paths: [
      ['policy', 'prefill'],
      ['policy', 'decode'],
    ],
    group: ROUTING,
    about: 'how instances are chosen (round_robin)',
  },
  {
    name: 'prefill-policy',
    kind: 'value',
    value: 'name',
    paths: [['policy', 'prefill']],
    group: ROUTING,
    about: 'the same for prefill only',
  },
  {
    name: 'decode-policy',
    kind: 'value',
    value: 'name',
    paths: [['policy', 'decode']],
    group: ROUTING,
    about: 'the same for decode only',
  },
  {
    name: 'cache-threshold',
    kind: 'value',
    value: 'share',
    paths: [['policies', 'cache_aware', 'cache_threshold']],
    group: ROUTING,
    about: 'cache_aware: share of a prompt that must be known (0.3)',
  },
  {
    name: 'balance-abs-threshold',
    kind: 'value',
    value: 'n',
    paths: [['policies', 'cache_aware', 'balance_abs_threshold']],
    group: ROUTING,
    about: 'cache_aware: legs more than the idlest, too many by number (64)',
  },
  {
    name: 'balance-rel-threshold',
    kind: 'value',
    value: 'factor',
    paths: [['policies', 'cache_aware', 'balance_rel_threshold']],
    group: ROUTING,
    about: 'and by factor (1.5)',
  },
  {
    name: 'kv-connector',
    kind: 'value',
    value: 'name',
    paths: [['kv_connector']],
    group: ROUTING,
    about: 'KV connector of the engines (nixl)',
  },
  {
    name: 'reuse-guard',
    kind: 'value',
    value: 'mode',
    paths: [['reuse', 'guard']],
    group: ROUTING,
    about: 'proof before KV is reused: exact, history, off (exact)',
  },
  {
    name: 'unsafe-reuse',
    kind: 'switch',
    paths: [['reuse', 'unsafe']],
    group: ROUTING,
    about: 'allow the guards history and off',
  },
  {
    name: 'queue-timeout',
    kind: 'value',
    value: 'time',
    paths: [['timeouts', 'queue']],
    group: ROUTING,
    about: 'how long a request waits for an instance (30s)',
  },

  {
    name: 'config',
    kind: 'value',
    value: 'file',
    group: PROCESS,
    about: 'YAML file; flags and BATON_* variables go before it',
  },
  {
    name: 'store',
    kind: 'value',
    value: 'name',
    paths: [['store', 'backend']],
    group: PROCESS,
    about: 'where the KV cache store keeps entries: memory, valkey (memory)',
  },
  {
    name: 'valkey-url',
    kind: 'value',
    value: 'url',
    paths: [['store', 'valkey', 'url']],
    group: PROCESS,
    about: 'server of the valkey store (none)',
  },
  {
    name: 'store-snapshot',
    kind: 'value',
    value: 'file',
    paths: [['store', 'snapshot_file']],
    group: PROCESS,
    about: 'keeps the entries of the memory store over a restart (none)',
  },
  {
    name: 'registry-state',
    kind: 'value',
    value: 'file',
    paths: [['registry', 'state_file']],
    group: PROCESS,
    about: 'keeps registered engines and drains over a restart (none)',
  },
  {
    name: 'log-level',
    kind: 'value',
    value: 'level',
    paths: [['log', 'level']],
    group: PROCESS,
    about: 'trace, debug, info, warn, error, fatal, silent (info)',
  },
  {
    name: 'log-format',
    kind: 'value',
    value: 'form',
    paths: [['log', 'format']],
    group: PROCESS,
    about: 'json or pretty (pretty on a terminal)',
  },
  {
    name: 'drain-timeout',
    kind: 'value',
    value: 'time',
    paths: [['timeouts', 'drain']],
    group: PROCESS,
    about: 'how long a stop waits for running requests (180s)',
  },
  {
    name: 'drain-settle',
    kind: 'value',
    value: 'time',
    paths: [['timeouts', 'drain_settle']],
    group: PROCESS,
    about: 'how long SIGTERM only ends readiness before accepting ends (5s)',
  },

  {
    name: 'roles',
    kind: 'value',
    value: 'list',
    paths: [['roles']],
    group: SPLIT,
    about: 'services that run here: facade,router,kvstore,registry (all)',
  },
  {
    name: 'router-url',
    kind: 'value',
    value: 'url',
    paths: [['router_url']],
    group: SPLIT,
    about: 'router in another process',
  },
  {
    name: 'kvstore-url',
    kind: 'value',
    value: 'url',
    paths: [['kvstore_url']],
    group: SPLIT,
    about: 'KV cache store in another process',
  },
  {
    name: 'registry-url',
    kind: 'value',
    value: 'url',
    paths: [['registry_url']],
    group: SPLIT,
    about: 'pool registry in another process',
  },
  {
    name: 'rpc-client-token-file',
    kind: 'value',
    value: 'file',
    paths: [['rpc_client', 'token_file']],
    group: SPLIT,
    about: 'token for their RPC ports (BATON_RPC_TOKEN)',
  },
  {
    name: 'rpc-client-ca',
    kind: 'value',
    value: 'file',
    paths: [['rpc_client', 'ca']],
    group: SPLIT,
    about: 'authorities of their certificates, PEM',
  },
  {
    name: 'rpc-client-cert',
    kind: 'value',
    value: 'file',
    paths: [['rpc_client', 'cert']],
    group: SPLIT,
    about: 'certificate shown to them, PEM',
  },
  {
    name: 'rpc-client-key',
    kind: 'value',
    value: 'file',
    paths: [['rpc_client', 'key']],
    group: SPLIT,
    about: 'its private key',
  },

  {
    name: 'prefiller-host',
    alias: 'prefiller-hosts',
    kind: 'list-replace',
    value: 'host',
    group: EXAMPLES,
    about: 'prefill hosts, one per port, or a comma list',
  },
  {
    name: 'prefiller-port',
    alias: 'prefiller-ports',
    kind: 'list-replace',
    value: 'port',
    group: EXAMPLES,
    about: 'prefill ports',
  },
  {
    name: 'decoder-host',
    alias: 'decoder-hosts',
    kind: 'list-replace',
    value: 'host',
    group: EXAMPLES,
    about: 'decode hosts',
  },
  {
    name: 'decoder-port',
    alias: 'decoder-ports',
    kind: 'list-replace',
    value: 'port',
    group: EXAMPLES,
    about: 'decode ports',
  },
  {
    name: 'num-prefillers',
    kind: 'value',
    value: 'n',
    group: EXAMPLES,
    about: 'one host, one port: this many consecutive ports',
  },
  { name: 'num-decoders', kind: 'value', value: 'n', group: EXAMPLES, about: 'the same for decode' },
  {
    name: 'decoder-init-port',
    alias: 'decoder-init-ports',
    kind: 'list-replace',
    value: 'port',
    paths: [['lmcache', 'decoder_init_ports']],
    group: EXAMPLES,
    about: 'LMCache handshake ports of the decoders (8300)',
  },
  {
    name: 'decoder-alloc-port',
    alias: 'decoder-alloc-ports',
    kind: 'list-replace',
    value: 'port',
    paths: [['lmcache', 'decoder_alloc_ports']],
    group: EXAMPLES,
    about: 'LMCache allocation ports of the decoders (8400)',
  },
  {
    name: 'decoder-query-port',
    alias: 'decoder-query-ports',
    kind: 'list-replace',
    value: 'port',
    paths: [['lmcache', 'decoder_query_ports']],
    group: EXAMPLES,
    about: 'LMCache query ports of the decoders (none)',
  },
  {
    name: 'pd-buffer-size',
    kind: 'value',
    value: 'bytes',
    paths: [['lmcache', 'pd_buffer_size']],
    group: EXAMPLES,
    about: 'LMCache buffer of a decoder (2GiB)',
  },
  {
    name: 'chunk-size',
    kind: 'value',
    value: 'n',
    paths: [['lmcache', 'chunk_size']],
    group: EXAMPLES,
    about: 'LMCache tokens of a chunk (256)',
  },
  {
    name: 'proxy-host',
    kind: 'value',
    value: 'addr',
    paths: [['lmcache', 'proxy_host']],
    group: EXAMPLES,
    about: 'LMCache notice socket (localhost)',
  },
  {
    name: 'proxy-port',
    kind: 'value',
    value: 'port',
    paths: [['lmcache', 'proxy_port']],
    group: EXAMPLES,
    about: 'its port (8500)',
  },
];

/** The variable that stands for a flag: `rpc-port` is BATON_RPC_PORT. */
export function envName(flag: string): string {
  return `BATON_${flag.toUpperCase().replaceAll('-', '_')}`;
}

/** Makes the layer of the command line. */
export function flagLayer(values: RawFlags): Layer {
  return { values, nameOf: (flag) => `--${flag}` };
}

/** Reads the `BATON_*` variables; an empty one counts as not set. */
export function envLayer(env: Readonly<Record<string, string | undefined>>): {
  readonly layer: Layer;
  readonly warnings: readonly Problem[];
} {
  const values: Record<string, string | readonly string[]> = {};
  const warnings: Problem[] = [];
  const known: string[] = [];
  for (const flag of FLAGS) {
    const names = [flag.name, ...(flag.alias === undefined ? [] : [flag.alias])].map(envName);
    known.push(...names);
    const name = names.find((candidate) => (env[candidate] ?? '').trim() !== '');
    const text = name === undefined ? undefined : env[name];
    if (name === undefined || text === undefined) continue;
    // Kubernetes sets BATON_PORT=tcp://10.0.0.1:8000 in every pod beside a service that is called "baton".
    if (name.endsWith('_PORT') && /^[a-z]+:\/\//.test(text)) {
      warnings.push({ where: name, message: 'ignored, because Kubernetes set it for a service of that name' });
      continue;
    }
    values[flag.name] =
      flag.kind === 'list-replace' || flag.kind === 'list-add' ? text.trim().split(/\s+/) : text.trim();
  }
  for (const name of Object.keys(env)) {
    if (!name.startsWith('BATON_') || known.includes(name)) continue;
    // A near miss is a slip; anything else belongs to Kubernetes or to the user's own scripts.
    const near = suggest(name, known, 2);
    if (near !== undefined) warnings.push({ where: name, message: `ignored; did you mean ${near}?` });
  }
  return { layer: { values, nameOf: envName }, warnings };
}
