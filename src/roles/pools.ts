import type { Client } from '@connectrpc/connect';
import { InstanceState } from '../../gen/baton/v1/instance_pb.ts';
import type { PoolRegistry } from '../../gen/baton/v1/pool_registry_pb.ts';
import type { Config, InstanceConfig } from '../config/config.ts';
import { follow, type Settings } from '../config/settings.ts';
import { CONNECTORS } from '../connectors/index.ts';
import { roleWord, stateWord } from '../core/instance-words.ts';
import { probeInstance } from '../engine/probe.ts';
import type { Logger } from '../obs/log.ts';
import type { Metrics } from '../obs/metrics.ts';
import type { InstanceView } from '../services/instance-view.ts';
import { probeKeyOf } from '../services/probe-key.ts';
import { PoolRegistryService } from '../services/registry/pool-registry.ts';
import { RemoteView } from '../services/remote-view.ts';
import { POOL_OF } from './credentials.ts';
import { PeerLog } from './peer-log.ts';
import type { ConnectTo } from './peers.ts';

/** Starts the simulated engines of `--sim`. */
export async function startSims(
  config: Config,
  stack: AsyncDisposableStack,
  log: Logger,
  noticeAddress: string | undefined,
): Promise<readonly InstanceConfig[]> {
  // Loaded only here: nothing else needs engines that are made up.
  const { startSimPools } = await import('../sim/pools.ts');
  const { prefill = 0, decode = 0 } = config.sim ?? {};
  const noticeEndpoint = `tcp://${noticeAddress?.replace(/^0\.0\.0\.0:/, '127.0.0.1:') ?? ''}`;
  const lmcache = noticeAddress === undefined ? {} : ({ connector: 'lmcache', noticeEndpoint } as const);
  const pools = stack.use(await startSimPools({ prefill, decode, engine: { ...SIM_ENGINE, ...lmcache } }));
  log.warn({ prefill, decode }, 'engines are simulated: answers are made up');
  return [...pools.prefill, ...pools.decode].map(({ url, role, receiverPorts: { init, alloc } }) => ({
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
    ...(noticeAddress === undefined || role !== 'decode' ? {} : { lmcache: { initPorts: init, allocPorts: alloc } }),
  }));
}

/** vLLM's default lifetimes, and slow enough that a stream is seen to grow. */
const SIM_ENGINE = {
  kvLeaseMs: 30_000,
  decoderTtlMs: 480_000,
  fixedMs: 5,
  prefillMsPerToken: 0.05,
  decodeMsPerToken: 5,
  bidirectional: true,
} as const;

/** The registry of this process; it knows no instance and does not probe yet. */
export function buildRegistry(settings: Settings, metrics: Metrics, log: Logger): PoolRegistryService {
  return new PoolRegistryService({
    health: follow(() => settings.current.health),
    log,
    connectors: Object.keys(CONNECTORS),
    credentialsOf: (role) => settings.current.instanceDefaults[role],
    probeKey: (instance) => probeKeyOf(instance, settings.current),
    onProbe: (kind) => metrics.probed(kind),
  });
}

/**
 * Waits until every instance has been looked at, or a moment has passed: the first requests then see the whole pools and
 * not just the engine whose probe came back first.
 */
export function firstLook(view: InstanceView): Promise<void> {
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

/** The registry of another process. */
export function registryElsewhere(config: Config, connectTo: ConnectTo): Client<typeof PoolRegistry> {
  return connectTo(config.registryUrl ?? config.routerUrl).poolRegistry;
}

/** A process without a registry watches the one that its router uses, unless told another. */
export function watchRemote(
  settings: Settings,
  connectTo: ConnectTo,
  log: Logger,
  stack: AsyncDisposableStack,
): RemoteView {
  return stack.use(
    new RemoteView(registryElsewhere(settings.current, connectTo), new PeerLog(log, 'registry').note, {
      health: follow(() => settings.current.health),
      async look({ role, url }, signal) {
        const { health: limits, instanceDefaults } = settings.current;
        const { headers } = instanceDefaults[POOL_OF[role] ?? 'both'];
        const { health } = await probeInstance({ url, headers }, new Set(), limits.timeoutMs, signal);
        return health.kind === 'ok' || health.kind === 'refused' ? health.kind : 'failed';
      },
      now: () => performance.now(),
    }),
  );
}

/** Feeds the metrics that show the pools. */
export function watchPools(metrics: Metrics, view: InstanceView & { readonly stale?: boolean }): void {
  metrics.watchInstances(() =>
    view.snapshot().map(({ role, state }) => ({ role: roleWord(role), state: stateWord(state) })),
  );
  metrics.watchRegistryStale(() => view.stale ?? false);
  const learnModels = () => metrics.setKnownModels(view.snapshot().flatMap(({ models }) => models.map(({ id }) => id)));
  learnModels();
  view.onChange(learnModels);
}
