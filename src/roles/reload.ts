import type { Loaded, LoadResult } from '../config/load-config.ts';
import { formatProblem } from '../config/problem.ts';
import { planReload } from '../config/reload.ts';
import type { Settings } from '../config/settings.ts';
import { type FileText, watchText } from '../discovery/watch-text.ts';
import type { ReloadAnswer } from '../http/reload.ts';
import type { Logger } from '../obs/log.ts';
import type { Metrics } from '../obs/metrics.ts';
import type { LeftOut } from '../services/registry/source-views.ts';

/** Where settings can be read again. */
export interface ReloadSource {
  /** What the process starts with. */
  readonly running: Loaded;
  /** The file of settings, which is watched; absent: there is none, and nothing to read again. */
  readonly file?: string;
  /** Reads everything anew. */
  readonly load: () => LoadResult;
}

/** Why the settings are read again. */
export type ReloadCause = 'SIGHUP' | 'file' | 'request';

/** What a {@link Reloader} works with. */
export interface ReloaderDeps {
  readonly source: ReloadSource | undefined;
  readonly settings: Settings;
  readonly metrics: Metrics;
  readonly log: Logger;
  /** What sources name and the pool does not have, once they follow the settings in force; must not reject. */
  readonly leftOut: () => Promise<readonly LeftOut[]>;
}

/** Puts settings in force that were read again, as far as they can be changed, and says what became of each key. */
export class Reloader implements AsyncDisposable {
  readonly #deps: ReloaderDeps;
  readonly #stop = new AbortController();
  #running: Loaded | undefined;
  /** What the file held when it was read last. */
  #seen: string | undefined;
  #watch: Promise<void> = Promise.resolve();

  constructor(deps: ReloaderDeps) {
    this.#deps = deps;
    this.#running = deps.source?.running;
    this.#seen = this.#running?.input.fileText;
    deps.metrics.configLoaded(Date.now());
  }

  /** Begins to watch the file, if there is one. */
  start(): void {
    const file = this.#deps.source?.file;
    if (file !== undefined) this.#watch = watchText(file, (now) => this.#look(now), this.#stop.signal);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.#stop.abort();
    await this.#watch;
  }

  /**
   * Reads the settings again and goes by them, before anything is awaited; where they have a mistake everything stays as it
   * is. The answer waits until the pool has followed, or for a second.
   */
  async reload(cause: ReloadCause): Promise<ReloadAnswer> {
    const { source, log } = this.#deps;
    if (source?.file === undefined || this.#running === undefined) {
      const message = 'there is no file of settings to read again (--config); flags and variables stay as they are';
      log.warn({ cause }, message);
      return { kind: 'no-file', message };
    }
    const next = source.load();
    // A file that is empty is more likely one that is being written than one that wants every default.
    if (next.kind === 'ok' && (next.input.fileText ?? '').trim() === '') {
      return this.#refuse(cause, [`${source.file}: the file is empty`]);
    }
    if (next.kind === 'ok') this.#seen = next.input.fileText;
    const plan = next.kind === 'ok' ? planReload(this.#running, next) : next;
    if (plan.kind === 'error') return this.#refuse(cause, plan.problems.map(formatProblem));
    const { loaded, applied, restart } = plan;
    if (applied.length > 0) this.#apply(this.#running, loaded, cause, applied);
    else log.info({ cause }, 'settings were read again; there is nothing to change');
    if (restart.length > 0) log.warn({ keys: restart }, `needs a restart: ${restart.join(', ')}`);
    this.#deps.metrics.configReloaded(applied.length > 0 ? 'applied' : 'unchanged', Date.now());
    const leftOut = await this.#deps.leftOut();
    if (leftOut.length > 0) {
      const instances = leftOut.map(({ instance, source, why }) => `${instance} (${source}): ${why}`);
      log.warn({ cause, instances }, 'instances that sources name are left out of the pool');
    }
    return { kind: 'ok', applied, restart, leftOut };
  }

  #look(now: FileText): void {
    // A reload for another cause may have read this text already.
    if (now.kind === 'error' || now.text !== this.#seen) void this.reload('file');
  }

  #apply(before: Loaded, loaded: Loaded, cause: ReloadCause, applied: readonly string[]): void {
    const { settings, log } = this.#deps;
    this.#running = loaded;
    const told = new Set(before.warnings.map(formatProblem));
    for (const warning of loaded.warnings.map(formatProblem)) if (!told.has(warning)) log.warn(warning);
    const left = before.config.instances.length;
    if (left > 0 && loaded.config.instances.length === 0) {
      log.warn({ instances: left }, 'the settings name no instances any more: all that they named drain');
    }
    settings.replace(loaded.config);
    log.info({ cause, keys: applied }, 'settings were read again and are in force');
  }

  #refuse(cause: ReloadCause, problems: readonly string[]): ReloadAnswer {
    const { log, metrics } = this.#deps;
    for (const problem of problems) {
      log.error({ cause, problem }, 'settings cannot be read again; those in force stay');
    }
    metrics.configReloaded('refused', Date.now());
    return { kind: 'refused', problems };
  }
}
