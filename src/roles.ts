import type { AddressInfo } from 'node:net';
import type { Client } from '@connectrpc/connect';
import type { FastifyInstance } from 'fastify';
import { InstanceState } from '../gen/baton/v1/instance_pb.ts';
import type { PoolRegistry } from '../gen/baton/v1/pool_registry_pb.ts';
import { Router } from '../gen/baton/v1/router_pb.ts';
import type { Config, InstanceConfig } from './config/schema.ts';
import { readVersion } from './config/version.ts';
import { CONNECTORS } from './connectors/index.ts';
import { decideEngineAuth } from './core/engine-auth.ts';
import type { Policy } from './core/policy.ts';
import { EngineClient } from './engine/client.ts';
import { buildAdmin } from './http/admin.ts';
import { buildFacade } from './http/facade.ts';
import { createLogger, errorFields, type Logger } from './obs/log.ts';
import { Metrics } from './obs/metrics.ts';
import { POLICIES } from './policies/index.ts';
import { connectRemote } from './rpc/clients.ts';
import { createDirectClient } from './rpc/direct-client.ts';
import { batonErrorFrom } from './rpc/errors.ts';
import { startRpcListener } from './rpc/listener.ts';
import type { RpcServices } from './rpc/routes.ts';
import type { EngineHeaders } from './services/hand-over.ts';
import type { InstanceView } from './services/instance-view.ts';
import { roleWord, stateWord } from './services/instance-words.ts';
import { PoolRegistryService } from './services/pool-registry.ts';
import { probeKeyOf } from './services/probe-key.ts';
import { RemoteView } from './services/remote-view.ts';
import { RetryBudget } from './services/retry-budget.ts';
import { RouterService } from './services/router.ts';
import { UnhealthyClock } from './services/unhealthy-clock.ts';
import { startSimPools } from './sim/pools.ts';

/** A running process: what it listens on, and how to end it. */
export interface Running {
  /** `host:port` of each open listener. */
  readonly addresses: { readonly facade?: string; readonly rpc?: string; readonly admin?: string };
  /** Stops accepting, lets running requests finish within `timeouts.drain`, then closes everything. */
  stop(): Promise<void>;
}

/** What a caller may put in instead of the process's own. */
export interface StartOptions {
  readonly log?: Logger;
}

/** A listener could not be opened; the message names the flag. */
export class StartError extends Error {
  override readonly name = 'StartError';
}

/** Starts the roles of `config` in this process; everything is closed again when one of them cannot start. */
export async function startBaton(config: Config, options: StartOptions = {}): Promise<Running> {
  await using stack = new AsyncDisposableStack();
  const log = options.log ?? createLogger({ level: config.log.level, format: config.log.format });
  const version = readVersion();
  const metrics = new Metrics({ version });
  const instances = config.sim === undefined ? config.instances : await startSims(config, stack, log);
  const has = (role: Config['roles'][number]) => config.roles.includes(role);
  const onFault = ({ method, error }: { readonly method: string; readonly error: unknown }) =>
    log.error({ method, ...errorFields(error) }, 'call failed');

  const registry = has('registry') ? buildRegistry(config, instances, metrics, log) : undefined;
  if (registry !== undefined) {
    stack.use(registry);
    registry.start();
    await firstLook(registry);
  }
  const view: InstanceView & { readonly stale?: boolean } = registry ?? watchRemote(config, stack);
  watchPools(metrics, view);

  const routerService = has('router') ? buildRouter(config, view, metrics) : undefined;
  const services: RpcServices = {
    ...(routerService === undefined ? {} : { router: routerService }),
    ...(registry === undefined ? {} : { poolRegistry: registry }),
  };
  const addresses: { facade?: string; rpc?: string; admin?: string } = {};
  if (config.rpc.port !== 'off') {
    const { host, port } = config.rpc;
    const rpc = await startRpcListener({ host, port, services, onFault }).catch((error: unknown) =>
      failStart(error, host, port, '--rpc-port'),
    );
    stack.defer(() => rpc.close(config.timeouts.drainMs));
    addresses.rpc = formatAddress(rpc.host, rpc.port);
  }
  if (config.admin.port !== 'off') {
    const admin = buildAdmin(metrics);
    addresses.admin = await listen(admin, config.admin.host, config.admin.port, '--admin-port', log);
    stack.defer(() => admin.close());
  }
  if (has('facade')) {
    const router =
      routerService === undefined
        ? connectTo(config.routerUrl, stack).router
        : createDirectClient(Router, routerService, onFault);
    const facade = openFacade({ config, instances, view, router, metrics, log, version, stack });
    addresses.facade = await listen(facade, config.facade.host, config.facade.port, '--port', log);
    stack.defer(() => drain(facade, config.timeouts.drainMs));
  }
  const resources = stack.move();
  log.info({ ...addresses, roles: config.roles, version }, 'baton is up');
  return {
    addresses,
    async stop() {
      log.info('stopping');
      await resources.disposeAsync();
      log.info('stopped');
    },
  };
}

