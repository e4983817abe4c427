import type { InstanceDefaults, KubernetesConfig } from '../../config/discovery.ts';
import { pause } from '../../services/pause.ts';
import type { InstanceSource, SourceSink } from '../source.ts';
import { instancesOf, readSlice, type Slice, sliceKey } from './slices.ts';

/** One event of a watch, as the server wrote it. */
export interface SliceEvent {
  /** ADDED, MODIFIED, DELETED, BOOKMARK or ERROR. */
  readonly type: string;
  readonly object: unknown;
}

/** How a watch ended: `gone` where the server does not know any more what changed since, so that only a new list helps. */
export type WatchEnd = 'ended' | 'gone';

/** What is asked of an API server; both reject where it does not answer, or refuses. */
export interface SliceApi {
  readonly list: () => Promise<{ readonly items: readonly unknown[]; readonly version: string }>;
  readonly watch: (version: string, onEvent: (event: SliceEvent) => void, signal: AbortSignal) => Promise<WatchEnd>;
}

/** Waits between attempts to reach a server that is away, milliseconds. */
export interface Backoff {
  readonly firstMs: number;
  readonly lastMs: number;
}

const BACKOFF: Backoff = { firstMs: 500, lastMs: 30_000 };

/** Follows the EndpointSlices of an API server: a list, then a watch from where the list was, and so on. */
export function followSlices(
  api: SliceApi,
  config: KubernetesConfig,
  defaults: InstanceDefaults,
  backoff: Backoff = BACKOFF,
): InstanceSource {
  const follower = new Follower(api, config, defaults, backoff);
  return { name: 'kubernetes', run: (sink, signal) => follower.run(sink, signal) };
}

class Follower {
  readonly #api: SliceApi;
  readonly #config: KubernetesConfig;
  readonly #defaults: InstanceDefaults;
  readonly #backoff: Backoff;
  readonly #slices = new Map<string, Slice>();
  /** Where the next watch begins; empty asks for a list first. */
  #version = '';
  #complaints: readonly string[] = [];
  #isAway = false;

  constructor(api: SliceApi, config: KubernetesConfig, defaults: InstanceDefaults, backoff: Backoff) {
    this.#api = api;
    this.#config = config;
    this.#defaults = defaults;
    this.#backoff = backoff;
  }

  async run(sink: SourceSink, signal: AbortSignal): Promise<void> {
    let waitMs = this.#backoff.firstMs;
    while (!signal.aborted) {
      const startedAt = performance.now();
      try {
        if (this.#version === '') await this.#list(sink);
        if (signal.aborted) return;
        const end = await this.#api.watch(this.#version, (event) => this.#take(event, sink), signal);
        if (end === 'gone') this.#version = '';
        // A server that ends each watch at once is not asked without a pause.
        if (performance.now() - startedAt >= this.#backoff.firstMs) {
          waitMs = this.#backoff.firstMs;
          continue;
        }
      } catch (error) {
        if (signal.aborted) return;
        this.#complain(sink, error);
      }
      await pause(waitMs, signal);
      waitMs = Math.min(2 * waitMs, this.#backoff.lastMs);
    }
  }

  async #list(sink: SourceSink): Promise<void> {
    const { items, version } = await this.#api.list();
    this.#slices.clear();
    for (const item of items) this.#put(item);
    this.#version = version;
    this.#isAway = false;
    this.#tell(sink);
  }

  #take({ type, object }: SliceEvent, sink: SourceSink): void {
    this.#isAway = false;
    if (type === 'ERROR') {
      // Whatever it is, what was missed is not known.
      this.#version = '';
      return;
    }
    const version = versionOf(object);
    if (version !== undefined) this.#version = version;
    if (type === 'BOOKMARK') return;
    const slice = readSlice(object);
    if (slice === undefined) return;
    if (type === 'DELETED') this.#slices.delete(sliceKey(slice));
    else this.#slices.set(sliceKey(slice), slice);
    this.#tell(sink);
  }

  #put(item: unknown): void {
    const slice = readSlice(item);
    if (slice !== undefined) this.#slices.set(sliceKey(slice), slice);
  }

  #tell(sink: SourceSink): void {
    const { instances, problems } = instancesOf(this.#slices.values(), this.#config, this.#defaults);
    for (const problem of problems) {
      if (!this.#complaints.includes(problem)) sink.warn({ slice: problem }, 'an EndpointSlice tells no engines');
    }
    this.#complaints = problems;
    sink.view(instances);
  }

  #complain(sink: SourceSink, error: unknown): void {
    // Once while it goes on.
    if (this.#isAway) return;
    this.#isAway = true;
    const message = error instanceof Error ? (error.message.split('\n', 1)[0] ?? '') : String(error);
    sink.warn({ problem: message }, 'the Kubernetes API does not tell of engines; the last view stays');
  }
}

function versionOf(object: unknown): string | undefined {
  if (typeof object !== 'object' || object === null || !('metadata' in object)) return undefined;
  const { metadata } = object;
  if (typeof metadata !== 'object' || metadata === null || !('resourceVersion' in metadata)) return undefined;
  return typeof metadata.resourceVersion === 'string' ? metadata.resourceVersion : undefined;
}
