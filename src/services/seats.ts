import { type Instance, InstanceState, Role } from '../../gen/baton/v1/instance_pb.ts';
import { hash32 } from '../core/hash32.ts';
import type { LoadReading } from '../core/policy.ts';
import type { Seated } from '../core/pools.ts';
import { pickRank } from '../core/ranks.ts';
import { isSameLoad } from './same-load.ts';

/** Least part of its share that an instance gets while it begins. */
const LEAST_SHARE = 0.1;

/** How an instance begins. */
export interface SeatStart {
  /** Until it has its whole share of the work, milliseconds; 0: at once. */
  readonly slowStartMs: number;
}

interface Ramp {
  readonly start: SeatStart;
  readonly now: () => number;
}

/** One instance as the router sees it over the whole of its life: its own counts beside the newest description. */
class Seat implements Seated {
  readonly id: string;
  readonly hash: number;
  instance: Instance;
  inFlight = 0;
  lastPick = 0;
  reading: LoadReading | undefined;
  /** The life that was READY last, and since when; a short absence of the same life changes nothing. */
  life: number | undefined;
  readySince = Number.NEGATIVE_INFINITY;
  /** Legs on each data parallel rank; empty where the engine chooses by itself. */
  ranks: number[] = [];
  readonly #ramp: Ramp;

  constructor(instance: Instance, ramp: Ramp) {
    this.#ramp = ramp;
    this.id = instance.id;
    this.hash = hash32(instance.id);
    this.instance = instance;
  }

  get weight(): number {
    const { weight = 1 } = this.instance;
    return (weight > 0 ? weight : 1) * this.#share();
  }

  /** Caches of a new life are cold, and a policy that looks for the least loaded one would send everything there. */
  #share(): number {
    const { slowStartMs } = this.#ramp.start;
    if (this.readySince === Number.NEGATIVE_INFINITY || slowStartMs === 0) return 1;
    return Math.min(1, Math.max(LEAST_SHARE, (this.#ramp.now() - this.readySince) / slowStartMs));
  }
}

/** Most legs of an instance by what it does, 0: any number. */
export interface SeatLimits {
  readonly prefill: number;
  readonly decode: number;
}

/** The one owner of what this router has running where, and of whose turn it was. */
export class Seats {
  readonly #byId = new Map<string, Seat>();
  readonly #now: () => number;
  readonly #limits: SeatLimits;
  readonly #ramp: Ramp;
  /** Some instance was READY before: with nobody there, nothing is to be spared from one that begins. */
  #hasBegun = false;
  readonly #full = new Set<string>();
  /** The limits that `#full` goes by. */
  #marked: SeatLimits;
  #picks = 0;

  /** Both settings may change at any time. */
  constructor(now: () => number, limits: SeatLimits, start: SeatStart) {
    this.#now = now;
    this.#limits = limits;
    this.#marked = { ...limits };
    this.#ramp = { start, now };
  }

  /** Instances that have as many legs as they may. */
  get full(): ReadonlySet<string> {
    const { prefill, decode } = this.#limits;
    if (prefill !== this.#marked.prefill || decode !== this.#marked.decode) {
      this.#marked = { prefill, decode };
      for (const seat of this.#byId.values()) this.#mark(seat);
    }
    return this.#full;
  }

  /** The seat of an instance, told its newest description; the same object as long as the id is known. */
  describe(instance: Instance): Seated {
    const known = this.#byId.get(instance.id);
    const seat = known ?? new Seat(instance, this.#ramp);
    if (known === undefined) this.#byId.set(instance.id, seat);
    const { load } = instance;
    if (known === undefined || !isSameLoad(load, known.instance.load)) {
      seat.reading =
        load === undefined
          ? undefined
          : {
              foreign: Math.max(0, load.running + load.waiting + load.waitingDeferred - seat.inFlight),
              waiting: load.waiting,
              kvUsage: kvUsageOf(instance),
              at: this.#now(),
            };
    } else if (seat.reading !== undefined && seat.reading.kvUsage !== kvUsageOf(instance)) {
      seat.reading = { ...seat.reading, kvUsage: kvUsageOf(instance) };
    }
    seat.instance = instance;
    const life = instance.incarnation?.generation ?? 0;
    if (instance.state === InstanceState.READY && seat.life !== life) {
      seat.life = life;
      seat.readySince = this.#hasBegun ? this.#now() : Number.NEGATIVE_INFINITY;
    }
    return seat;
  }

  get(id: string): Seated | undefined {
    return this.#byId.get(id);
  }

  /** Forgets instances that are not in `kept` and have nothing running. */
  retain(kept: ReadonlySet<string>): void {
    for (const [id, { inFlight }] of this.#byId) if (inFlight === 0 && !kept.has(id)) this.#byId.delete(id);
    this.#hasBegun ||= [...this.#byId.values()].some(({ life }) => life !== undefined);
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

  /** The data parallel rank for a leg; undefined where the engine chooses by itself. */
  rankFor({ id, engine }: Instance, session: string): number | undefined {
    const size = engine?.dataParallelSize ?? 0;
    const seat = this.#byId.get(id);
    if (size <= 1 || seat === undefined) return undefined;
    if (seat.ranks.length !== size) seat.ranks = Array.from({ length: size }, (_, rank) => seat.ranks[rank] ?? 0);
    return pickRank(seat.ranks, session);
  }

  take(id: string, rank?: number): void {
    this.#change(id, rank, 1);
  }

  free(id: string, rank?: number): void {
    this.#change(id, rank, -1);
  }

  #change(id: string, rank: number | undefined, by: 1 | -1): void {
    const seat = this.#byId.get(id);
    if (seat === undefined || (by < 0 && seat.inFlight === 0)) return;
    seat.inFlight += by;
    const legs = rank === undefined ? undefined : seat.ranks[rank];
    if (rank !== undefined && legs !== undefined) seat.ranks[rank] = Math.max(0, legs + by);
    this.#mark(seat);
  }

  #mark({ id, instance, inFlight }: Seat): void {
    const { prefill, decode } = this.#marked;
    const limit = instance.role === Role.PREFILL ? prefill : decode;
    if (limit > 0 && inFlight >= limit) this.#full.add(id);
    else this.#full.delete(id);
  }
}

/** Pinned blocks are in use and in the engine's own number; they stand alone where it tells none. */
function kvUsageOf({ load, pins }: Instance): number {
  return load?.kvCacheUsage || (pins?.share ?? 0);
}