async function startSims(
  config: Config,
  stack: AsyncDisposableStack,
  log: Logger,
): Promise<readonly InstanceConfig[]> {
  const { prefill = 0, decode = 0 } = config.sim ?? {};
  const pools = stack.use(await startSimPools({ prefill, decode, engine: SIM_ENGINE }));
  log.warn({ prefill, decode }, 'engines are simulated: answers are made up');
  return [...pools.prefill, ...pools.decode].map(({ url, role }) => ({
    id: new URL(url).host,
    url,
    role,
    connector: config.kvConnector,
    headers: {},
    labels: {},
    kvLeaseMs: SIM_ENGINE.kvLeaseMs,
    decoderTtlMs: SIM_ENGINE.decoderTtlMs,
    bidirectional: 'auto',
    loadFailurePolicy: 'fail',
  }));
}

/** vLLM's default lifetimes, and slow enough that a stream is seen to grow. */
const SIM_ENGINE = {
  kvLeaseMs: 30_000,
  decoderTtlMs: 480_000,
  fixedMs: 5,
  prefillMsPerToken: 0.05,
  decodeMsPerToken: 5,
} as const;

function buildRegistry(
  config: Config,
  instances: readonly InstanceConfig[],
  metrics: Metrics,
  log: Logger,
): PoolRegistryService {
  return new PoolRegistryService({
    instances,
    health: config.health,
    log,
    probeKey: (instance) => probeKeyOf(instance, config),
    onProbe: (kind) => metrics.probed(kind),
  });
}

/**
 * Waits until every instance has been looked at, or a moment has passed: the first requests then see the whole pools and
 * not just the engine whose probe came back first.
 */
function firstLook(view: InstanceView): Promise<void> {
  return new Promise((resolve) => {
    const settle = () => {
      clearTimeout(timer);
      unsubscribe();
      resolve();
    };
    const isDone = () => view.snapshot().every(({ state }) => state !== InstanceState.STARTING);
    const unsubscribe = view.onChange(() => {
      if (isDone()) settle();
    });
    const timer = setTimeout(settle, FIRST_LOOK_MS);
    if (isDone()) settle();
  });
}

const FIRST_LOOK_MS = 1000;

function connectTo(url: string | undefined, stack: AsyncDisposableStack) {
  if (url === undefined) throw new StartError('a role that runs elsewhere needs its URL (--router-url, --registry-url)');
  return stack.use(connectRemote({ url }));
}

/** A process without a registry watches the one that its router uses, unless told another. */
function watchRemote(config: Config, stack: AsyncDisposableStack): RemoteView {
  const client: Client<typeof PoolRegistry> = connectTo(config.registryUrl ?? config.routerUrl, stack).poolRegistry;
  return stack.use(new RemoteView(client));
}

function watchPools(metrics: Metrics, view: InstanceView & { readonly stale?: boolean }): void {
  metrics.watchInstances(() =>
    view.snapshot().map(({ role, state }) => ({ role: roleWord(role), state: stateWord(state) })),
  );
  metrics.watchRegistryStale(() => view.stale ?? false);
  const learnModels = () => metrics.setKnownModels(view.snapshot().flatMap(({ models }) => models.map(({ id }) => id)));
  learnModels();
  view.onChange(learnModels);
}

function buildRouter(config: Config, view: InstanceView, metrics: Metrics): RouterService {
  const router = new RouterService(view, {
    rules: {
      connector: config.kvConnector,
      prefillPolicy: policyOf(config.policy.prefill),
      decodePolicy: policyOf(config.policy.decode),
      minUncachedTokens: config.disagg.minUncachedTokens,
    },
    queueMax: config.queue.max,
    observe: {
      planned: (mode, reason) => metrics.planned(mode, reason),
      queueLeft: (outcome, ms) => metrics.queueLeft(outcome, ms),
    },
  });
  metrics.watchQueueDepth(() => router.queueDepth);
  return router;
}

