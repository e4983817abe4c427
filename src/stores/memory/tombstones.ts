import type { MissReason } from '../../../gen/baton/v1/kv_cache_store_pb.ts';
import { keyIdOf } from '../entry.ts';
import { reasonOf } from '../miss-reason.ts';
import type { StoreKey } from '../store.ts';
import { AgingRows } from './aging-rows.ts';
import { DIGEST_WORDS, digestOf } from './digest.ts';
import { Shared } from './shared.ts';

/** Why an entry is dead; `seq` is the order of its put. */
export interface Tombstone {
  readonly tenant: string;
  readonly seq: number;
  readonly reason: MissReason;
}

/** Rough size of a tombstone under its number or its key. */
const TOMBSTONE_BYTES = 128;

interface TombstoneBounds {
  readonly tombstones: number;
  readonly tombstoneBytes: number;
  readonly tombstoneMs: number;
}

/** Why entries are dead, for a while: by number, and of each key the newest. */
export class Tombstones {
  readonly #tenants = new Shared<string>((tenant) => tenant);
  readonly #bySeq: AgingRows;
  readonly #byKey: AgingRows;

  constructor({ tombstones, tombstoneBytes, tombstoneMs }: TombstoneBounds) {
    const bounds = {
      lifetimeMs: tombstoneMs,
      maxCount: tombstones,
      maxBytes: tombstoneBytes,
      onForgotten: ([tenant = 0]: readonly number[]) => this.#tenants.leave(tenant),
    };
    this.#bySeq = new AgingRows({ key: 1, value: 3 }, bounds);
    this.#byKey = new AgingRows({ key: DIGEST_WORDS, value: 3 }, bounds);
  }

  ofSeq(seq: number, now: number): Tombstone | undefined {
    return this.#read(this.#bySeq.get([seq], now));
  }

  ofKey(key: StoreKey, now: number): Tombstone | undefined {
    return this.#read(this.#byKey.get(digestOf(keyIdOf(key)), now));
  }

  add(key: StoreKey, { tenant, seq, reason }: Tombstone, now: number): void {
    const value = () => [this.#tenants.join(tenant), seq, reason];
    this.#bySeq.set([seq], value(), now, TOMBSTONE_BYTES);
    const id = digestOf(keyIdOf(key));
    const before = this.#read(this.#byKey.get(id, now));
    if (before === undefined || before.seq <= seq) this.#byKey.set(id, value(), now, TOMBSTONE_BYTES);
  }

  /** Forgets up to `batch` of each kind that are too old. */
  trim(now: number, batch: number): void {
    this.#bySeq.trim(now, batch);
    this.#byKey.trim(now, batch);
  }

  #read(value: readonly number[] | undefined): Tombstone | undefined {
    if (value === undefined) return undefined;
    const [tenant = 0, seq = 0, reason = 0] = value;
    return { tenant: this.#tenants.get(tenant), seq, reason: reasonOf(reason) };
  }
}
