import type { NewEntry, StoreKey } from '../store.ts';
import { CellPool } from './cell-pool.ts';
import type { ClaimTable } from './claims.ts';
import { familyIdOf } from './families.ts';
import { Heap } from './heap.ts';
import { hashOf } from './key-hash.ts';
import { RowIndex } from './row-index.ts';
import { NO_ROW, Rows } from './rows.ts';
import { Sequence } from './sequence.ts';
import { Shared } from './shared.ts';
import { COLUMN, COLUMNS, isLive, Slot, type SlotSpace, type SlotState, seqOf } from './slot.ts';

interface Owner {
  /** By age. */
  readonly idle: Heap<number>;
  /** The idle ones whose conversations go on. */
  readonly goingOn: Heap<number>;
  readonly queued: Heap<number>;
  /** Of slots that are not dead. */
  slots: number;
  entries: number;
  pinnedBlocks: number;
}

interface TenantTally {
  entries: number;
  bytes: number;
}

const NO_ENTRIES: Readonly<TenantTally> = { entries: 0, bytes: 0 };

/** A new entry with what the store has decided on. */
export interface NewSlot {
  readonly entry: NewEntry;
  readonly bytes: number;
  readonly storedAt: number;
  readonly expiresAt: number;
  readonly revision: number;
}

/** All slots that are not dead, under every order in which they are looked for. Knows no clock and makes no decision. */
export class SlotTable {
  readonly #space: SlotSpace;
  readonly #keys: RowIndex;
  readonly #owners = new Map<string, Owner>();
  readonly #sequence = new Sequence();
  /** By expiry. */
  readonly #idle: Heap<number>;
  readonly #queued: Heap<number>;
  readonly #busy: Heap<number>;
  readonly #tenants = new Map<string, TenantTally>();
  #lastSeq = 0;
  #entries = 0;
  #bytes = 0;
  #claimedBytes = 0;
  #queuedBytes = 0;

  /** @param claims where the claims on its slots lie */
  constructor(runId: string, claims: ClaimTable) {
    const rows = new Rows(COLUMNS);
    this.#space = { rows, pool: new CellPool(), families: new Shared(familyIdOf), claims, runId };
    this.#keys = new RowIndex(rows, COLUMN);
    this.#idle = this.#heap(COLUMN.expiresAt, COLUMN.expiryPlace);
    this.#queued = this.#heap(COLUMN.expiresAt, COLUMN.expiryPlace);
    this.#busy = this.#heap(COLUMN.expiresAt, COLUMN.expiryPlace);
  }

  /** Live entries. */
  get entries(): number {
    return this.#entries;
  }

  /** Bytes of live entries. */
  get bytes(): number {
    return this.#bytes;
  }

  /** Bytes of entries with an open claim, which cannot make room. */
  get claimedBytes(): number {
    return this.#claimedBytes;
  }

  /** Live entries of a tenant, and their bytes. */
  tenant(tenant: string): Readonly<TenantTally> {
    return this.#tenants.get(tenant) ?? NO_ENTRIES;
  }

  get queued(): number {
    return this.#queued.size;
  }

  get queuedBytes(): number {
    return this.#queuedBytes;
  }

  get owners(): ReadonlyMap<string, Pick<Owner, 'entries' | 'pinnedBlocks'>> {
    return this.#owners;
  }

  /** Number of the newest slot. */
  get lastSeq(): number {
    return this.#lastSeq;
  }

  /** The slot that is not dead. */
  bySeq(seq: number): Slot | undefined {
    const row = this.#sequence.get(seq);
    return row === undefined ? undefined : this.#slot(row);
  }

