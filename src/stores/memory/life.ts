import { setImmediate } from 'node:timers/promises';
import { MissReason } from '../../../gen/baton/v1/kv_cache_store_pb.ts';
import { claimNotFound } from '../refusals.ts';
import type { ChangeListener, ClaimGuard, ReleasableListener, StoreChange, StoreKey, StoreLife } from '../store.ts';
import { type Claim, ClaimTable } from './claims.ts';
import { isLive, type Slot, seqOf } from './slot.ts';
import { type NewSlot, SlotTable } from './table.ts';
import { type Tombstone, Tombstones } from './tombstones.ts';

/** Bounds of what the memory backend keeps beside live entries; times in milliseconds, sizes in bytes. */
export interface MemoryBounds {
  readonly queueEntries: number;
  readonly queueBytes: number;
  /** Why dead entries are gone, by entry and by key. */
  readonly tombstones: number;
  readonly tombstoneBytes: number;
  readonly tombstoneMs: number;
  /** Answers, per method. */
  readonly replays: number;
  readonly replayMs: number;
  /** Per method; answers with handles are most of it. */
  readonly replayBytes: number;
  /** Claims that ended, so that a repeated call is answered as the first was. */
  readonly endedClaims: number;
  readonly endedClaimMs: number;
  /** Most due entries and claims that one call clears away. */
  readonly sweep: number;
}

/** What an owner's end took along. */
export interface Dropped {
  readonly droppedEntries: number;
  readonly droppedClaims: number;
}

/** An owner whose blocks of some lives are gone, while its slots are being dropped. */
interface Condemned {
  readonly instanceId: string;
  readonly keep: (life: StoreLife) => boolean;
  /** Number of the newest slot at that time. */
  readonly upTo: number;
  droppedEntries: number;
  droppedClaims: number;
}

/** Slots that are dropped before other work gets its turn. */
const DROP_SLICE = 500;

/**
 * The lives of entries and claims: which state follows which, what time does to them, and what is remembered of the
 * dead. Every change of a slot's state is made here.
 */
export class Lifecycle {
  readonly table: SlotTable;
  readonly #bounds: MemoryBounds;
  readonly #onExpired: (tenant: string) => void;
  readonly #runId: string;
  readonly #claims: ClaimTable;
  readonly #dead: Tombstones;
  readonly #listeners = new Set<ReleasableListener>();
  readonly #changeListeners = new Set<ChangeListener>();
  /** Owners whose queue grew since the listeners were told. */
  readonly #grown = new Set<string>();
  readonly #condemned = new Set<Condemned>();
  #revision = 0;

