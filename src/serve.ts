import type { RawFlags } from './config/flag-layers.ts';
import { loadConfig } from './config/load-config.ts';
import { formatProblem } from './config/problem.ts';
import { KNOWN } from './known.ts';
import { createLogger, type LogDestination } from './obs/log.ts';
import { type Running, startBaton } from './roles.ts';

/** What `baton serve` is told by its file and its command line. */
export interface ServeOptions {
  /** The keys of `baton.yaml` (docs/configuration.md), or the text of such a file. Default: none is set. */
  readonly settings?: string | Readonly<Record<string, unknown>>;
  /** Flags of `baton serve` by their names without `--`; a switch is the text `true`. They go before `settings`. */
  readonly flags?: RawFlags;
  /** Takes each log line with its line end. Default: standard error. */
  readonly log?: LogDestination;
}

/** A baton in this process. */
export interface Baton extends Running, AsyncDisposable {}

/**
 * Does what `baton serve` does, in this process: starts the services that the settings name and resolves once they listen.
 * Variables of the environment are not read, and signals are left alone: call `stop()` to end it.
 *
 * @throws Error with a line for each mistake in the settings, or with the reason why baton cannot start
 */
export async function serve(options: ServeOptions = {}): Promise<Baton> {
  const { settings = '', flags = {}, log: destination } = options;
  // JSON is YAML, so that a mistake has a place in both forms.
  const fileText = typeof settings === 'string' ? settings : JSON.stringify(settings, undefined, 2);
  const loaded = loadConfig({ flags, env: {}, fileText, fileName: 'settings', known: KNOWN, terminal: false });
  if (loaded.kind === 'error') throw new Error(loaded.problems.map(formatProblem).join('\n'));
  const { config, warnings } = loaded;
  const log = createLogger({ ...config.log, ...(destination === undefined ? {} : { destination }) });
  for (const warning of warnings) log.warn(formatProblem(warning));
  const running = await startBaton(config, { log });
  return { ...running, [Symbol.asyncDispose]: () => running.stop() };
}