  /** The slot that is not dead. */
  byId(entryId: string): Slot | undefined {
    const seq = seqOf(this.#space.runId, entryId);
    return seq === undefined ? undefined : this.bySeq(seq);
  }

  /** Live slots of a key, oldest first. */
  ofKey(key: StoreKey): Slot[] {
    const slots: Slot[] = [];
    const salt = Buffer.byteLength(key.cacheSalt);
    const texts = Buffer.from(key.cacheSalt + key.conversationId);
    for (const row of this.#keys.of(hashOf(key))) if (this.#hasKey(row, key, salt, texts)) slots.push(this.#slot(row));
    return slots.reverse();
  }

  /** Slots that are not dead with a greater number, in order. */
  *after(seq: number): Generator<Slot> {
    for (const row of this.#sequence.after(seq)) yield this.#slot(row);
  }

  /** By age; `goingOn` and `idle` are the idle ones whose conversations go on, and the others. */
  oldest(instanceId: string, which: 'idle' | 'goingOn' | 'queued'): Slot | undefined {
    return this.#first(this.#owners.get(instanceId)?.[which]);
  }

  queuedOf(instanceId: string): number {
    return this.#owners.get(instanceId)?.queued.size ?? 0;
  }

  nextToExpire(state: 'idle' | 'queued'): Slot | undefined {
    return this.#first(state === 'idle' ? this.#idle : this.#queued);
  }

  /** Some slot whose time is over. */
  due(now: number): Slot | undefined {
    for (const heap of [this.#idle, this.#queued, this.#busy]) {
      const row = heap.peek();
      if (row !== undefined && this.#space.rows.get(row, COLUMN.expiresAt) <= now) return this.#slot(row);
    }
    return undefined;
  }

  /** Takes in a new idle slot, with copies of the entry's bytes. */
  add({ entry, bytes, storedAt, expiresAt, revision }: NewSlot): Slot {
    const { key, handle, chain, owner, connector } = entry;
    const { tenant, model, adapter } = key;
    const { rows, pool, families } = this.#space;
    const texts = Buffer.from(key.cacheSalt + key.conversationId);
    const saltBytes = Buffer.byteLength(key.cacheSalt);
    const parts = chain === undefined ? [texts, handle] : [texts, handle, bytesOf(chain.words), bytesOf(chain.tail)];
    this.#lastSeq += 1;
    const hash = hashOf(key);
    const row = rows.acquire();
    const values: readonly (readonly [column: number, value: number])[] = [
      [COLUMN.hash, hash],
      [COLUMN.seq, this.#lastSeq],
      [COLUMN.family, families.join({ tenant, model, adapter, owner, connector })],
      [COLUMN.cells, pool.write(parts)],
      [COLUMN.saltBytes, saltBytes],
      [COLUMN.conversationBytes, texts.length - saltBytes],
      [COLUMN.handleBytes, handle.byteLength],
      [COLUMN.chainTokens, chain?.tokenCount ?? -1],
      [COLUMN.bytes, bytes],
      [COLUMN.storedTokens, entry.storedTokens],
      [COLUMN.engineBlockSize, entry.engineBlockSize],
      [COLUMN.blocks, entry.blocks],
      [COLUMN.storedAt, storedAt],
      [COLUMN.expiresAt, expiresAt],
      [COLUMN.revision, revision],
      [COLUMN.answers, 0],
      [COLUMN.claim, NO_ROW],
      [COLUMN.afterHit, entry.afterHit === true ? 1 : 0],
    ];
    for (const [column, value] of values) rows.set(row, column, value);
    const slot = this.#slot(row);
    slot.state = 'idle';
    this.#sequence.add(this.#lastSeq, row);
    this.#keys.add(row);
    let of = this.#owners.get(owner.instanceId);
    if (of === undefined) {
      const byAge = () => this.#heap(COLUMN.seq, COLUMN.agePlace);
      of = { idle: byAge(), goingOn: byAge(), queued: byAge(), slots: 0, entries: 0, pinnedBlocks: 0 };
      this.#owners.set(owner.instanceId, of);
    }
    of.slots += 1;
    of.pinnedBlocks += slot.blocks;
    this.#enter(slot, of);
    return slot;
  }

  /** Brings a slot into another state, out of the indexes of the old one. Nothing comes back to life. */
  move(slot: Slot, to: SlotState): void {
    const { rows, pool } = this.#space;
    const { instanceId } = slot.owner;
    const owner = this.#owners.get(instanceId);
    if (owner === undefined) throw new Error('a slot has no owner');
    const wasLive = isLive(slot.state);
    this.#leave(slot, owner);
    slot.state = to;
    if (wasLive && !isLive(to)) {
      const cells = pool.cut(rows.get(slot.row, COLUMN.cells), slot.textBytes + slot.handleBytes);
      rows.set(slot.row, COLUMN.cells, cells);
      this.#keys.delete(slot.row);
    }
    if (to !== 'dead') {
      this.#enter(slot, owner);
      return;
    }
    this.#sequence.delete(slot.seq);
    owner.slots -= 1;
    owner.pinnedBlocks -= slot.blocks;
    if (owner.slots === 0) this.#owners.delete(instanceId);
    if (rows.get(slot.row, COLUMN.answers) === 0) this.#free(slot);
  }

  /** Keeps what a slot tells and its handle for an answer, also when it is dead, until {@link letGo}. */
  hold(slot: Slot): void {
    const { rows } = this.#space;
    rows.set(slot.row, COLUMN.answers, rows.get(slot.row, COLUMN.answers) + 1);
  }

  /** A slot that is held, by its row. */
  held(row: number): Slot {
    return this.#slot(row);
  }

  letGo(slot: Slot): void {
    const { rows } = this.#space;
    const answers = rows.get(slot.row, COLUMN.answers) - 1;
    rows.set(slot.row, COLUMN.answers, answers);
    if (answers === 0 && slot.state === 'dead') this.#free(slot);
  }

  /** Gives up all that a dead slot takes. */
  #free(slot: Slot): void {
    const { rows, pool, families } = this.#space;
    pool.cut(rows.get(slot.row, COLUMN.cells), 0);
    families.leave(rows.get(slot.row, COLUMN.family));
    rows.release(slot.row);
  }

  #slot(row: number): Slot {
    return new Slot(row, this.#space);
  }

  #first(heap: Heap<number> | undefined): Slot | undefined {
    const row = heap?.peek();
    return row === undefined ? undefined : this.#slot(row);
  }

  #hasKey(row: number, key: StoreKey, saltBytes: number, texts: Buffer): boolean {
    const { rows, pool, families } = this.#space;
    if (rows.get(row, COLUMN.saltBytes) !== saltBytes) return false;
    if (rows.get(row, COLUMN.conversationBytes) !== texts.length - saltBytes) return false;
    const { tenant, model, adapter } = families.get(rows.get(row, COLUMN.family));
    if (tenant !== key.tenant || model !== key.model || adapter !== key.adapter) return false;
    return pool.startsWith(rows.get(row, COLUMN.cells), texts);
  }

  #heap(priority: number, place: number): Heap<number> {
    const { rows } = this.#space;
    return new Heap<number>({
      priority: (row) => rows.get(row, priority),
      place: (row) => rows.get(row, place),
      setPlace: (row, at) => rows.set(row, place, at),
    });
  }

  #enter(slot: Slot, owner: Owner): void {
    const { state } = slot;
    this.#byExpiry(state).push(slot.row);
    this.#byAge(slot, owner)?.push(slot.row);
    this.#tally(slot, owner, 1);
  }

  #leave(slot: Slot, owner: Owner): void {
    const { state } = slot;
    this.#byExpiry(state).remove(slot.row);
    this.#byAge(slot, owner)?.remove(slot.row);
    this.#tally(slot, owner, -1);
  }

