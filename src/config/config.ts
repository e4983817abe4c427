import type { InstanceSpec } from '../core/instance-spec.ts';
import type { PolicySettings } from '../core/policy.ts';
import type { TenantLimit } from '../core/tenant.ts';
import type { ValkeySettings } from '../core/valkey-settings.ts';
import type { DiscoveryConfig, InstanceDefaults } from './discovery.ts';
import type { InstanceLmcache, LmcacheConfig } from './lmcache.ts';
import type { ListenPort, Network } from './values.ts';

/** A service that `baton serve` can run. */
export type RoleName = 'facade' | 'router' | 'kvstore' | 'registry';
/** How the client's `Authorization` header is treated on the way to an engine. */
export type EngineAuth = 'auto' | 'replace' | 'forward' | 'strip';
/** How it is proven that stored KV belongs to a new prompt. */
export type ReuseGuard = 'exact' | 'history' | 'off';
/** Lowest level of log lines that are written. */
export type LogLevel = 'trace' | 'debug' | 'info' | 'warn' | 'error' | 'fatal' | 'silent';

/** One listener. */
export interface ListenConfig {
  readonly host: string;
  readonly port: ListenPort;
  /** True lets it listen without authentication on an address that other machines reach. */
  readonly insecure: boolean;
}

/** TLS of a listener; files are paths as given. */
export interface TlsConfig {
  readonly cert: string;
  readonly key: string;
  /** Authorities of the certificates that clients must show. */
  readonly clientCa?: string;
}

/** The admin port; files are paths as given. */
export interface AdminConfig extends ListenConfig {
  /** File with the hashes of operators' tokens; absent: those of the RPC port, for changes alone. */
  readonly tokensFile?: string;
  readonly tls?: TlsConfig;
  readonly maxConnections: number;
}

/** The RPC port; files are paths as given. */
export interface RpcConfig extends ListenConfig {
  /** Path of a unix socket beside the port. */
  readonly socket?: string;
  /** File with the hashes of tokens; absent: callers need none. */
  readonly tokensFile?: string;
  readonly tls?: TlsConfig;
  readonly maxConnections: number;
}

/** Signed tokens of clients; times in milliseconds. */
export interface JwtConfig {
  /** Where the keys of the issuer are: an address, or a file. */
  readonly keys: { readonly url: string } | { readonly file: string };
  readonly issuer: string;
  readonly audience: readonly string[];
  readonly algorithms: readonly string[];
  readonly tenantClaim: string;
  readonly clockToleranceMs: number;
  readonly refreshMs: number;
}

/** Who may say which tenant a request is of, and what tenants may use. */
export interface TenantConfig {
  /** Header in which trusted proxies name the tenant. */
  readonly header?: string;
  readonly trustedProxies: readonly Network[];
  readonly limits: TenantLimit;
  /** In place of `limits`. */
  readonly ownLimits: Readonly<Record<string, TenantLimit>>;
}

/** What this process shows to the RPC ports of others, and believes of them; files are paths as given. */
export interface RpcClientConfig {
  readonly tokenFile?: string;
  /** From BATON_RPC_TOKEN; never logged. */
  readonly token?: string;
  readonly ca?: string;
  readonly cert?: string;
  readonly key?: string;
}

/** One engine server that the registry starts with. */
export interface InstanceConfig extends InstanceSpec {
  /** What this engine has of its own for the lmcache connector. */
  readonly lmcache?: InstanceLmcache;
}

