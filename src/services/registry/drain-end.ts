import type { Client } from '@connectrpc/connect';
import type { KVCacheStore } from '../../../gen/baton/v1/kv_cache_store_pb.ts';
import type { Clock } from '../clock.ts';
import type { DrainingInstance, PoolRegistryService } from './pool-registry.ts';

/** What a {@link DrainEnd} looks at. */
export interface DrainEndOptions {
  readonly registry: Pick<PoolRegistryService, 'draining' | 'endDrain' | 'onChange'>;
  /** Tells what is stored of an instance; without it blocks are waited for until their time is over. */
  readonly store?: Client<typeof KVCacheStore>;
  /** The clock of the registry. */
  readonly clock: Clock;
}

const LOOK_MS = 1000;
/** Between the end of the last leg and its handle in the store lies a report. */
const SETTLE_MS = 2000;
/** An engine that does not tell its load is taken to be idle after the longest leg there is. */
const BLIND_MS = 30 * 60_000;
/** An answer of the store. */
const STORE_MS = 1000;

/**
 * Ends drains. A draining instance is done when it has no work and nobody can come for its blocks any more: those of a
 * prefill engine when their lease is over, those of a decode engine when the store has none of its entries or their time is
 * over.
 */
export class DrainEnd implements AsyncDisposable {
  readonly #options: DrainEndOptions;
  readonly #unsubscribe: () => void;
  readonly #seen = new Map<string, { readonly since: number; idleSince: number | undefined }>();
  #cancelTimer: (() => void) | undefined;
  #running: Promise<void> | undefined;
  #closed = false;

  constructor(options: DrainEndOptions) {
    this.#options = options;
    this.#unsubscribe = options.registry.onChange(() => this.#arm(0));
    this.#arm(0);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.#closed = true;
    this.#unsubscribe();
    this.#cancelTimer?.();
    await this.#running;
  }

  /** Runs only while something drains. */
  #arm(delayMs: number): void {
    if (this.#closed || this.#cancelTimer !== undefined || this.#running !== undefined) return;
    if (this.#options.registry.draining().length === 0) {
      this.#seen.clear();
      return;
    }
    this.#cancelTimer = this.#options.clock.setTimer(() => {
      this.#cancelTimer = undefined;
      this.#running = this.#look().finally(() => {
        this.#running = undefined;
        this.#arm(LOOK_MS);
      });
    }, delayMs);
  }

  async #look(): Promise<void> {
    const { registry } = this.#options;
    const draining = registry.draining();
    const ids = new Set(draining.map(({ id }) => id));
    for (const id of this.#seen.keys()) if (!ids.has(id)) this.#seen.delete(id);
    const done = await Promise.all(draining.map((instance) => this.#isDone(instance)));
    for (const [index, { id }] of draining.entries()) if (done[index] === true && !this.#closed) registry.endDrain(id);
  }

  async #isDone(instance: DrainingInstance): Promise<boolean> {
    const now = this.#options.clock.now();
    const idleMs = now - this.#idleSince(instance, now);
    if (idleMs < SETTLE_MS) return false;
    const { role, kvLeaseMs, decoderTtlMs } = instance;
    if (role !== 'decode' && idleMs < kvLeaseMs) return false;
    return role === 'prefill' || idleMs >= decoderTtlMs || !(await this.#mayBeStored(instance.id));
  }

  /** When its last work ended, as far as is known; `now` or later while it may have some. */
  #idleSince({ id, load }: DrainingInstance, now: number): number {
    const seen = this.#seen.get(id) ?? { since: now, idleSince: undefined };
    this.#seen.set(id, seen);
    if (load?.shared === true) {
      // Work may be the other id's, which gets legs; this one has none any more once none is seen.
      if (!load.busy && load.at > seen.since + SETTLE_MS) seen.idleSince ??= load.at;
      return seen.idleSince ?? seen.since + BLIND_MS;
    }
    if (load === undefined || load.at <= seen.since) return seen.idleSince ?? seen.since + BLIND_MS;
    seen.idleSince = load.busy ? undefined : (seen.idleSince ?? load.at);
    return seen.idleSince ?? now;
  }

  async #mayBeStored(instanceId: string): Promise<boolean> {
    const { store } = this.#options;
    if (store === undefined) return true;
    try {
      const { entries } = await store.listEntries({ filter: { instanceId }, pageSize: 1 }, { timeoutMs: STORE_MS });
      return entries.length > 0;
    } catch {
      // A store that is away may have some.
      return true;
    }
  }
}
