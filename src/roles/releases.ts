import type { Client } from '@connectrpc/connect';
import type { KVCacheStore } from '../../gen/baton/v1/kv_cache_store_pb.ts';
import type { Settings } from '../config/settings.ts';
import type { PinEvent } from '../core/pins.ts';
import type { Logger } from '../obs/log.ts';
import type { Metrics } from '../obs/metrics.ts';
import { SYSTEM_CLOCK } from '../services/clock.ts';
import type { InstanceView } from '../services/instance-view.ts';
import type { OneTokenDeps } from '../services/one-token-leg.ts';
import { PinWatch, type PinWatchOptions } from '../services/pin-watch.ts';
import type { PoolRegistryService } from '../services/registry/pool-registry.ts';
import { ReleaseWorker } from '../services/release-worker.ts';
import type { LocalStore } from './store.ts';

/** What the parts of this file are built from. */
export interface ReleaseParts {
  readonly settings: Settings;
  readonly view: InstanceView;
  readonly store: Client<typeof KVCacheStore>;
  readonly localStore: LocalStore | undefined;
  readonly metrics: Metrics;
  readonly log: Logger;
  readonly stack: AsyncDisposableStack;
}

/** How often the store is looked at, milliseconds; a store in this process tells when its release queues grow. */
const LOOK_MS = {
  local: { pins: 1_000, queues: 5_000 },
  remote: { pins: 3_000, queues: 1_500 },
} as const;

/** Probes after which what was freed must show; a reading is never older than one. */
const SETTLE_PROBES = 3;
const LEAST_SETTLE_MS = 1_000;
/** Where probes have no regular pace. */
const BLIND_SETTLE_MS = 15_000;

/** Counts what stored handles pin; the registry of this process shows it. */
export function watchPins(
  { settings, view, store, localStore, metrics, log, stack }: ReleaseParts,
  registry: PoolRegistryService | undefined,
): { readonly pins: PinWatch; readonly onAllowance: (wake: () => void) => void } {
  let wake = () => {};
  const canRelease = settings.current.roles.includes('facade');
  const options: PinWatchOptions = {
    store,
    view,
    clock: SYSTEM_CLOCK,
    watermark: () => (canRelease ? settings.current.reuse.pinWatermark : 0),
    lookMs: LOOK_MS[localStore === undefined ? 'remote' : 'local'].pins,
    settleMs: () => settleMs(settings.current.health.intervalMs),
    tell: (instance, pins) => registry?.notePins(instance, pins),
    observe: (instance, event) => {
      metrics.pinEvent(event);
      const { level, text } = EVENTS[event];
      log[level]({ instance }, text);
    },
    onAllowance: () => wake(),
  };
  const pins = stack.use(new PinWatch(options));
  metrics.watchPins(() => [...pins.pins].map(([instance, { blocks, share }]) => ({ instance, blocks, share })));
  return {
    pins,
    onAllowance: (listener) => {
      wake = listener;
    },
  };
}

/** Gives handles back that nobody will read. */
export function startReleases(
  { settings, view, store, localStore, metrics, stack }: ReleaseParts,
  legs: OneTokenDeps,
  { pins, onAllowance }: ReturnType<typeof watchPins>,
): void {
  const releases = stack.use(
    new ReleaseWorker({
      ...legs,
      store,
      view,
      pins,
      remoteHost: () => settings.current.kv.remoteHost,
      observe: (result) => metrics.released(result),
      lookMs: LOOK_MS[localStore === undefined ? 'remote' : 'local'].queues,
    }),
  );
  onAllowance(() => releases.wake());
  if (localStore !== undefined) stack.defer(localStore.service.onReleasable(() => releases.wake()));
}

function settleMs(intervalMs: number): number {
  return intervalMs === 0 ? BLIND_SETTLE_MS : Math.max(LEAST_SETTLE_MS, SETTLE_PROBES * intervalMs);
}

const EVENTS: Readonly<Record<PinEvent, { readonly level: 'info' | 'warn' | 'error'; readonly text: string }>> = {
  above: {
    level: 'info',
    text: 'idle handles pin more of a decode engine than reuse.pin_watermark; the oldest are given back',
  },
  below: { level: 'info', text: 'idle handles pin less of a decode engine again; no more are given back' },
  effective: { level: 'info', text: 'handles were given back and the KV use of a decode engine fell' },
  ineffective: {
    level: 'error',
    text: 'handles were given back and the KV use of a decode engine did not fall: its blocks stay pinned until its own limit (decoder_kv_blocks_ttl)',
  },
  stuck: {
    level: 'warn',
    text: 'idle handles pin too much of a decode engine and nothing gives them back: no prefill engine of its compat group is known to read from it (bidirectional: on), or it is of a version that was not tested',
  },
};
