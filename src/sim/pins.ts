import type { BlockPool } from './blocks.ts';
import type { SimClock } from './clock.ts';

/** Blocks kept for another engine after their request ended; `deadline` is undefined for a pin that nothing ever frees. */
export interface Pin {
  readonly requestId: string;
  readonly blocks: readonly number[];
  readonly tokens: number;
  readonly kind: 'lease' | 'ttl' | 'leak';
  deadline: number | undefined;
}

/** The table of pinned blocks of one engine life; frees them on notice or at the deadline, whichever is first. */
export class PinTable {
  expired = 0;
  private readonly pins = new Map<string, { pin: Pin; timer: unknown }>();
  private readonly pool: BlockPool;
  private readonly clock: SimClock;
  private readonly onFree: () => void;

  constructor(pool: BlockPool, clock: SimClock, onFree: () => void) {
    this.pool = pool;
    this.clock = clock;
    this.onFree = onFree;
  }

  /** Takes over the caller's references of `pin.blocks`. */
  add(pin: Pin): void {
    const entry = { pin, timer: undefined };
    this.pins.set(pin.requestId, entry);
    this.arm(entry);
  }

  /** Live pins; those past their deadline are dropped first, even if the timer is late. */
  list(): Pin[] {
    const now = this.clock.now();
    for (const { pin } of [...this.pins.values()]) {
      if (pin.deadline !== undefined && pin.deadline <= now) this.expire(pin.requestId);
    }
    return [...this.pins.values()].map((entry) => entry.pin);
  }

  /** The live pin of a request. */
  find(requestId: string): Pin | undefined {
    this.list();
    return this.pins.get(requestId)?.pin;
  }

  /** Moves a lease's deadline to at least `deadline`; false if it is not pinned any more. */
  extend(requestId: string, deadline: number): boolean {
    const pin = this.find(requestId);
    if (pin?.kind !== 'lease' || pin.deadline === undefined) return false;
    pin.deadline = Math.max(pin.deadline, deadline);
    return true;
  }

  /** Frees a pin on the reader's notice; false if it was not pinned. */
  free(requestId: string): boolean {
    const entry = this.pins.get(requestId);
    if (entry === undefined || entry.pin.kind === 'leak') return false;
    this.drop(requestId);
    return true;
  }

  /** Stops all timers; the pool dies with the engine life. */
  clear(): void {
    for (const { timer } of this.pins.values()) this.clock.clearTimeout(timer);
    this.pins.clear();
  }

  private arm(entry: { pin: Pin; timer: unknown }): void {
    const { pin } = entry;
    if (pin.deadline === undefined) return;
    entry.timer = this.clock.setTimeout(
      () => {
        if ((pin.deadline ?? 0) > this.clock.now()) this.arm(entry);
        else this.expire(pin.requestId);
      },
      Math.max(0, pin.deadline - this.clock.now()),
    );
  }

  private expire(requestId: string): void {
    if (!this.pins.has(requestId)) return;
    this.expired += 1;
    this.drop(requestId);
  }

  private drop(requestId: string): void {
    const entry = this.pins.get(requestId);
    if (entry === undefined) return;
    this.clock.clearTimeout(entry.timer);
    this.pins.delete(requestId);
    this.pool.release(entry.pin.blocks);
    this.onFree();
  }
}
