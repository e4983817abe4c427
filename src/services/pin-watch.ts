import type { Client } from '@connectrpc/connect';
import { type Instance, type LoadSample, Role } from '../../gen/baton/v1/instance_pb.ts';
import type { KVCacheStore, OwnerStats } from '../../gen/baton/v1/kv_cache_store_pb.ts';
import { type PinEvent, PinGuard, type PinReading, pinnedShare } from '../core/pins.ts';
import type { Clock } from './clock.ts';
import type { InstanceView } from './instance-view.ts';
import { isSameLoad } from './same-load.ts';

/** What stored handles keep from being freed on a decode instance. */
export interface InstancePins {
  /** Live handles. */
  readonly entries: number;
  /** Blocks that stored handles name, also those in use and those that wait to be given back. */
  readonly blocks: number;
  /** Share of the instance's blocks, 0 to 1; 0 while their number is unknown. */
  readonly share: number;
}

/** What a {@link PinWatch} works with; times in milliseconds. */
export interface PinWatchOptions {
  readonly store: Client<typeof KVCacheStore>;
  readonly view: InstanceView;
  readonly clock: Clock;
  /** Pinned share above which idle handles are given back; 0: never. */
  readonly watermark: () => number;
  readonly lookMs: number;
  /** Until what was given back shows in the readings of the engines. */
  readonly settleMs: () => number;
  /** Told the pins of each decode instance with every look. */
  readonly tell: (instanceId: string, pins: InstancePins) => void;
  readonly observe: (instanceId: string, event: PinEvent) => void;
  /** Some instance has handles that may be given back now. */
  readonly onAllowance: () => void;
}

/** Longest wait for the store's counts. */
const STATS_MS = 2000;

interface Watched {
  readonly guard: PinGuard;
  readonly generation: number;
  load: LoadSample | undefined;
}

/** Counts what stored handles pin on each decode instance, and says from where idle ones have to be given back. */
export class PinWatch implements AsyncDisposable {
  readonly #options: PinWatchOptions;
  readonly #watched = new Map<string, Watched>();
  readonly #pins = new Map<string, InstancePins>();
  readonly #stop = new AbortController();
  #cancelTimer: () => void = () => {};
  #running: Promise<void> | undefined;

  constructor(options: PinWatchOptions) {
    this.#options = options;
    this.#arm();
  }

  /** Of each decode instance, as of the last look. */
  get pins(): ReadonlyMap<string, InstancePins> {
    return this.#pins;
  }

  /** Whether an idle handle of this instance is to be given back. */
  mayRelease(instanceId: string): boolean {
    return (this.#watched.get(instanceId)?.guard.allowance ?? 0) > 0;
  }

  /** A handle of that many blocks was given back, or was lost on the way. */
  noteReleased(instanceId: string, blocks: number): void {
    this.#watched.get(instanceId)?.guard.noteReleased(blocks);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.#stop.abort();
    this.#cancelTimer();
    await this.#running;
  }

  #arm(): void {
    if (this.#stop.signal.aborted) return;
    this.#cancelTimer = this.#options.clock.setTimer(() => {
      this.#running = this.#look().finally(() => this.#arm());
    }, this.#options.lookMs);
  }

  async #look(): Promise<void> {
    const { store, view } = this.#options;
    const options = { timeoutMs: STATS_MS, signal: this.#stop.signal };
    const stats = await store.getStats({}, options).catch(() => undefined);
    // Away: what was known stays, and nothing is given back on the strength of it.
    if (stats === undefined || this.#stop.signal.aborted) return;
    const owners = new Map(stats.owners.map((owner) => [owner.instanceId, owner]));
    const instances = view.snapshot().filter(({ role }) => role === Role.DECODE);
    const ids = new Set(instances.map(({ id }) => id));
    for (const known of [this.#watched, this.#pins]) for (const id of known.keys()) if (!ids.has(id)) known.delete(id);
    for (const instance of instances) this.#count(instance, owners.get(instance.id));
    if ([...ids].some((id) => this.mayRelease(id))) this.#options.onAllowance();
  }

  #count(instance: Instance, owner: OwnerStats | undefined): void {
    const { clock, observe, tell, watermark } = this.#options;
    const reading = readingOf(instance, owner);
    const pins = { entries: owner?.entries ?? 0, blocks: reading.pinnedBlocks, share: pinnedShare(reading) ?? 0 };
    this.#pins.set(instance.id, pins);
    tell(instance.id, pins);
    if (watermark() === 0) {
      this.#watched.delete(instance.id);
      return;
    }
    const watched = this.#watchedOf(instance);
    const isNew = !isSameLoad(watched.load, instance.load);
    watched.load = instance.load;
    for (const event of watched.guard.look(reading, isNew, clock.now())) observe(instance.id, event);
  }

  #watchedOf({ id, incarnation }: Instance): Watched {
    const generation = incarnation?.generation ?? 0;
    let watched = this.#watched.get(id);
    if (watched?.generation !== generation) {
      const { watermark, settleMs } = this.#options;
      const guard = new PinGuard(() => ({ watermark: watermark(), settleMs: settleMs() }));
      watched = { guard, generation, load: undefined };
      this.#watched.set(id, watched);
    }
    return watched;
  }
}

function readingOf({ engine, load }: Instance, owner: OwnerStats | undefined): PinReading {
  return {
    pinnedBlocks: Number(owner?.pinnedBlocks ?? 0n),
    totalBlocks: engine?.numGpuBlocks ?? 0,
    // 0 is also what an engine has that does not tell.
    usage: load === undefined || load.kvCacheUsage === 0 ? undefined : load.kvCacheUsage,
    requests: load === undefined ? 0 : load.running + load.waiting + load.waitingDeferred,
  };
}