/** Everything that can be set; durations in milliseconds (0 = off), sizes in bytes. */
export interface Config {
  readonly roles: readonly RoleName[];
  /** Base URL of a router in another process; set exactly when a role that runs here needs it. */
  readonly routerUrl?: string;
  readonly kvstoreUrl?: string;
  readonly registryUrl?: string;
  readonly facade: {
    readonly host: string;
    readonly port: ListenPort;
    readonly bodyLimitBytes: number;
    readonly clientKvTransferParams: 'refuse' | 'drop';
    readonly holdBytes: number;
    readonly streamBufferBytes: number;
    readonly metrics: boolean;
    readonly tls?: TlsConfig;
    readonly maxConnections: number;
    readonly headerBytes: number;
    readonly headerCount: number;
    readonly headerMs: number;
  };
  readonly auth: {
    /** File with the hashes of clients' keys; absent: clients need none. */
    readonly apiKeysFile?: string;
    readonly jwt?: JwtConfig;
  };
  readonly tenant: TenantConfig;
  readonly rpc: RpcConfig;
  readonly rpcClient: RpcClientConfig;
  readonly admin: AdminConfig;
  readonly store: StoreConfig;
  readonly kvConnector: string;
  readonly policy: { readonly prefill: string; readonly decode: string };
  /** Settings of the policies that have some. */
  readonly policies: PolicySettings;
  readonly instances: readonly InstanceConfig[];
  /** What instances that are not in the settings have by their role. */
  readonly instanceDefaults: InstanceDefaults;
  readonly discovery: DiscoveryConfig;
  readonly registry: {
    /** File that keeps registered instances and drains over a restart. */
    readonly stateFile?: string;
  };
  readonly engineAuth: EngineAuth;
  /** From OPENAI_API_KEY; never logged. */
  readonly openaiApiKey?: string;
  readonly kv: {
    readonly remoteHost: 'keep' | 'instance' | 'auto';
    readonly leaseMarginMs: number;
    readonly forwardTokenIds: boolean;
  };
  readonly reuse: {
    readonly guard: ReuseGuard;
    readonly unsafe: boolean;
    readonly autolink: boolean;
    /** Pinned share of a decode instance's blocks above which idle handles are given back; 0: never. */
    readonly pinWatermark: number;
    readonly decodeStream: 'as_client' | 'convert';
    readonly minSavedTokens: number;
  };
  readonly disagg: { readonly minUncachedTokens: number; readonly localTailTokens: number };
  readonly identity: { readonly headers: readonly string[]; readonly clientBound: boolean };
  readonly timeouts: TimeoutsConfig;
  readonly queue: { readonly max: number; readonly tenantMax: number };
  /** Most requests at a time, 0 = no limit. */
  readonly limits: { readonly requests: number; readonly prefill: number; readonly decode: number };
  readonly retry: { readonly budgetPercent: number };
  readonly breaker: { readonly failures: number; readonly pairFailures: number; readonly openMs: number };
  readonly health: HealthConfig;
  readonly log: { readonly level: LogLevel; readonly format: 'json' | 'pretty' };
  readonly tracing: {
    /** Base URL of a collector that takes OTLP over HTTP; absent where no traces are wanted. */
    readonly otlpEndpoint?: string;
    /** Of the traces that begin here, 0 to 1. */
    readonly sampleRatio: number;
    readonly serviceName: string;
  };
  readonly lmcache: LmcacheConfig;
  /** Present when simulated engines are to be started; `instances` is then empty. */
  readonly sim?: SimConfig;
}

/** The KV cache store of this process. */
export interface StoreConfig {
  readonly backend: string;
  /** File that keeps the memory backend's entries over a restart. */
  readonly snapshotFile?: string;
  readonly maxBytes: number;
  readonly tenantEntries: number;
  readonly tenantBytes: number;
  /** Present with the backend `valkey`. */
  readonly valkey?: ValkeySettings;
}

/** Time limits in milliseconds; 0 turns one off. */
export interface TimeoutsConfig {
  readonly connectMs: number;
  readonly storeMs: number;
  readonly tokenizeMs: number;
  readonly prefillWarmMs: number;
  readonly prefillWarmPerTokenMs: number;
  readonly prefillColdMs: number;
  readonly firstContentMs: number;
  readonly wholeReplyMs: number;
  readonly idleMs: number;
  readonly clientStallMs: number;
  readonly queueMs: number;
  readonly routerMs: number;
  readonly drainMs: number;
  readonly drainSettleMs: number;
  readonly keepAliveMs: number;
}

/** Health checks; times in milliseconds. */
export interface HealthConfig {
  readonly intervalMs: number;
  readonly timeoutMs: number;
  readonly failures: number;
  readonly dampingMs: number;
  readonly slowStartMs: number;
}

/** How many simulated engines of each kind run in the process. */
export interface SimConfig {
  readonly prefill: number;
  readonly decode: number;
}

/** Every service, in the order in which they start. */
export const ROLE_NAMES = ['kvstore', 'registry', 'router', 'facade'] as const satisfies readonly RoleName[];
