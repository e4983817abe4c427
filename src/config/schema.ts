import * as z from 'zod';
import { authKeys, tenantKeys } from './client-keys.ts';
import { ROLE_NAMES, type RoleName } from './config.ts';
import { discoveryKeys } from './discovery.ts';
import { engineKeys, instanceSchema } from './engine-keys.ts';
import { field, live, optional, section } from './fields.ts';
import { parsePeerUrl, parseServerUrl } from './instance-url.ts';
import { lmcacheKeys } from './lmcache.ts';
import { policiesSection, policyPair } from './policy-keys.ts';
import { valkeyKeys } from './valkey.ts';
import {
  bad,
  choiceParser,
  countParser,
  type ListenPort,
  listParser,
  MAX_COUNT,
  numberParser,
  ok,
  parseBoolean,
  parseDuration,
  parseHeaderName,
  parseListenHost,
  parseListenPort,
  parseSize,
  parseText,
  type ValueParser,
} from './values.ts';

const parseRoles: ValueParser<readonly RoleName[]> = (raw) => {
  const roles = listParser(choiceParser(ROLE_NAMES))(raw);
  if (roles.kind === 'bad') return roles;
  if (roles.value.length === 0) return bad(`expected at least one of ${ROLE_NAMES.join(', ')}`);
  return ok(ROLE_NAMES.filter((role) => roles.value.includes(role)));
};

const parseHeaderNames: ValueParser<readonly string[]> = listParser(parseHeaderName);

const listen = (host: string, port: ListenPort, what: string) => ({
  host: field(parseListenHost, host, `Address ${what} listens on.`),
  port: field(parseListenPort, port, `Port ${what} listens on; 0 takes any free port, \`off\` opens no listener.`),
});

const tls = (what: string, who: string) =>
  section({
    cert: optional(parseText, 'none: no TLS', `Certificate of ${what} with its chain, a PEM file.`),
    key: optional(parseText, 'none', 'Its private key, a PEM file.'),
    client_ca: optional(parseText, 'none', `Authorities of the certificates that ${who} must show (mTLS), a PEM file.`),
  });

const maxConnections = (fallback: number) =>
  field(countParser(1, 1_000_000), fallback, 'Connections at a time; one more is closed at once.');

