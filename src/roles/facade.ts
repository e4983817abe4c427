import { randomBytes } from 'node:crypto';
import { create } from '@bufbuild/protobuf';
import { TokenChainSchema } from '../../gen/baton/v1/tokens_pb.ts';
import { fetchKeySet, KeyCache, parseKeySet, type TokenKeys } from '../auth/key-cache.ts';
import { createCheckToken, looksLikeToken } from '../auth/tokens.ts';
import type { Config, JwtConfig } from '../config/config.ts';
import { derive, follow, type Settings } from '../config/settings.ts';
import { CONNECTORS } from '../connectors/index.ts';
import { buildChain } from '../core/chain.ts';
import { findsByHistory, type LinkRules } from '../core/link.ts';
import { type ApiKeys, parseApiKeys, type TenantLimit } from '../core/tenant.ts';
import type { EngineClient } from '../engine/client.ts';
import { createAuthenticate, type TokenCheck } from '../http/authenticate.ts';
import type { FacadeService } from '../http/facade.ts';
import { buildFacadeService, type StoreHealth } from '../http/facade-service.ts';
import type { GenerateDeps } from '../http/generate.ts';
import type { ReplySink } from '../http/reply-sink.ts';
import { type ProxyRules, trustedPeers } from '../http/tenant-header.ts';
import type { Logger } from '../obs/log.ts';
import { createLogLimit } from '../obs/log-limit.ts';
import type { Metrics } from '../obs/metrics.ts';
import type { Tracer } from '../obs/tracer.ts';
import { POLICIES } from '../policies/index.ts';
import { neverReached } from '../rpc/errors.ts';
import type { FirstTokenDeps } from '../services/first-token-deps.ts';
import { isSameLife } from '../services/instance-record.ts';
import type { InstanceView } from '../services/instance-view.ts';
import { ReportSender } from '../services/report-sender.ts';
import { RetryBudget } from '../services/retry-budget.ts';
import { sha256 } from '../services/sha256.ts';
import { SilenceWatch } from '../services/silence-watch.ts';
import { TenantLimits } from '../services/tenant-limits.ts';
import type { EngineHeadersOf } from './credentials.ts';
import { type RouterLink, routerError } from './router-link.ts';
import { watchFiles, watchKeys } from './watched-files.ts';

/** What the facade of a process is made of. */
export interface FacadeParts extends RouterLink {
  readonly settings: Settings;
  readonly view: InstanceView;
  readonly metrics: Metrics;
  readonly log: Logger;
  readonly tracer: Tracer | undefined;
  readonly engines: EngineClient;
  readonly replies: Set<ReplySink>;
  readonly engineHeaders: EngineHeadersOf;
  /** Set where the connector hands over the first token. */
  readonly firstToken: FirstTokenDeps | undefined;
  readonly storeHealth: (() => Promise<StoreHealth>) | undefined;
  readonly stack: AsyncDisposableStack;
}

/** What the facade of this process answers with. */
export function buildService(parts: FacadeParts): FacadeService {
  const { settings, view, storeHealth, routerCheck } = parts;
  return buildFacadeService({
    generate: generateDeps(parts),
    view,
    connector: settings.current.kvConnector,
    authenticate: createAuthenticate(watchApiKeys(parts), tokenCheck(parts)),
    proxies: proxyRules(settings),
    tenantLimits: new TenantLimits(tenantLimitOf(settings), () => performance.now()),
    storeHealth,
    isRouterAway: () => routerCheck?.isAway === true,
  });
}

function proxyRules(settings: Settings): () => ProxyRules {
  return derive(
    settings,
    ({ tenant }) => tenant,
    ({ header, trustedProxies }) => ({ header, trusted: trustedPeers(trustedProxies) }),
  );
}

function tenantLimitOf(settings: Settings): (tenant: string) => TenantLimit {
  const limits = derive(
    settings,
    ({ tenant }) => tenant,
    ({ limits: all, ownLimits }) => ({
      all: { ...all },
      own: new Map(Object.entries(ownLimits).map(([name, own]) => [name, { ...own }])),
    }),
  );
  return (tenant) => limits().own.get(tenant) ?? limits().all;
}