  #byAge({ state, afterHit }: Slot, owner: Owner): Heap<number> | undefined {
    if (state === 'idle') return afterHit ? owner.goingOn : owner.idle;
    return state === 'queued' ? owner.queued : undefined;
  }

  #byExpiry(state: SlotState): Heap<number> {
    if (state === 'idle') return this.#idle;
    return state === 'queued' ? this.#queued : this.#busy;
  }

  #tally(slot: Slot, owner: Owner, sign: 1 | -1): void {
    const { state, bytes } = slot;
    if (state === 'queued') this.#queuedBytes += sign * slot.handleBytes;
    if (!isLive(state)) return;
    this.#tallyTenant(slot.tenant, sign, bytes);
    owner.entries += sign;
    this.#entries += sign;
    this.#bytes += sign * bytes;
    if (state === 'claimed') this.#claimedBytes += sign * bytes;
  }

  #tallyTenant(tenant: string, sign: 1 | -1, bytes: number): void {
    let tally = this.#tenants.get(tenant);
    if (tally === undefined) {
      tally = { entries: 0, bytes: 0 };
      this.#tenants.set(tenant, tally);
    }
    tally.entries += sign;
    tally.bytes += sign * bytes;
    if (tally.entries === 0) this.#tenants.delete(tenant);
  }
}

function bytesOf(words: Uint32Array): Uint8Array {
  return new Uint8Array(words.buffer, words.byteOffset, words.byteLength);
}