/** The whole of `baton.yaml`; flags and variables are laid over it before it is checked. */
export const fileSchema = z.strictObject({
  roles: field(parseRoles, ROLE_NAMES, 'Services that run in this process.'),
  router_url: optional(
    parsePeerUrl,
    'none',
    'Base URL of the RPC port of a router in another process, or `unix:/path`.',
  ),
  kvstore_url: optional(
    parsePeerUrl,
    'none',
    'Base URL of the RPC port of a KV cache store in another process, or `unix:/path`.',
  ),
  registry_url: optional(
    parsePeerUrl,
    'none',
    'Base URL of the RPC port of a pool registry in another process, or `unix:/path`.',
  ),
  facade: section({
    ...listen('0.0.0.0', 8000, 'the OpenAI-compatible front door'),
    body_limit: field(parseSize, '64MiB', 'Largest request body; a larger one is answered with 413.'),
    client_kv_transfer_params: live(
      field(
        choiceParser(['refuse', 'drop']),
        'refuse',
        'What happens to `kv_transfer_params` sent by a client: 400, or dropped.',
      ),
    ),
    hold: live(field(parseSize, '64KiB', 'How much of a reply is held back until its first content.')),
    stream_buffer: live(
      field(parseSize, '256KiB', 'How much of a stream waits for a slow client before reading from the engine stops.'),
    ),
    metrics: field(parseBoolean, false, 'Also serves `/metrics` on the front door.'),
    tls: tls('the front door', 'clients'),
    max_connections: maxConnections(20_000),
    header_limit: field(parseSize, '32KiB', 'Largest head of a request; a larger one is answered with 431.'),
    max_headers: field(countParser(10, 1000), 200, 'Header lines of a request; more are answered with 431.'),
    header_timeout: field(
      parseDuration,
      '30s',
      'For the head of a request to come, on a new connection too, and for a TLS handshake; then 408.',
    ),
  }),
  auth: section(authKeys),
  tenant: live(section(tenantKeys)),
  rpc: section({
    ...listen('127.0.0.1', 50051, 'the RPC port'),
    insecure: field(
      parseBoolean,
      false,
      'Allows the RPC port on an address that other machines reach, without tokens and without certificates of clients.',
    ),
    socket: optional(parseText, 'none', 'Path of a unix socket that serves the same as the RPC port.'),
    tokens_file: optional(parseText, 'none', 'File with the hashes of tokens; with it a caller needs one of them.'),
    tls: tls('the RPC port', 'callers'),
    max_connections: maxConnections(4096),
  }),
  rpc_client: section({
    token_file: optional(parseText, '`BATON_RPC_TOKEN`', 'File with the token for the RPC ports of other processes.'),
    ca: optional(parseText, 'those of Node', 'Authorities that `https:` URLs of other processes are checked against.'),
    cert: optional(parseText, 'none', 'Certificate shown to the RPC ports of other processes, a PEM file.'),
    key: optional(parseText, 'none', 'Its private key, a PEM file.'),
  }),
  admin: section({
    ...listen('127.0.0.1', 29000, 'the admin port'),
    insecure: field(
      parseBoolean,
      false,
      'Allows the admin port on an address that other machines reach, without tokens and without certificates of clients.',
    ),
    tokens_file: optional(
      parseText,
      'none: `rpc.tokens_file` for changes',
      'File with the hashes of tokens; with it whoever asks for anything but `/liveness` needs one of them.',
    ),
    tls: tls('the admin port', 'clients'),
    max_connections: maxConnections(1024),
  }),
  store: section({
    backend: field(parseText, 'memory', 'Where the KV cache store keeps entries: `memory` or `valkey`.'),
    snapshot_file: optional(
      parseText,
      'none',
      'File that keeps the entries of the `memory` backend over a restart; it is used up at the start.',
    ),
    max_bytes: field(parseSize, '1GiB', 'Bytes of all entries; over it the entry next to expire is evicted.'),
    tenant_entries: field(countParser(1, MAX_COUNT), 100_000, 'Live entries of one tenant.'),
    tenant_bytes: field(parseSize, '256MiB', 'Bytes of the entries of one tenant.'),
    valkey: section(valkeyKeys),
  }),
  kv_connector: field(parseText, 'nixl', "KV connector of the engines, in baton's or in vLLM's spelling."),
  policy: live(
    z.preprocess((raw) => (typeof raw === 'string' ? { prefill: raw, decode: raw } : (raw ?? {})), policyPair),
  ),
  policies: live(policiesSection),
  instances: live(z.preprocess((raw) => raw ?? undefined, z.array(instanceSchema).optional())),
  pools: live(section({ prefill: section(engineKeys), decode: section(engineKeys), both: section(engineKeys) })),
  discovery: live(section(discoveryKeys)),
  registry: section({
    state_file: optional(
      parseText,
      'none',
      'File that keeps registered instances, drains and what DNS and Kubernetes told last over a restart.',
    ),
  }),
  engine_auth: live(
    field(
      choiceParser(['auto', 'replace', 'forward', 'strip']),
      'auto',
      "The client's `Authorization` toward engines; `auto` is `replace` when a key for the engine is set, else `forward`, or `strip` where clients need keys or tokens (`auth`).",
    ),
  ),
  kv: section({
    remote_host: live(
      field(
        choiceParser(['keep', 'instance', 'auto']),
        'auto',
        '`remote_host` of a handle: `keep` it, replace it by the `instance` host, or (`auto`) replace only a loopback name.',
      ),
    ),
    lease_margin: live(field(parseDuration, '10s', 'A handle is not used in the last part of its lease.')),
    forward_token_ids: live(
      field(
        parseBoolean,
        true,
        'The decode leg carries the token ids that the prefill engine reports (vLLM 0.32 and 0.33), so that a prompt is rendered once.',
      ),
    ),
  }),
  reuse: section({
    guard: field(
      choiceParser(['exact', 'history', 'off']),
      'exact',
      'Proof that stored KV fits the new prompt; only `exact` is safe.',
    ),
    unsafe: field(parseBoolean, false, 'Allows `reuse.guard` to be `history` or `off`.'),
    autolink: live(field(parseBoolean, true, 'Finds a conversation by its history when the client names none.')),
    decode_stream: live(
      field(
        choiceParser(['as_client', 'convert']),
        'as_client',
        'On engines that give handles in whole replies alone (vLLM before 0.33): stream as the client asked, without reuse for the next turn, or `convert` the whole reply to a stream once it is there.',
      ),
    ),
    pin_watermark: live(
      field(
        numberParser(0, 1),
        0.6,
        "Share of a decode engine's KV blocks that idle handles may pin; above it the oldest are given back. 0 leaves them all to the engine's own limit.",
      ),
    ),
    min_saved_tokens: live(
      field(
        countParser(0, MAX_COUNT),
        64,
        'A handle is used only if it saves the prefill engine so many tokens beyond those that it likely holds; 0: always.',
      ),
    ),
  }),
  disagg: section({
    min_uncached_tokens: live(
      field(countParser(0, MAX_COUNT), 0, 'Shorter prompts stay on the decode engine; 0 always uses both.'),
    ),
    local_tail_tokens: live(
      field(
        countParser(0, MAX_COUNT),
        0,
        'A turn of which the last decode engine holds all but so many tokens stays on it; 0: it always goes through both.',
      ),
    ),
  }),
  identity: section({
    headers: live(
      field(parseHeaderNames, ['x-session-id', 'session-id'], 'Headers that name the conversation, first match wins.'),
    ),
    client_bound: field(parseBoolean, false, 'Binds a conversation to the same instances.'),
  }),
  timeouts: live(
    section({
      connect: field(parseDuration, '3s', 'Connecting to an engine.'),
      store: field(parseDuration, '20ms', 'An answer of the KV cache store.'),
      tokenize: field(parseDuration, '500ms', "An answer of an engine's `/tokenize`."),
      prefill_warm: field(parseDuration, '60s', 'A prefill that starts from stored KV.'),
      prefill_warm_per_token: field(
        parseDuration,
        '10ms',
        'Added to `prefill_warm` for every token that is not stored.',
      ),
      prefill_cold: field(parseDuration, '1800s', 'A prefill without stored KV.'),
      first_content: field(parseDuration, '600s', 'From the start of a streamed decode to its first content.'),
      whole_reply: field(
        parseDuration,
        '1800s',
        'From the start of the decode to the end of a reply that is not streamed.',
      ),
      idle: field(parseDuration, '300s', 'Between two events of a stream.'),
      client_stall: field(parseDuration, '60s', 'A client that takes no byte, or sends no more of its body.'),
      router: field(parseDuration, '10s', 'Waiting for a router in another process that is away.'),
      queue: field(parseDuration, '30s', 'Waiting for an instance to become routable.'),
      drain: field(parseDuration, '180s', 'Running requests at shutdown.'),
      drain_settle: field(
        parseDuration,
        '5s',
        'From SIGTERM, which ends readiness, to the end of accepting: for load balancers to notice.',
      ),
      keep_alive: field(
        parseDuration,
        '4s',
        "An unused connection to an engine; shorter than the engine's own 5 s; 0: each request has a connection of its own.",
      ),
    }),
  ),
  queue: live(
    section({
      max: field(countParser(0, MAX_COUNT), 1024, 'Requests that wait for an engine; more are answered with 503.'),
      tenant_max: field(
        countParser(0, MAX_COUNT),
        0,
        'Requests of one tenant that wait for an engine; more are answered with 429; 0: no limit of its own.',
      ),
    }),
  ),
  limits: live(
    section({
      requests: field(
        countParser(0, MAX_COUNT),
        0,
        'Requests that a router has running at a time; more wait; 0: no limit.',
      ),
      prefill: field(countParser(0, MAX_COUNT), 0, 'Legs that a prefill engine has at a time; 0: no limit.'),
      decode: field(
        countParser(0, MAX_COUNT),
        0,
        'Legs that a decode engine, or one of the role `both`, has at a time; its place is taken before the prefill leg; 0: no limit.',
      ),
    }),
  ),
  retry: live(section({ budget_percent: field(countParser(0, 100), 20, 'Retries per 100 requests.') })),
  breaker: live(
    section({
      failures: field(
        countParser(0, MAX_COUNT),
        5,
        'Failed legs in a row (transport errors, deadlines, 5xx; never 4xx) after which an engine is left alone for a while; 0: never.',
      ),
      pair_failures: field(countParser(0, MAX_COUNT), 3, 'The same for the hand-over between two engines; 0: never.'),
      open: field(
        parseDuration,
        '5s',
        'Until an engine or pair that was left alone is tried again; doubled with each trial that fails, up to eight times as long.',
      ),
    }),
  ),
  health: live(
    section({
      interval: field(parseDuration, '5s', 'Between two health checks of an engine.'),
      timeout: field(parseDuration, '2s', 'An answer to a health check.'),
      failures: field(countParser(1, 1000), 3, 'Failed checks in a row after which an engine is suspect.'),
      slow_start: field(
        parseDuration,
        '10s',
        'Until an engine that is new or was restarted gets its whole share from policies that weigh; 0: at once.',
      ),
      damping: field(
        parseDuration,
        '2s',
        'How long an engine that was lost twice within a minute must pass its checks before it gets requests again; doubled with each further loss, up to 16 times as long.',
      ),
    }),
  ),
  log: section({
    level: live(
      field(
        choiceParser(['trace', 'debug', 'info', 'warn', 'error', 'fatal', 'silent']),
        'info',
        'Lowest level that is written.',
      ),
    ),
    format: optional(choiceParser(['json', 'pretty']), '`pretty` on a terminal, else `json`', 'Form of log lines.'),
  }),
  tracing: section({
    otlp_endpoint: optional(
      parseServerUrl,
      'none',
      'Collector that takes traces by OTLP over HTTP, `http(s)://host[:port][/prefix]`; spans go to `/v1/traces` below it.',
    ),
    sample_ratio: field(
      numberParser(0, 1),
      1,
      'Share of the traces that begin here; a request that comes with a W3C `traceparent` goes by that.',
    ),
    service_name: field(parseText, 'baton', 'Name of the service in traces.'),
  }),
  lmcache: section(lmcacheKeys),
});

/** What `fileSchema` reads; keys in snake_case, units in milliseconds and bytes. */
export type FileConfig = z.output<typeof fileSchema>;