/** What a request works with: it keeps the settings with which it began. */
function generateDeps(parts: FacadeParts): () => GenerateDeps {
  const {
    settings,
    view,
    router,
    routerCheck,
    metrics,
    log,
    tracer,
    engines,
    engineHeaders,
    firstToken,
    replies,
    stack,
  } = parts;
  const now = () => performance.now();
  const name = randomBytes(6).toString('hex');
  const silences = stack.use(new SilenceWatch(view, now));
  const reports = stack.use(new ReportSender({ router, now, neverReached }));
  const retryBudget = new RetryBudget(
    follow(() => settings.current.retry),
    now,
  );
  const streamsOnly = new Set<string>();
  const unnamedTurns = createLogLimit(UNNAMED_TURNS_MS, now);
  const make = (config: Config): GenerateDeps => {
    const linkRules = linkRulesOf(config, firstToken !== undefined);
    return {
      handOver: {
        router,
        // The trials of a router elsewhere stay with it; what gives handles back here must know who reads.
        ...(routerCheck === undefined ? {} : { routerCheck, noteRead: view.noteBidirectional }),
        reports,
        engines,
        connectors: CONNECTORS,
        ...(firstToken === undefined ? {} : { firstToken }),
        remoteHost: config.kv.remoteHost,
        forwardTokenIds: config.kv.forwardTokenIds,
        streamsOnly,
        engineHeaders,
        chainOf: (tokenIds, seed) => create(TokenChainSchema, buildChain(tokenIds, seed, sha256)),
        silences,
        isAsPlanned: ({ instanceId, incarnation: planned }) => {
          const incarnation = view.snapshot().find(({ id }) => id === instanceId)?.incarnation;
          return planned === undefined || incarnation === undefined || isSameLife(planned, incarnation);
        },
        noteAlive: (id) => {
          silences.noteAlive(id);
          view.notePassive(id, 'ok');
        },
        toBatonError: routerError,
        retryBudget,
        gapsOf: (model) => metrics.gapsOf(model),
        limits: {
          queueMs: config.timeouts.queueMs,
          routerMs: config.timeouts.routerMs,
          prefillColdMs: config.timeouts.prefillColdMs,
          firstContentMs: config.timeouts.firstContentMs,
          wholeReplyMs: config.timeouts.wholeReplyMs,
          idleMs: config.timeouts.idleMs,
          tokenizeMs: config.timeouts.tokenizeMs,
          leaseMarginMs: config.kv.leaseMarginMs,
          holdBytes: config.facade.holdBytes,
          streamBufferBytes: config.facade.streamBufferBytes,
        },
        now,
      },
      metrics,
      log,
      tracer,
      clientKvTransferParams: config.facade.clientKvTransferParams,
      marksPrefixes: comparesPrompts(config),
      linkRules,
      identityHeaders: config.identity.headers,
      unnamedTurns: findsByHistory(linkRules) ? undefined : unnamedTurns,
      clientStallMs: config.timeouts.clientStallMs,
      replies,
      replyHeaders: config.sim === undefined ? {} : { 'x-baton-sim': '1' },
      name,
    };
  };
  return derive(settings, (config) => config, make);
}

/** What keeps no handle between turns has nothing to find. */
function linkRulesOf({ reuse }: Config, isFirstToken: boolean): LinkRules {
  return { ...reuse, autolink: reuse.autolink && !isFirstToken };
}

/** Between two warnings about requests that continue a conversation and do not name it. */
const UNNAMED_TURNS_MS = 60_000;

/** The keys of clients, as their file has them. */
function watchApiKeys({ settings, log, stack }: FacadeParts): () => ApiKeys | undefined {
  const { apiKeysFile } = settings.current.auth;
  if (apiKeysFile === undefined) return () => undefined;
  const watched = stack.use(watchKeys('auth.api_keys_file', apiKeysFile, parseApiKeys, log));
  return () => watched.current;
}

/** The check of tokens, by the issuer's keys as they are, or were read last. */
function tokenCheck({ settings, log, stack }: FacadeParts): TokenCheck | undefined {
  const { jwt } = settings.current.auth;
  if (jwt === undefined) return undefined;
  return { looksLikeToken, check: createCheckToken(jwt, tokenKeys(jwt, log, stack)) };
}

/** An answer of the issuer; a look that failed is repeated; and looks for keys that are not known, milliseconds. */
const KEYS_TIMEOUT_MS = 5_000;
const KEYS_RETRY_MS = 10_000;
const KEYS_COOLDOWN_MS = 30_000;

function tokenKeys({ keys, refreshMs }: JwtConfig, log: Logger, stack: AsyncDisposableStack): TokenKeys {
  if ('url' in keys) {
    return stack.use(
      new KeyCache({
        read: () => fetchKeySet(keys.url, KEYS_TIMEOUT_MS),
        refreshMs,
        retryMs: KEYS_RETRY_MS,
        cooldownMs: KEYS_COOLDOWN_MS,
        log,
      }),
    );
  }
  const files = [{ name: 'auth.jwt.jwks_file', path: keys.file }];
  const watched = stack.use(watchFiles({ files, make: ([text = '']) => parseKeySet(text), log }));
  return { current: async () => watched.current, lookAgain: async () => false };
}

/** The router that this facade asks is taken to have the policies of this process' own settings. */
function comparesPrompts({ policy }: Config): boolean {
  const policies: Readonly<Record<string, unknown>> = POLICIES;
  return [policy.prefill, policy.decode].some((name) => policies[name] === POLICIES.cache_aware);
}
