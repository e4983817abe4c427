import { PoolRegistry } from '../../gen/baton/v1/pool_registry_pb.ts';
import { Router } from '../../gen/baton/v1/router_pb.ts';
import type { Config } from '../config/config.ts';
import { remoteSources } from '../config/discovery.ts';
import { derive, follow, type Settings } from '../config/settings.ts';
import { CONNECTORS } from '../connectors/index.ts';
import { EngineClient } from '../engine/client.ts';
import type { ReplySink } from '../http/reply-sink.ts';
import { errorFields, type Logger } from '../obs/log.ts';
import type { Metrics } from '../obs/metrics.ts';
import { createDirectClient } from '../rpc/direct-client.ts';
import { batonErrorFrom } from '../rpc/errors.ts';
import type { RpcServices } from '../rpc/routes.ts';
import { traceCalls } from '../rpc/trace-calls.ts';
import { SYSTEM_CLOCK } from '../services/clock.ts';
import type { InstanceView } from '../services/instance-view.ts';
import { OwnerWatch } from '../services/owner-watch.ts';
import { DrainEnd } from '../services/registry/drain-end.ts';
import type { PoolRegistryService } from '../services/registry/pool-registry.ts';
import { relayRegistry } from '../services/registry-relay.ts';
import type { RouterService } from '../services/router.ts';
import { openAdmin } from './admin.ts';
import { keepCollectionsShort } from './collections.ts';
import { credentialsElsewhere, engineHeadersOf } from './credentials.ts';
import { buildService } from './facade.ts';
import { buildFirstToken, firstTokenConnector, openNotices } from './first-token.ts';
import type { Front } from './front.ts';
import { drain } from './listen.ts';
import { createPeers } from './peers.ts';
import { buildRegistry, firstLook, registryElsewhere, startSims, watchPools, watchRemote } from './pools.ts';
import { keepRegistryState } from './registry-state.ts';
import { startReleases, watchPins } from './releases.ts';
import { Reloader, type ReloaderDeps, type ReloadSource } from './reload.ts';
import { buildRouter } from './router.ts';
import { linkRouter } from './router-link.ts';
import { openRpc, watchCallers } from './rpc-port.ts';
import { startSources } from './sources.ts';
import { openStore, watchStore } from './store.ts';
import { openTracer } from './tracing.ts';

/** Addresses of a process: `host:port` of each open listener; of a unix socket its path. */
export interface Addresses {
  facade?: string;
  rpc?: string;
  rpcSocket?: string;
  admin?: string;
  /** The socket to which prefill engines push their notices. */
  notices?: string;
}

/** What the roles of a process are started with. */
export interface RoleParts {
  readonly settings: Settings;
  readonly metrics: Metrics;
  readonly log: Logger;
  readonly version: string;
  /** Where a facade runs: it listens already. */
  readonly front: Front | undefined;
  readonly reloadSource: ReloadSource | undefined;
}

/** What runs then. */
interface StartedRoles {
  readonly addresses: Addresses;
  readonly reloader: Reloader;
}

/** Starts the roles of the settings in this process; the stack closes everything, also when one of them cannot start. */
export async function startRoles(
  { settings, metrics, log, version, front, reloadSource }: RoleParts,
  stack: AsyncDisposableStack,
): Promise<StartedRoles> {
  const config = settings.current;
  const tracer = await openTracer(config.tracing, version, metrics, log, stack);
  let leftOut: ReloaderDeps['leftOut'] = async () => [];
  const reloader = new Reloader({ source: reloadSource, settings, metrics, log, leftOut: () => leftOut() });
  const has = (role: Config['roles'][number]) => config.roles.includes(role);
  const connector = front === undefined ? undefined : firstTokenConnector(config);
  const notices = connector === undefined ? undefined : await openNotices(config, metrics, stack);
  const connectTo = createPeers(config.rpcClient, { tracer, metrics, log, stack });
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
  const routerService = has('router') ? buildRouter(settings, view, store, tracer, metrics, log, stack) : undefined;
  const poolRegistry = registry ?? (has('router') ? relayRegistry(registryElsewhere(config, connectTo)) : undefined);
  const services: RpcServices = {
    ...(routerService === undefined ? {} : { router: traceCalls(Router, routerService, tracer) }),
    ...(poolRegistry === undefined ? {} : { poolRegistry }),
    ...(localStore === undefined ? {} : { kvCacheStore: localStore.service }),
  };
  const callerOf = watchCallers(config, log, stack);
  const addresses: Addresses = {};
  if (notices?.address !== undefined) addresses.notices = notices.address;
  // A facade alone serves no RPC: its port would only stand in another role's way.
  if ((config.rpc.port !== 'off' || config.rpc.socket !== undefined) && Object.keys(services).length > 0) {
    Object.assign(addresses, await openRpc({ settings, services, callerOf, onFault, metrics, log, stack }));
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
  if (front !== undefined) {
    // Requests that run at a stop need the router to their end: its connection closes after the facade.
    const link = linkRouter(settings, services.router, connectTo, onFault, log, stack);
    // At a stop the facade is the first to end, with all that it works with.
    const facadeStack = stack.use(front.stack.move());
    const engines = facadeStack.use(new EngineClient(follow(() => settings.current.timeouts)));
    const elsewhere = credentialsElsewhere(settings, view);
    const engineHeaders = engineHeadersOf(settings, (id) => registry?.specOf(id) ?? elsewhere(id));
    const common = { settings, engines, engineHeaders, metrics, stack: facadeStack };
    const firstToken =
      connector === undefined || notices === undefined
        ? undefined
        : buildFirstToken({ ...common, connector, sims: sims ?? [], notices });
    const replies = new Set<ReplySink>();
    const service = buildService({
      ...common,
      ...link,
      replies,
      view,
      log,
      tracer,
      firstToken,
      storeHealth: localStore === undefined ? undefined : () => localStore.health(),
    });
    if (releaseParts !== undefined && pins !== undefined) {
      startReleases({ ...releaseParts, stack: facadeStack }, { engines, engineHeaders }, pins);
    }
    addresses.facade = front.address;
    facadeStack.defer(() => drain(front.app, replies, settings.current.timeouts.drainMs));
    front.life.run(service);
  }
  if (has('router') && store !== undefined && config.reuse.guard !== 'exact')
    warnUnsafe(config.reuse.guard, log, stack);
  followAtOnce(settings, { log, registry, router: routerService });
  stack.use(reloader).start();
  return { addresses, reloader };
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
