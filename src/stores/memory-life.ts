import { MissReason } from '../../gen/baton/v1/kv_cache_store_pb.ts';
import { AgingMap } from './aging-map.ts';
import { Heap } from './heap.ts';
import { type Claim, isLive, type Slot, SlotTable, snapshotOf, viewAt } from './memory-slots.ts';
import { claimNotFound } from './refusals.ts';
import type { ChangeListener, ClaimGuard, ReleasableListener, StoreChange } from './store.ts';

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

/** Why an entry is dead; `seq` is the order of its put. */
export interface Tombstone {
  readonly tenant: string;
  readonly seq: number;
  readonly reason: MissReason;
}

/**
 * The lives of entries and claims: which state follows which, what time does to them, and what is remembered of the
 * dead. Every change of a slot's state is made here.
 */
export class Lifecycle {
  readonly table = new SlotTable();
  readonly #bounds: MemoryBounds;
  readonly #onExpired: (tenant: string) => void;
  readonly #runId: string;
  readonly #claims = new Map<string, Claim>();
  readonly #deadlines = new Heap<Claim>();
  readonly #ended: AgingMap<Claim>;
  readonly #deadEntries: AgingMap<Tombstone>;
  readonly #deadKeys: AgingMap<Tombstone>;
  readonly #listeners = new Set<ReleasableListener>();
  readonly #changeListeners = new Set<ChangeListener>();
  /** Owners whose queue grew since the listeners were told. */
  readonly #grown = new Set<string>();
  #revision = 0n;
  #lastClaim = 0;

  /** @param onExpired hears the tenant of each entry that nobody took in time */
  constructor(runId: string, bounds: MemoryBounds, onExpired: (tenant: string) => void) {
    this.#runId = runId;
    this.#bounds = bounds;
    this.#onExpired = onExpired;
    const tombs = {
      lifetimeMs: bounds.tombstoneMs,
      maxCount: bounds.tombstones,
      maxBytes: bounds.tombstoneBytes,
    };
    this.#deadEntries = new AgingMap(tombs);
    this.#deadKeys = new AgingMap(tombs);
    this.#ended = new AgingMap({ lifetimeMs: bounds.endedClaimMs, maxCount: bounds.endedClaims });
  }

  get revision(): bigint {
    return this.#revision;
  }

  get openClaims(): number {
    return this.#claims.size;
  }

  nextRevision(): bigint {
    this.#revision += 1n;
    return this.#revision;
  }

  /** The newest dead entry of a key that is remembered. */
  deadOfKey(keyId: string, now: number): Tombstone | undefined {
    return this.#deadKeys.get(keyId, now);
  }

  deadEntry(entryId: string, now: number): Tombstone | undefined {
    return this.#deadEntries.get(entryId, now);
  }

  /** Takes in a new idle slot. */
  add(slot: Slot, now: number): void {
    this.table.add(slot);
    this.#tellUpserted(slot, now);
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
    this.#tell({ kind: 'upserted', revision: slot.revision, entry: viewAt(snapshotOf(slot), now) });
  }

