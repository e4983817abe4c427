import { setImmediate } from 'node:timers/promises';
import { AsyncDisposableStack } from '@whatwg-node/disposablestack';
import type { Config } from './config/config.ts';
import { Settings } from './config/settings.ts';
import { readVersion } from './config/version.ts';
import type { FacadeService } from './http/facade.ts';
import { createLogger, type Logger } from './obs/log.ts';
import { Metrics } from './obs/metrics.ts';
import { openFront } from './roles/front.ts';
import type { ReloadCause, ReloadSource } from './roles/reload.ts';
import type { Addresses } from './roles/start-roles.ts';
import { Life } from './services/life.ts';
import { pause } from './services/pause.ts';

/** A running process: what it listens on, and how to end it. */
export interface Running {
  readonly addresses: Readonly<Addresses>;
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

/**
 * Starts the roles of `config` in this process; everything is closed again when one of them cannot start. The facade comes
 * first: it listens before the rest is even loaded, so that whoever asks whether the process lives has an answer at once.
 */
export async function startBaton(config: Config, options: StartOptions = {}): Promise<Running> {
  await using stack = new AsyncDisposableStack();
  const log = options.log ?? createLogger({ level: config.log.level, format: config.log.format });
  const version = readVersion();
  const metrics = new Metrics({ version });
  stack.use(metrics.watchEventLoop());
  const settings = new Settings(config);
  const life = new Life<FacadeService>();
  const hasFacade = config.roles.includes('facade');
  const front = hasFacade ? await openFront({ settings, metrics, log, version, life }, stack) : undefined;
  const { startRoles } = await loadRoles();
  const parts = { settings, metrics, log, version, front, reloadSource: options.reload };
  const { addresses, reloader } = await startRoles(parts, stack);
  const resources = stack.move();
  log.info({ ...addresses, roles: config.roles, version }, 'baton is up');
  return {
    addresses,
    async stop({ settle = false } = {}) {
      life.stop();
      const settleMs = settle && hasFacade ? settings.current.timeouts.drainSettleMs : 0;
      log.info(settleMs > 0 ? { settleMs } : {}, 'stopping');
      if (settleMs > 0) await pause(settleMs);
      await resources.disposeAsync();
      log.info('stopped');
    },
    reload: (cause) => void reloader.reload(cause),
  };
}

/** Parts of what `start-roles.ts` imports, in portions that take about as long to load. */
const PORTIONS = [
  () => import('../gen/baton/v1/pool_registry_pb.ts'),
  () => import('./rpc/direct-client.ts'),
  () => import('./roles/store.ts'),
  () => import('./roles/router.ts'),
  () => import('./engine/client.ts'),
  () => import('./roles/facade.ts'),
  () => import('./roles/rpc-port.ts'),
] as const;

/** Loads the roles; the facade answers between the portions. */
async function loadRoles(): Promise<typeof import('./roles/start-roles.ts')> {
  for (const load of PORTIONS) {
    // A connection is taken in the first turn, and what it asks is read in the second.
    await setImmediate();
    await setImmediate();
    await load();
  }
  return import('./roles/start-roles.ts');
}