function policyOf(name: string): Policy {
  const policies: Readonly<Record<string, Policy>> = POLICIES;
  const policy = policies[name];
  if (policy === undefined) throw new StartError(`unknown policy "${name}"; known: ${Object.keys(policies).join(', ')}`);
  return policy;
}

interface FacadeParts {
  readonly config: Config;
  readonly instances: readonly InstanceConfig[];
  readonly view: InstanceView;
  readonly router: Client<typeof Router>;
  readonly metrics: Metrics;
  readonly log: Logger;
  readonly version: string;
  readonly stack: AsyncDisposableStack;
}

function openFacade({ config, instances, view, router, metrics, log, version, stack }: FacadeParts): FastifyInstance {
  const now = () => performance.now();
  const engines = stack.use(new EngineClient(config.timeouts));
  const unhealthy = stack.use(new UnhealthyClock(view, now));
  const { timeouts } = config;
  return buildFacade({
    handOver: {
      router,
      engines,
      connectors: CONNECTORS,
      remoteHost: config.kv.remoteHost,
      engineHeaders: engineHeadersOf(config, instances),
      unhealthyForMs: (id) => unhealthy.unhealthyForMs(id),
      toBatonError: (error) => batonErrorFrom(error, 'ROUTER_UNAVAILABLE'),
      retryBudget: new RetryBudget(config.retry.budgetPercent),
      limits: {
        queueMs: timeouts.queueMs,
        prefillColdMs: timeouts.prefillColdMs,
        firstContentMs: timeouts.firstContentMs,
        wholeReplyMs: timeouts.wholeReplyMs,
        idleMs: timeouts.idleMs,
        leaseMarginMs: config.kv.leaseMarginMs,
        holdBytes: config.facade.holdBytes,
        streamBufferBytes: config.facade.streamBufferBytes,
      },
      now,
    },
    view,
    metrics,
    log,
    version,
    clientKvTransferParams: config.facade.clientKvTransferParams,
    identityHeaders: config.identity.headers,
    clientStallMs: timeouts.clientStallMs,
    bodyLimitBytes: config.facade.bodyLimitBytes,
    exposeMetrics: config.facade.metrics,
    replyHeaders: config.sim === undefined ? {} : { 'x-baton-sim': '1' },
  });
}

/** Credentials of legs; instances that only a remote registry knows get the process-wide key. */
function engineHeadersOf(
  config: Config,
  instances: readonly InstanceConfig[],
): (instanceId: string, authorization: string | undefined) => EngineHeaders {
  const byId = new Map(instances.map((instance) => [instance.id, instance]));
  return (instanceId, clientAuthorization) => {
    const instance = byId.get(instanceId);
    const { authorization, auth } = decideEngineAuth({
      mode: config.engineAuth,
      engineKey: instance?.apiKey ?? config.openaiApiKey,
      clientAuthorization,
      batonAuthenticates: false,
    });
    return { headers: { ...instance?.headers, ...(authorization === undefined ? {} : { authorization }) }, auth };
  };
}

async function listen(
  app: FastifyInstance,
  host: string,
  port: number | 'off',
  flag: string,
  log: Logger,
): Promise<string> {
  if (port === 'off') {
    log.warn({ flag }, 'this listener is off');
    return 'off';
  }
  await app.listen({ host, port }).catch((error: unknown) => failStart(error, host, port, flag));
  const address = app.server.address() as AddressInfo;
  return formatAddress(address.address, address.port);
}

function failStart(error: unknown, host: string, port: number, flag: string): never {
  const code = error instanceof Error && 'code' in error ? error.code : undefined;
  const what =
    code === 'EADDRINUSE'
      ? `port ${port} is in use`
      : code === 'EADDRNOTAVAIL' || code === 'ENOTFOUND'
        ? `${host} is no address of this machine`
        : code === 'EACCES'
          ? `port ${port} needs more rights`
          : `cannot listen on ${host}:${port}`;
  throw new StartError(`${what} (${flag})`, { cause: error });
}

/** Lets running requests finish; when time is up their connections are closed. */
async function drain(app: FastifyInstance, drainMs: number): Promise<void> {
  const timer = drainMs === 0 ? undefined : setTimeout(() => app.server.closeAllConnections(), drainMs);
  await app.close();
  clearTimeout(timer);
}

function formatAddress(host: string, port: number): string {
  return host.includes(':') ? `[${host}]:${port}` : `${host}:${port}`;
}
