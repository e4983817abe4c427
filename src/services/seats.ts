import type { Instance } from '../../gen/baton/v1/instance_pb.ts';
import { hash32 } from '../core/hash32.ts';
import type { LoadReading } from '../core/policy.ts';
import type { Seated } from '../core/pools.ts';

/** One instance as the router sees it over the whole of its life: its own counts beside the newest description. */
class Seat implements Seated {
  readonly id: string;
  readonly hash: number;
  instance: Instance;
  inFlight = 0;
  lastPick = 0;
  reading: LoadReading | undefined;

  constructor(instance: Instance) {
    this.id = instance.id;
    this.hash = hash32(instance.id);
    this.instance = instance;
  }

  get weight(): number {
    const { weight = 1 } = this.instance;
    return weight > 0 ? weight : 1;
  }
}

/** The one owner of what this router has running where, and of whose turn it was. */
export class Seats {
  readonly #byId = new Map<string, Seat>();
  readonly #now: () => number;
  #picks = 0;

  constructor(now: () => number) {
    this.#now = now;
  }

  /** The seat of an instance, told its newest description; the same object as long as the id is known. */
  describe(instance: Instance): Seated {
    const known = this.#byId.get(instance.id);
    const seat = known ?? new Seat(instance);
    if (known === undefined) this.#byId.set(instance.id, seat);
    const { load } = instance;
    if (known === undefined || load !== known.instance.load) {
      seat.reading =
        load === undefined
          ? undefined
          : {
              foreign: Math.max(0, load.running + load.waiting + load.waitingDeferred - seat.inFlight),
              waiting: load.waiting,
              kvUsage: load.kvCacheUsage,
              at: this.#now(),
            };
    }
    seat.instance = instance;
    return seat;
  }

  get(id: string): Seated | undefined {
    return this.#byId.get(id);
  }

  /** Forgets instances that are not in `kept` and have nothing running. */
  retain(kept: ReadonlySet<string>): void {
    for (const [id, { inFlight }] of this.#byId) if (inFlight === 0 && !kept.has(id)) this.#byId.delete(id);
  }

  /** Legs reserved or running on an instance. */
  inFlight(id: string): number {
    return this.#byId.get(id)?.inFlight ?? 0;
  }

  /** Where anything is running, for metrics. */
  busy(): readonly { readonly instance: string; readonly legs: number }[] {
    return [...this.#byId].flatMap(([instance, { inFlight: legs }]) => (legs > 0 ? [{ instance, legs }] : []));
  }

  /** The instance had a turn. */
  pick(id: string): void {
    const seat = this.#byId.get(id);
    this.#picks += 1;
    if (seat !== undefined) seat.lastPick = this.#picks;
  }

  take(id: string): void {
    const seat = this.#byId.get(id);
    if (seat !== undefined) seat.inFlight += 1;
  }

  free(id: string): void {
    const seat = this.#byId.get(id);
    if (seat !== undefined && seat.inFlight > 0) seat.inFlight -= 1;
  }
}