  /** @param onExpired hears the tenant of each entry that nobody took in time */
  constructor(runId: string, bounds: MemoryBounds, onExpired: (tenant: string) => void) {
    this.#claims = new ClaimTable(runId, { lifetimeMs: bounds.endedClaimMs, maxCount: bounds.endedClaims });
    this.table = new SlotTable(runId, this.#claims);
    this.#runId = runId;
    this.#bounds = bounds;
    this.#onExpired = onExpired;
    this.#dead = new Tombstones(bounds);
  }

  get revision(): bigint {
    return BigInt(this.#revision);
  }

  get openClaims(): number {
    return this.#claims.open;
  }

  nextRevision(): number {
    this.#revision += 1;
    return this.#revision;
  }

  /** The newest dead entry of a key that is remembered. */
  deadOfKey(key: StoreKey, now: number): Tombstone | undefined {
    return this.#dead.ofKey(key, now);
  }

  deadEntry(entryId: string, now: number): Tombstone | undefined {
    const seq = seqOf(this.#runId, entryId);
    return seq === undefined ? undefined : this.#dead.ofSeq(seq, now);
  }

  /** Takes in a new idle slot. */
  add(slot: Omit<NewSlot, 'revision'>, now: number): Slot {
    const added = this.table.add({ ...slot, revision: this.nextRevision() });
    this.#tellUpserted(added, now);
    return added;
  }

  /** Calls `listener` with every change of a live entry; the returned function ends that and tells how many are left. */
  onChange(listener: ChangeListener): () => number {
    this.#changeListeners.add(listener);
    return () => {
      this.#changeListeners.delete(listener);
      return this.#changeListeners.size;
    };
  }

  #tellUpserted(slot: Slot, now: number): void {
    if (this.#changeListeners.size === 0) return;
    this.#tell({ kind: 'upserted', revision: BigInt(slot.revision), entry: slot.viewAt(now) });
  }

  #tell(change: StoreChange): void {
    for (const listener of [...this.#changeListeners]) listener(change);
  }

  /** Claims an idle slot for a taker, or an idle or queued one for release; its answer is held until {@link letGo}. */
  claim(
    slot: Slot,
    state: 'claimed' | 'releasing',
    { deadlineMs, matchedTokens }: { readonly deadlineMs: number; readonly matchedTokens: number },
    now: number,
  ): Claim {
    if (state === 'releasing' && isLive(slot.state)) this.#bury(slot, MissReason.RELEASED, now);
    slot.revision = this.nextRevision();
    const claim = this.#claims.add({
      tenant: slot.tenant,
      seq: slot.seq,
      slotRow: slot.row,
      forRelease: state === 'releasing',
      deadline: now + deadlineMs,
      revision: slot.revision,
      matchedTokens,
    });
    slot.claim = claim;
    this.table.hold(slot);
    this.table.move(slot, state);
    if (isLive(state)) this.#tellUpserted(slot, now);
    return claim;
  }

  /** The claim of an answer, by its row. */
  answered(row: number): Claim {
    return this.#claims.at(row);
  }

  /** The answer of a claim is forgotten. */
  letGo(claim: Claim): void {
    this.table.letGo(this.table.held(claim.slotRow));
    this.#claims.letGo(claim);
  }

  /** The claim, with what time has made of it. */
  claimOf(claimId: string, mayEnd: ClaimGuard, now: number): Claim {
    const claim = this.#claims.find(claimId, now);
    if (claim === undefined || !mayEnd(claim)) throw claimNotFound(claimId);
    this.#settleClaim(claim, now);
    return claim;
  }

  #settleClaim(claim: Claim, now: number): void {
    const slot = this.#slotOf(claim);
    if (slot !== undefined) this.settle(slot, now);
    if (claim.state === 'open' && claim.deadline <= now) this.commit(claim, now);
  }

  /** The slot of an open claim, unless it is gone. */
  #slotOf(claim: Claim): Slot | undefined {
    return claim.state === 'open' ? this.table.bySeq(claim.seq) : undefined;
  }

  /** Ends an open claim whose handle was used, or may have been. */
  commit(claim: Claim, now: number): void {
    const slot = this.#slotOf(claim);
    this.#end(claim, 'committed', now);
    if (slot !== undefined) this.#kill(slot, MissReason.TAKEN, now);
  }

  /** Ends an open claim and puts its entry back where it came from: idle, or waiting to be freed. */
  release(claim: Claim, now: number): void {
    const slot = this.#slotOf(claim);
    this.#end(claim, 'released', now);
    if (slot === undefined) return;
    slot.revision = this.nextRevision();
    if (claim.forRelease) {
      this.enqueue(slot, now);
      return;
    }
    this.table.move(slot, 'idle');
    this.#tellUpserted(slot, now);
  }

  /**
   * Takes out an owner's slots of all lives but those to keep, and their claims. They count as gone at once; how many
   * there were is known when each was looked at, which leaves time for other calls.
   */
  async condemn(instanceId: string, keep: (life: StoreLife) => boolean, now: number): Promise<Dropped> {
    const condemned: Condemned = { instanceId, keep, upTo: this.table.lastSeq, droppedEntries: 0, droppedClaims: 0 };
    this.#condemned.add(condemned);
    try {
      let looked = 0;
      for (const slot of this.table.after(0)) {
        if (slot.seq > condemned.upTo) break;
        if (isCondemned(slot, condemned)) this.settle(slot, now);
        looked += 1;
        if (looked % DROP_SLICE === 0) await setImmediate();
      }
    } finally {
      this.#condemned.delete(condemned);
    }
    const { droppedEntries, droppedClaims } = condemned;
    return { droppedEntries, droppedClaims };
  }

