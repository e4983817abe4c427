import { AsyncDisposableStack } from '@whatwg-node/disposablestack';
import { PoolRegistry } from '../gen/baton/v1/pool_registry_pb.ts';
import { Router } from '../gen/baton/v1/router_pb.ts';
import type { Config } from './config/config.ts';
import { remoteSources } from './config/discovery.ts';
import { derive, follow, Settings } from './config/settings.ts';
import { readVersion } from './config/version.ts';
import { CONNECTORS } from './connectors/index.ts';
import { EngineClient } from './engine/client.ts';
import type { ReplySink } from './http/reply-sink.ts';
import { createLogger, errorFields, type Logger } from './obs/log.ts';
import { Metrics } from './obs/metrics.ts';
import { openAdmin } from './roles/admin.ts';
import { keepCollectionsShort } from './roles/collections.ts';
import { credentialsElsewhere, engineHeadersOf } from './roles/credentials.ts';
import { buildFacadeOf } from './roles/facade.ts';
import { buildFirstToken, firstTokenConnector, openNotices } from './roles/first-token.ts';
import { drain, listen } from './roles/listen.ts';
import { createPeers } from './roles/peers.ts';
import { buildRegistry, firstLook, registryElsewhere, startSims, watchPools, watchRemote } from './roles/pools.ts';
import { keepRegistryState } from './roles/registry-state.ts';
import { startReleases, watchPins } from './roles/releases.ts';
import { type ReloadCause, Reloader, type ReloaderDeps, type ReloadSource } from './roles/reload.ts';
import { buildRouter } from './roles/router.ts';
import { linkRouter } from './roles/router-link.ts';
import { openRpc, watchCallers } from './roles/rpc-port.ts';
import { startSources } from './roles/sources.ts';
import { openStore, watchStore } from './roles/store.ts';
import { openTracer } from './roles/tracing.ts';
import { createDirectClient } from './rpc/direct-client.ts';
import { batonErrorFrom } from './rpc/errors.ts';
import type { RpcServices } from './rpc/routes.ts';
import { traceCalls } from './rpc/trace-calls.ts';
import { SYSTEM_CLOCK } from './services/clock.ts';
import type { InstanceView } from './services/instance-view.ts';
import { OwnerWatch } from './services/owner-watch.ts';
import { pause } from './services/pause.ts';
import { DrainEnd } from './services/registry/drain-end.ts';
import type { PoolRegistryService } from './services/registry/pool-registry.ts';
import { relayRegistry } from './services/registry-relay.ts';
import type { RouterService } from './services/router.ts';

/** A running process: what it listens on, and how to end it. */
export interface Running {
  /** `host:port` of each open listener; of a unix socket its path. */
  readonly addresses: {
    readonly facade?: string;
    readonly rpc?: string;
    readonly rpcSocket?: string;
    readonly admin?: string;
    /** The socket to which prefill engines push their notices. */
    readonly notices?: string;
  };
  /**
   * Stops accepting, lets running requests finish within `timeouts.drain`, then closes everything. With `settle` it says
   * first for `timeouts.drain_settle` that it is not ready, and serves on meanwhile.
   */
  stop(options?: { readonly settle?: boolean }): Promise<void>;
  /** Reads the settings again and goes by them as far as it can; the log says what became of them. */
  reload(cause: ReloadCause): void;
}

/** What a caller may put in instead of the process's own. */
export interface StartOptions {
  readonly log?: Logger;
  /** Where `config` is from, so that it can be read again. */
  readonly reload?: ReloadSource;
}

