import { isDeepStrictEqual } from 'node:util';
import type { Config, InstanceConfig } from '../config/config.ts';
import type { Settings } from '../config/settings.ts';
import { SOURCES } from '../discovery/index.ts';
import type { MakeSource, SourceSink } from '../discovery/source.ts';
import { errorFields, type LogFields, type Logger } from '../obs/log.ts';
import type { PoolRegistryService } from '../services/registry/pool-registry.ts';

/** How long the start, or a reload, waits for what every source sees first, milliseconds. */
const FIRST_VIEW_MS = 1000;

/** What {@link startSources} works with. */
export interface SourcesDeps {
  readonly registry: PoolRegistryService;
  readonly settings: Settings;
  /** Simulated engines, which take the place of the instances of the settings. */
  readonly sims: readonly InstanceConfig[] | undefined;
  /** Connectors that this build knows. */
  readonly connectors: readonly string[];
  readonly log: Logger;
}

/**
 * Follows every source of the settings, and follows them anew when what they are made from has changed; the stack ends that.
 * Resolves when each has told a view or why it has none, or after a second.
 */
export async function startSources(deps: SourcesDeps, stack: AsyncDisposableStack): Promise<FollowedSources> {
  const followed = SOURCES.map((make) => new FollowedSource(make, deps));
  stack.defer(async () => void (await Promise.all(followed.map((source) => source.stop()))));
  const first = Promise.all(followed.map((source) => source.start()));
  let known = partOf(deps.settings.current);
  const unsubscribe = deps.settings.onChange(() => {
    const next = partOf(deps.settings.current);
    if (isDeepStrictEqual(next, known)) return;
    known = next;
    for (const source of followed) source.restart();
  });
  stack.defer(unsubscribe);
  await briefly(first);
  return { settled: () => briefly(Promise.all(followed.map((source) => source.settled()))) };
}

/** What {@link startSources} follows. */
export interface FollowedSources {
  /** Resolves when what the settings have changed is seen by the registry, or after a second. */
  settled(): Promise<void>;
}

async function briefly(done: Promise<unknown>): Promise<void> {
  let timer: NodeJS.Timeout | undefined;
  const late = new Promise<void>((resolve) => {
    timer = setTimeout(resolve, FIRST_VIEW_MS);
  });
  await Promise.race([done, late]).finally(() => clearTimeout(timer));
}

/** What sources are made from. */
function partOf({ instances, instanceDefaults, discovery }: Config) {
  return { instances, instanceDefaults, discovery };
}

/** One source over all that becomes of its settings. */
class FollowedSource {
  readonly #make: MakeSource;
  readonly #deps: SourcesDeps;
  /** Of the source that ran last. */
  #name: string | undefined;
  #stop = new AbortController();
  #run: Promise<void> = Promise.resolve();
  #turn: Promise<void> = Promise.resolve();
  #first: Promise<void> = Promise.resolve();
  #isClosed = false;

  constructor(make: MakeSource, deps: SourcesDeps) {
    this.#make = make;
    this.#deps = deps;
  }

  /** @returns when it has told a view, or why it has none; rejects where it cannot be made */
  async start(): Promise<void> {
    await this.#begin();
    await this.#first;
  }

  /** Resolves when it follows the settings as they are, and has told a view or why it has none. */
  async settled(): Promise<void> {
    await this.#turn;
    await this.#first;
  }

  /** Begins anew with the settings as they are; where that cannot be, the last view stays. */
  restart(): void {
    const again = async () => {
      await this.#end();
      if (!this.#isClosed) await this.#begin();
    };
    this.#turn = this.#turn.then(again).catch((error: unknown) => {
      this.#deps.log.error(errorFields(error), 'a source of instances cannot be followed; its last view stays');
    });
  }

  /** Resolves when nothing of it runs any more. */
  async stop(): Promise<void> {
    this.#isClosed = true;
    await this.#turn;
    await this.#end();
  }

  async #end(): Promise<void> {
    this.#stop.abort();
    await this.#run;
  }

  async #begin(): Promise<void> {
    const { registry, settings, sims, connectors, log } = this.#deps;
    const config = settings.current;
    const source = await this.#make({ config, instances: sims ?? config.instances, connectors });
    if (source === undefined) {
      // What a source told that is named no more is to drain.
      if (this.#name !== undefined) registry.applySource(this.#name, []);
      this.#name = undefined;
      this.#first = Promise.resolve();
      return;
    }
    const { name } = source;
    const first = Promise.withResolvers<void>();
    const sink: SourceSink = {
      view: (instances) => {
        registry.applySource(name, instances);
        first.resolve();
      },
      warn: (fields: LogFields, message: string) => {
        log.warn({ source: name, ...fields }, message);
        first.resolve();
      },
    };
    this.#name = name;
    this.#first = first.promise;
    this.#stop = new AbortController();
    this.#run = source.run(sink, this.#stop.signal).catch((error: unknown) => {
      log.error({ source: name, ...errorFields(error) }, 'a source of instances broke; its last view stays');
      first.resolve();
    });
  }
}