  #tell(change: StoreChange): void {
    for (const listener of [...this.#changeListeners]) listener(change);
  }

  /** Claims an idle slot for a taker, or an idle or queued one for release. */
  claim(slot: Slot, state: 'claimed' | 'releasing', deadlineMs: number, now: number): Claim {
    if (state === 'releasing' && isLive(slot.state)) this.#bury(slot, MissReason.RELEASED, now);
    this.#lastClaim += 1;
    const claim: Claim = {
      id: `c-${this.#runId}-${this.#lastClaim.toString(36)}`,
      tenant: slot.about.key.tenant,
      entryId: slot.id,
      forRelease: state === 'releasing',
      deadline: now + deadlineMs,
      state: 'open',
      slot,
      node: undefined,
    };
    claim.node = this.#deadlines.push(claim, claim.deadline);
    this.#claims.set(claim.id, claim);
    slot.claim = claim;
    slot.revision = this.nextRevision();
    this.table.move(slot, state);
    if (isLive(state)) this.#tellUpserted(slot, now);
    return claim;
  }

  /** The claim, with what time has made of it. */
  claimOf(claimId: string, mayEnd: ClaimGuard, now: number): Claim {
    const claim = this.#claims.get(claimId) ?? this.#ended.get(claimId, now);
    if (claim === undefined || !mayEnd(claim)) throw claimNotFound(claimId);
    if (claim.slot !== undefined) this.settle(claim.slot, now);
    if (claim.state === 'open' && claim.deadline <= now) this.commit(claim, now);
    return claim;
  }

  /** Ends an open claim whose handle was used, or may have been. */
  commit(claim: Claim, now: number): void {
    const { slot } = claim;
    this.#end(claim, 'committed', now);
    if (slot !== undefined) this.#kill(slot, MissReason.TAKEN, now);
  }

  /** Ends an open claim and puts its entry back where it came from: idle, or waiting to be freed. */
  release(claim: Claim, now: number): void {
    const { slot } = claim;
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

  /** Takes a slot out whose owner is gone, and its claim with it. */
  drop(slot: Slot, now: number): void {
    if (slot.claim !== undefined) this.#end(slot.claim, 'dropped', now);
    this.#kill(slot, MissReason.OWNER_GONE, now);
  }

  #end(claim: Claim, state: 'committed' | 'released' | 'dropped', now: number): void {
    claim.state = state;
    if (claim.node !== undefined) this.#deadlines.remove(claim.node);
    claim.node = undefined;
    if (claim.slot !== undefined) claim.slot.claim = undefined;
    claim.slot = undefined;
    this.#claims.delete(claim.id);
    this.#ended.set(claim.id, claim, now);
  }

  /** Lets time pass for one slot: whichever comes first, the deadline of its claim or the end of its blocks. */
  settle(slot: Slot, now: number): void {
    if (slot.state === 'dead') return;
    const { claim } = slot;
    if (claim !== undefined && claim.deadline <= now && claim.deadline <= slot.expiresAt) this.commit(claim, now);
    else if (slot.expiresAt <= now) this.#kill(slot, MissReason.EXPIRED, now);
  }

  /** The slot if time has left it alive. */
  alive(slot: Slot | undefined, now: number): Slot | undefined {
    if (slot !== undefined) this.settle(slot, now);
    return slot === undefined || slot.state === 'dead' ? undefined : slot;
  }

  /** Live slots of a key, oldest first. */
  liveOfKey(keyId: string, now: number): readonly Slot[] {
    for (const slot of [...this.table.ofKey(keyId)]) this.settle(slot, now);
    return [...this.table.ofKey(keyId)];
  }

  /** A live entry that the tenant may see. */
  visible(entryId: string, tenant: string | undefined, now: number): Slot | undefined {
    const slot = this.alive(this.table.slot(entryId), now);
    if (slot === undefined || !isLive(slot.state)) return undefined;
    return tenant === undefined || slot.about.key.tenant === tenant ? slot : undefined;
  }

  #kill(slot: Slot, reason: MissReason, now: number): void {
    if (isLive(slot.state)) this.#bury(slot, reason, now);
    if (slot.claim !== undefined) slot.claim.slot = undefined;
    slot.claim = undefined;
    this.table.move(slot, 'dead');
  }

  /** Moves an unclaimed slot to the release queue. */
  enqueue(slot: Slot, now: number): void {
    if (isLive(slot.state)) this.#bury(slot, MissReason.RELEASED, now);
    slot.revision = this.nextRevision();
    this.table.move(slot, 'queued');
    this.#grown.add(slot.about.owner.instanceId);
    while (this.table.queued > this.#bounds.queueEntries || this.table.queuedBytes > this.#bounds.queueBytes) {
      // The owner frees that one soonest by itself.
      const next = this.table.nextToExpire('queued');
      if (next === undefined) return;
      this.#kill(next, MissReason.RELEASED, now);
    }
  }

  /** Remembers why a live entry is one no more. */
  #bury(slot: Slot, reason: MissReason, now: number): void {
    if (reason === MissReason.EXPIRED && slot.claim === undefined) this.#onExpired(slot.about.key.tenant);
    const revision = this.nextRevision();
    if (this.#changeListeners.size > 0) {
      const { key, owner } = slot.about;
      const { tenant, conversationId } = key;
      const { instanceId } = owner;
      this.#tell({ kind: 'removed', revision, entryId: slot.id, reason, tenant, instanceId, conversationId });
    }
    const tombstone = { tenant: slot.about.key.tenant, seq: slot.seq, reason };
    this.#deadEntries.set(slot.id, tombstone, now, 2 * slot.id.length + 256);
    const before = this.#deadKeys.get(slot.keyId, now);
    if (before === undefined || before.seq <= slot.seq) {
      this.#deadKeys.set(slot.keyId, tombstone, now, 2 * slot.keyId.length + 256);
    }
  }

  /** Clears away up to `batch` slots and claims that are due. */
  sweep(now: number, batch: number): void {
    for (let left = batch; left > 0; left--) if (!this.sweepOne(now)) return;
  }

  /** Clears away one slot or claim that is due; false if none is. */
  sweepOne(now: number): boolean {
    const claim = this.#deadlines.peek()?.item;
    if (claim !== undefined && claim.deadline <= now) {
      if (claim.slot !== undefined) this.settle(claim.slot, now);
      if (claim.state === 'open') this.commit(claim, now);
      return true;
    }
    const slot = this.table.due(now);
    if (slot === undefined) return false;
    this.settle(slot, now);
    return true;
  }

  /** Forgets up to `batch` of each kind of memory that is too old. */
  trim(now: number, batch: number): void {
    for (const memory of [this.#ended, this.#deadEntries, this.#deadKeys]) memory.trim(now, batch);
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
