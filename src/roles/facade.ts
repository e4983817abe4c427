import { create } from '@bufbuild/protobuf';
import type { Client } from '@connectrpc/connect';
import type { FastifyInstance } from 'fastify';
import type { Router } from '../../gen/baton/v1/router_pb.ts';
import { TokenChainSchema } from '../../gen/baton/v1/tokens_pb.ts';
import type { Config, InstanceConfig } from '../config/config.ts';
import { loadApiKeys } from '../config/load.ts';
import { formatProblem } from '../config/problem.ts';
import { CONNECTORS } from '../connectors/index.ts';
import { buildChain } from '../core/chain.ts';
import { decideEngineAuth } from '../core/engine-auth.ts';
import type { ApiKeys } from '../core/tenant.ts';
import type { EngineClient } from '../engine/client.ts';
import { createAuthenticate } from '../http/authenticate.ts';
import { buildFacade, type StoreHealth } from '../http/facade.ts';
import type { ReplySink } from '../http/reply-sink.ts';
import type { Logger } from '../obs/log.ts';
import { createLogLimit } from '../obs/log-limit.ts';
import type { Metrics } from '../obs/metrics.ts';
import { POLICIES } from '../policies/index.ts';
import { batonErrorFrom, neverReached } from '../rpc/errors.ts';
import type { FirstTokenDeps } from '../services/first-token-deps.ts';
import type { EngineHeaders } from '../services/hand-over.ts';
import type { InstanceView } from '../services/instance-view.ts';
import { ReportSender } from '../services/report-sender.ts';
import { RetryBudget } from '../services/retry-budget.ts';
import { sha256 } from '../services/sha256.ts';
import { SilenceWatch } from '../services/silence-watch.ts';
import { StartError } from './listen.ts';

/** What the facade of a process is made of. */
export interface FacadeParts {
  readonly config: Config;
  readonly view: InstanceView;
  readonly router: Client<typeof Router>;
  readonly metrics: Metrics;
  readonly log: Logger;
  readonly version: string;
  readonly engines: EngineClient;
  readonly replies: Set<ReplySink>;
  readonly engineHeaders: EngineHeadersOf;
  /** Set where the connector hands over the first token. */
  readonly firstToken: FirstTokenDeps | undefined;
  readonly storeHealth: (() => Promise<StoreHealth>) | undefined;
  readonly isStopping: () => boolean;
  readonly isRouterAway: () => boolean;
  readonly stack: AsyncDisposableStack;
}

/** Builds the facade; it does not listen yet. */
export function buildFacadeOf(parts: FacadeParts): FastifyInstance {
  const { config, view, router, metrics, log, version, engines, engineHeaders, firstToken, storeHealth, stack } = parts;
  const now = () => performance.now();
  const silences = stack.use(new SilenceWatch(view, now));
  const { timeouts } = config;
  const apiKeys = readApiKeys(config);
  return buildFacade({
    handOver: {
      router,
      reports: stack.use(new ReportSender({ router, now, neverReached })),
      engines,
      connectors: CONNECTORS,
      ...(firstToken === undefined ? {} : { firstToken }),
      remoteHost: config.kv.remoteHost,
      engineHeaders,
      chainOf: (tokenIds, seed) => create(TokenChainSchema, buildChain(tokenIds, seed, sha256)),
      silences,
      noteAlive: (id) => {
        silences.noteAlive(id);
        view.notePassive(id, 'ok');
      },
      toBatonError: (error) => batonErrorFrom(error, 'ROUTER_UNAVAILABLE'),
      retryBudget: new RetryBudget(config.retry.budgetPercent, now),
      limits: {
        queueMs: timeouts.queueMs,
        routerMs: timeouts.routerMs,
        prefillColdMs: timeouts.prefillColdMs,
        firstContentMs: timeouts.firstContentMs,
        wholeReplyMs: timeouts.wholeReplyMs,
        idleMs: timeouts.idleMs,
        tokenizeMs: timeouts.tokenizeMs,
        leaseMarginMs: config.kv.leaseMarginMs,
        holdBytes: config.facade.holdBytes,
        streamBufferBytes: config.facade.streamBufferBytes,
      },
      now,
    },
    view,
    connector: config.kvConnector,
    metrics,
    log,
    version,
    clientKvTransferParams: config.facade.clientKvTransferParams,
    authenticate: createAuthenticate(() => apiKeys),
    marksPrefixes: comparesPrompts(config),
    reuseGuard: config.reuse.guard,
    storeHealth,
    isStopping: parts.isStopping,
    isRouterAway: parts.isRouterAway,
    identityHeaders: config.identity.headers,
    unnamedTurns: createLogLimit(UNNAMED_TURNS_MS, now),
    clientStallMs: timeouts.clientStallMs,
    replies: parts.replies,
    bodyLimitBytes: config.facade.bodyLimitBytes,
    exposeMetrics: config.facade.metrics,
    replyHeaders: config.sim === undefined ? {} : { 'x-baton-sim': '1' },
  });
}

/** Between two warnings about requests that continue a conversation and do not name it. */
const UNNAMED_TURNS_MS = 60_000;

function readApiKeys(config: Config): ApiKeys | undefined {
  if (config.auth.apiKeysFile === undefined) return undefined;
  const loaded = loadApiKeys(config.auth.apiKeysFile);
  if (loaded.kind === 'ok') return loaded.keys;
  throw new StartError(loaded.problems.map(formatProblem).join('\n'));
}

/** Credential of a leg to an instance. */
export type EngineHeadersOf = (instanceId: string, authorization: string | undefined) => EngineHeaders;

/** What legs to an instance carry of its own; undefined for one that is not known here. */
export type CredentialsOf = (instanceId: string) => Pick<InstanceConfig, 'headers' | 'apiKey'> | undefined;

/** Credentials of legs; instances that only a remote registry knows get the process-wide key. */
export function engineHeadersOf(config: Config, credentialsOf: CredentialsOf): EngineHeadersOf {
  return (instanceId, clientAuthorization) => {
    const instance = credentialsOf(instanceId);
    const configured = Object.keys(instance?.headers ?? {}).some((name) => name.toLowerCase() === 'authorization');
    // A credential among the pool's headers is baton's own, as the pool's key is.
    if (configured) return { headers: { ...instance?.headers }, auth: 'own' };
    const { authorization, auth } = decideEngineAuth({
      mode: config.engineAuth,
      engineKey: instance?.apiKey ?? config.openaiApiKey,
      clientAuthorization,
      batonAuthenticates: config.auth.apiKeysFile !== undefined,
    });
    return { headers: { ...instance?.headers, ...(authorization === undefined ? {} : { authorization }) }, auth };
  };
}

/** The router that this facade asks is taken to have the policies of this process' own settings. */
function comparesPrompts({ policy }: Config): boolean {
  const policies: Readonly<Record<string, unknown>> = POLICIES;
  return [policy.prefill, policy.decode].some((name) => policies[name] === POLICIES.cache_aware);
}