  #drop(slot: Slot, condemned: Condemned, now: number): void {
    if (slot.claim !== undefined) condemned.droppedClaims += 1;
    else if (slot.state === 'idle') condemned.droppedEntries += 1;
    if (slot.claim !== undefined) this.#end(slot.claim, 'dropped', now);
    this.#kill(slot, MissReason.OWNER_GONE, now);
  }

  #end(claim: Claim, state: 'committed' | 'released' | 'dropped', now: number): void {
    const slot = this.#slotOf(claim);
    if (slot !== undefined) slot.claim = undefined;
    this.#claims.end(claim, state, now);
  }

  /** Lets time pass for one slot: whichever comes first, the deadline of its claim, the end of its blocks or of its owner. */
  settle(slot: Slot, now: number): void {
    if (slot.state === 'dead') return;
    const { claim } = slot;
    if (claim !== undefined && claim.deadline <= now && claim.deadline <= slot.expiresAt) this.commit(claim, now);
    else if (slot.expiresAt <= now) this.#kill(slot, MissReason.EXPIRED, now);
    for (const condemned of this.#condemned) {
      if (isCondemned(slot, condemned)) this.#drop(slot, condemned, now);
    }
  }

  /** The slot if time has left it alive. */
  alive(slot: Slot | undefined, now: number): Slot | undefined {
    if (slot !== undefined) this.settle(slot, now);
    return slot === undefined || slot.state === 'dead' ? undefined : slot;
  }

  /** Live slots of a key, oldest first. */
  liveOfKey(key: StoreKey, now: number): readonly Slot[] {
    return this.table.ofKey(key).filter((slot) => this.alive(slot, now) !== undefined);
  }

  /** A live entry that the tenant may see. */
  visible(entryId: string, tenant: string | undefined, now: number): Slot | undefined {
    const slot = this.alive(this.table.byId(entryId), now);
    if (slot === undefined || !isLive(slot.state)) return undefined;
    return tenant === undefined || slot.tenant === tenant ? slot : undefined;
  }

  #kill(slot: Slot, reason: MissReason, now: number): void {
    if (isLive(slot.state)) this.#bury(slot, reason, now);
    slot.claim = undefined;
    this.table.move(slot, 'dead');
  }

  /** Moves an unclaimed slot to the release queue. */
  enqueue(slot: Slot, now: number): void {
    if (isLive(slot.state)) this.#bury(slot, MissReason.RELEASED, now);
    slot.revision = this.nextRevision();
    this.table.move(slot, 'queued');
    this.#grown.add(slot.owner.instanceId);
    while (this.table.queued > this.#bounds.queueEntries || this.table.queuedBytes > this.#bounds.queueBytes) {
      // The owner frees that one soonest by itself.
      const next = this.table.nextToExpire('queued');
      if (next === undefined) return;
      this.#kill(next, MissReason.RELEASED, now);
    }
  }

  /** Remembers why a live entry is one no more. */
  #bury(slot: Slot, reason: MissReason, now: number): void {
    if (reason === MissReason.EXPIRED && slot.claim === undefined) this.#onExpired(slot.tenant);
    const revision = this.nextRevision();
    if (this.#changeListeners.size > 0) {
      const { tenant, conversationId } = slot.key;
      const { instanceId } = slot.owner;
      this.#tell({
        kind: 'removed',
        revision: BigInt(revision),
        entryId: slot.id,
        reason,
        tenant,
        instanceId,
        conversationId,
      });
    }
    this.#dead.add(slot.key, { tenant: slot.tenant, seq: slot.seq, reason }, now);
  }

  /** Clears away up to `batch` slots and claims that are due; false when none is left. */
  sweep(now: number, batch: number): boolean {
    for (let left = batch; left > 0; left--) if (!this.sweepOne(now)) return false;
    return batch > 0;
  }

  /** Clears away one slot or claim that is due; false if none is. */
  sweepOne(now: number): boolean {
    const claim = this.#claims.next();
    if (claim !== undefined && claim.deadline <= now) {
      this.#settleClaim(claim, now);
      return true;
    }
    const slot = this.table.due(now);
    if (slot === undefined) return false;
    this.settle(slot, now);
    return true;
  }

  /** Forgets up to `batch` of each kind of memory that is too old. */
  trim(now: number, batch: number): void {
    for (const memory of [this.#claims, this.#dead]) memory.trim(now, batch);
  }

  onReleasable(listener: ReleasableListener): () => void {
    this.#listeners.add(listener);
    return () => void this.#listeners.delete(listener);
  }

  /** Tells of queues that grew. Comes last in a call, because a listener may call the store. */
  tellListeners(): void {
    if (this.#grown.size === 0) return;
    const grown = [...this.#grown];
    this.#grown.clear();
    for (const instanceId of grown) {
      const queued = this.table.queuedOf(instanceId);
      if (queued > 0) for (const listener of [...this.#listeners]) listener(instanceId, queued);
    }
  }
}

function isCondemned(slot: Slot, { instanceId, keep, upTo }: Condemned): boolean {
  if (slot.state === 'dead') return false;
  return slot.seq <= upTo && slot.owner.instanceId === instanceId && !keep(slot.owner.life);
}