/** Starts the roles of `config` in this process; everything is closed again when one of them cannot start. */
export async function startBaton(config: Config, options: StartOptions = {}): Promise<Running> {
  await using stack = new AsyncDisposableStack();
  const log = options.log ?? createLogger({ level: config.log.level, format: config.log.format });
  const version = readVersion();
  const metrics = new Metrics({ version });
  stack.use(metrics.watchEventLoop());
  const tracer = await openTracer(config.tracing, version, metrics, log, stack);
  const settings = new Settings(config);
  let leftOut: ReloaderDeps['leftOut'] = async () => [];
  const reloader = new Reloader({ source: options.reload, settings, metrics, log, leftOut: () => leftOut() });
  const has = (role: Config['roles'][number]) => config.roles.includes(role);
  const connector = has('facade') ? firstTokenConnector(config) : undefined;
  const notices = connector === undefined ? undefined : await openNotices(config, metrics, stack);
  const connectTo = createPeers(config.rpcClient, tracer, log, stack);
  const sims = config.sim === undefined ? undefined : await startSims(config, stack, log, notices?.address);
  const onFault = ({ method, error }: { readonly method: string; readonly error: unknown }) =>
    log.error({ method, ...errorFields(error) }, 'call failed');

  const registry = has('registry') ? buildRegistry(settings, metrics, log) : undefined;
  if (registry !== undefined) {
    stack.use(registry);
    registry.start();
    if (config.registry.stateFile !== undefined) {
      const keptViews = () => remoteSources(settings.current.discovery);
      await keepRegistryState(registry, config.registry.stateFile, keptViews, log, stack);
    }
    const sources = await startSources({ registry, settings, sims, connectors: Object.keys(CONNECTORS), log }, stack);
    leftOut = async () => {
      await sources.settled();
      return registry.leftOut;
    };
    await firstLook(registry);
  }
  // A store alone serves whoever calls it and looks at no engine.
  const storeOnly = config.roles.every((role) => role === 'kvstore');
  const view: WatchedView = registry ?? (storeOnly ? NO_POOLS : watchRemote(settings, connectTo, log, stack));
  watchPools(metrics, view);

  if (has('kvstore')) keepCollectionsShort();
  const localStore = has('kvstore') ? await openStore(config.store, tracer, log, metrics, onFault, stack) : undefined;
  // A router without a store beside it uses the one it is told of, and a facade empties its release queues; reuse is off
  // without one.
  const store =
    localStore?.client ??
    (config.kvstoreUrl === undefined ? undefined : connectTo(config.kvstoreUrl, watchStore(metrics, log)).kvCacheStore);
  if (store !== undefined && !storeOnly) stack.use(new OwnerWatch(store, view));
  const releaseParts = store === undefined ? undefined : { settings, view, store, localStore, metrics, log, stack };
  const pins = releaseParts === undefined || storeOnly ? undefined : watchPins(releaseParts, registry);
  if (registry !== undefined) {
    stack.use(new DrainEnd({ registry, clock: SYSTEM_CLOCK, ...(store === undefined ? {} : { store }) }));
  }
  const routerService = has('router') ? buildRouter(settings, view, store, tracer, metrics, log) : undefined;
  const poolRegistry = registry ?? (has('router') ? relayRegistry(registryElsewhere(config, connectTo)) : undefined);
  const services: RpcServices = {
    ...(routerService === undefined ? {} : { router: traceCalls(Router, routerService, tracer) }),
    ...(poolRegistry === undefined ? {} : { poolRegistry }),
    ...(localStore === undefined ? {} : { kvCacheStore: localStore.service }),
  };
  let stopping = false;
  const callerOf = watchCallers(config, log, stack);
  const addresses: { -readonly [K in keyof Running['addresses']]: Running['addresses'][K] } = {};
  if (notices?.address !== undefined) addresses.notices = notices.address;
  // A facade alone serves no RPC: its port would only stand in another role's way.
  if ((config.rpc.port !== 'off' || config.rpc.socket !== undefined) && Object.keys(services).length > 0) {
    Object.assign(addresses, await openRpc({ settings, services, callerOf, onFault, log, stack }));
    if (routerService !== undefined) stack.defer(() => routerService.stopWaiting());
  }
  if (config.admin.port !== 'off') {
    const workers =
      poolRegistry === undefined
        ? undefined
        : {
            registry: createDirectClient(PoolRegistry, poolRegistry, onFault),
            toBatonError: (error: unknown) => batonErrorFrom(error, 'ROUTER_UNAVAILABLE'),
            connector: config.kvConnector,
          };
    const reload = () => reloader.reload('request');
    addresses.admin = await openAdmin({ config, metrics, callerOf, reload, workers, log, stack });
  }
  if (has('facade')) {
    const engines = stack.use(new EngineClient(follow(() => settings.current.timeouts)));
    const elsewhere = credentialsElsewhere(settings, view);
    const engineHeaders = engineHeadersOf(settings, (id) => registry?.specOf(id) ?? elsewhere(id));
    const storeHealth = localStore === undefined ? undefined : () => localStore.health();
    const firstToken =
      connector === undefined || notices === undefined
        ? undefined
        : buildFirstToken({ settings, connector, sims: sims ?? [], notices, engines, engineHeaders, metrics, stack });
    const replies = new Set<ReplySink>();
    const parts = {
      replies,
      settings,
      view,
      ...linkRouter(settings, services.router, connectTo, onFault, log, stack),
      metrics,
      log,
      tracer,
      version,
      engines,
      engineHeaders,
      firstToken,
      storeHealth,
      isStopping: () => stopping,
      stack,
    };
    const facade = buildFacadeOf(parts);
    if (releaseParts !== undefined && pins !== undefined) {
      startReleases(releaseParts, { engines, engineHeaders }, pins);
    }
    addresses.facade = await listen(facade, config.facade.host, config.facade.port, '--port', log);
    stack.defer(() => drain(facade, replies, settings.current.timeouts.drainMs));
  }
  if (has('router') && store !== undefined && config.reuse.guard !== 'exact')
    warnUnsafe(config.reuse.guard, log, stack);
  followAtOnce(settings, { log, registry, router: routerService });
  stack.use(reloader).start();
  const resources = stack.move();
  log.info({ ...addresses, roles: config.roles, version }, 'baton is up');
  return {
    addresses,
    async stop({ settle = false } = {}) {
      stopping = true;
      const settleMs = settle && has('facade') ? settings.current.timeouts.drainSettleMs : 0;
      log.info(settleMs > 0 ? { settleMs } : {}, 'stopping');
      if (settleMs > 0) await pause(settleMs);
      await resources.disposeAsync();
      log.info('stopped');
    },
    reload: (cause) => void reloader.reload(cause),
  };
}

/** What does not wait until it is used again: the level of the log, the pace of the probes, and who waits for room. */
function followAtOnce(
  settings: Settings,
  {
    log,
    registry,
    router,
  }: {
    readonly log: Logger;
    readonly registry: PoolRegistryService | undefined;
    readonly router: RouterService | undefined;
  },
): void {
  const pace = derive(
    settings,
    ({ health }) => health,
    () => registry?.repace(),
  );
  settings.onChange(() => {
    log.setLevel(settings.current.log.level);
    pace();
    router?.tryWaiting();
  });
}

type WatchedView = InstanceView & { readonly stale?: boolean };

const NO_POOLS: WatchedView = {
  snapshot: () => [],
  onChange: () => () => {},
  notePassive: () => {},
  noteBidirectional: () => {},
  noteLearnt: () => {},
  drain: () => {},
};

const WARN_AGAIN_MS = 60 * 60 * 1000;

/** Whoever reads the log of a process that may answer wrongly must find that in it, however long ago it started. */
function warnUnsafe(guard: string, log: Logger, stack: AsyncDisposableStack): void {
  const warn = () =>
    log.warn(
      { guard },
      'reuse is not guarded: equal text can have other tokens, and wrong KV stays in the prefix caches of the engines, where other requests hit it',
    );
  warn();
  const timer = setInterval(warn, WARN_AGAIN_MS);
  timer.unref();
  stack.defer(() => clearInterval(timer));
}
