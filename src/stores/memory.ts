import { randomUUID } from 'node:crypto';
import { setImmediate } from 'node:timers/promises';
import { MissReason } from '../../gen/baton/v1/kv_cache_store_pb.ts';
import type { BatonError } from '../core/errors.ts';
import { Lifecycle, type MemoryBounds } from './memory-life.ts';
import {
  type Claim,
  isLive,
  keyIdOf,
  passesFilter,
  type Slot,
  type Snapshot,
  sizeOf,
  snapshotOf,
  viewAt,
} from './memory-slots.ts';
import { chooseSlot } from './memory-take.ts';
import {
  claimNotFound,
  claimSpent,
  entryClaimed,
  entryExists,
  limitExceeded,
  pageTokenInvalid,
  quotaExceeded,
  revisionMismatch,
} from './refusals.ts';
import { ReplayWindow } from './replay-window.ts';
import { loadSnapshot, lockSnapshot, type SavedEntry, saveSnapshot } from './snapshot-file.ts';
import type {
  AtRevision,
  ChangeListener,
  ClaimGuard,
  DeleteCall,
  EntryView,
  GetResult,
  GetSelector,
  InvalidateCall,
  KvStore,
  ListCall,
  ListPage,
  NewEntry,
  PutCall,
  PutResult,
  ReleasableListener,
  ReleaseCall,
  StoreFilter,
  StoreOptions,
  StoreStats,
  TakeCall,
  Taken,
  TakeResult,
} from './store.ts';
import { StoreCounters } from './store-counters.ts';

/** Bounds that suit the limits of the contract. */
export const MEMORY_BOUNDS: MemoryBounds = {
  queueEntries: 8192,
  queueBytes: 64 * 1024 * 1024,
  tombstones: 100_000,
  tombstoneBytes: 64 * 1024 * 1024,
  tombstoneMs: 3_600_000,
  replays: 100_000,
  replayMs: 600_000,
  replayBytes: 128 * 1024 * 1024,
  endedClaims: 200_000,
  endedClaimMs: 3_600_000,
  sweep: 32,
};

/** How much more a call clears that is not on a request's path. */
const SLOW_PATH_FACTOR = 256;
/** Entries that are taken up before other work gets its turn. */
const SAVE_SLICE = 1000;
/** How often listeners to changes are told of what is over by itself. */
const TELL_EVERY_MS = 1000;
/** Most due entries and claims that a put clears away before it refuses. */
const QUOTA_SWEEP = 4096;
const NONE: readonly string[] = [];
/** Slots looked at before other work gets its turn. */
const SLICE = 10_000;

interface TakenAnswer {
  readonly claim: Claim;
  readonly snapshot: Snapshot;
  readonly handle: Uint8Array;
  readonly matchedTokens: number;
}

type TakeAnswer = TakenAnswer | { readonly claim?: undefined; readonly missed: Extract<TakeResult, { kind: 'miss' }> };

/**
 * Opens a store in the memory of this process. All is lost when the process ends, except where a snapshot file is named:
 * then a clean end saves what is idle, and the next start takes it up, once.
 */
export async function openMemoryStore(options: StoreOptions): Promise<MemoryStore> {
  const { snapshotFile, onNotice } = options;
  if (snapshotFile === undefined) return new MemoryStore(options);
  const lock = await lockSnapshot(snapshotFile);
  const loaded = await loadSnapshot(snapshotFile, Date.now()).catch(async (error: unknown) => {
    await lock[Symbol.asyncDispose]();
    throw error;
  });
  const store = new MemoryStore(options, MEMORY_BOUNDS, async (entries) => {
    try {
      const count = await saveSnapshot(snapshotFile, entries, Date.now());
      onNotice?.({ level: 'info', message: 'the store was saved', fields: { entries: count } });
    } catch (error) {
      onNotice?.({ level: 'error', message: `the store could not be saved: ${String(error)}` });
    } finally {
      await lock[Symbol.asyncDispose]();
    }
  });
  if (loaded.kind === 'refused') {
    onNotice?.({ level: 'warn', message: `the saved store is lost: ${snapshotFile} ${loaded.why}` });
  } else if (loaded.kind === 'loaded') {
    const entries = await store.restore(loaded.entries, loaded.awayMs);
    onNotice?.({ level: 'info', message: 'the saved store was taken up', fields: { entries } });
  }
  return store;
}

/**
 * The store in memory. Every call is one step, so nothing can come between its checks and its changes; nothing runs
 * between the calls: what is due is seen as gone when it is looked at, and cleared away a little with every call.
 */
export class MemoryStore implements KvStore {
  readonly runId: string;
  readonly #now: () => number;
  readonly #limits: StoreOptions['limits'];
  readonly #bounds: MemoryBounds;
  readonly #life: Lifecycle;
  readonly #puts: ReplayWindow<{ readonly snapshot: Snapshot; readonly displaced: readonly string[] }>;
  readonly #takes: ReplayWindow<TakeAnswer>;
  readonly #releases: ReplayWindow<readonly TakenAnswer[]>;
  readonly #deletes: ReplayWindow<boolean>;
  readonly #invalidations: ReplayWindow<{ readonly droppedEntries: number; readonly droppedClaims: number }>;
  readonly #counters = new StoreCounters();
  readonly #save: ((entries: Iterable<SavedEntry>) => Promise<void>) | undefined;
  #sweeping: NodeJS.Timeout | undefined;
  #lastSeq = 0;

  constructor(
    options: StoreOptions,
    bounds: MemoryBounds = MEMORY_BOUNDS,
    save?: (entries: Iterable<SavedEntry>) => Promise<void>,
  ) {
    this.#save = save;
    this.runId = options.runId ?? randomUUID().replaceAll('-', '');
    this.#now = options.now;
    this.#limits = options.limits;
    this.#bounds = bounds;
    this.#life = new Lifecycle(this.runId, bounds, (tenant) => this.#counters.expired(tenant));
    const window = { lifetimeMs: bounds.replayMs, maxCount: bounds.replays, maxBytes: bounds.replayBytes };
    this.#puts = new ReplayWindow(window);
    this.#takes = new ReplayWindow(window);
    this.#releases = new ReplayWindow(window);
    this.#deletes = new ReplayWindow(window);
    this.#invalidations = new ReplayWindow(window);
  }

  async put(call: PutCall): Promise<PutResult> {
    const now = this.#begin();
    const answer = this.#puts.find(call.id, now) ?? this.#putNew(call, now);
    this.#life.tellListeners();
    return { entry: viewAt(answer.snapshot, now), displaced: answer.displaced };
  }

  async take(call: TakeCall): Promise<TakeResult> {
    const now = this.#begin();
    const answer = this.#takes.find(call.id, now) ?? this.#takeNew(call, now);
    this.#life.tellListeners();
    if (answer.claim === undefined) return answer.missed;
    // Once the claim was put back the handle is somebody else's to take.
    if (answer.claim.state === 'released') return { kind: 'miss', reason: MissReason.TAKEN, matchedTokens: 0 };
    return { kind: 'taken', taken: takenAt(answer, now) };
  }

  async commit(claimId: string, mayEnd: ClaimGuard): Promise<void> {
    const now = this.#begin();
    const claim = this.#life.claimOf(claimId, mayEnd, now);
    if (claim.state === 'released') throw claimNotFound(claimId);
    if (claim.state === 'open') this.#life.commit(claim, now);
  }

  async release(claimId: string, mayEnd: ClaimGuard): Promise<EntryView | undefined> {
    const now = this.#begin();
    const claim = this.#life.claimOf(claimId, mayEnd, now);
    const isSpent = claim.state === 'committed' || (claim.state === 'dropped' && claim.deadline <= now);
    if (isSpent) {
      throw claimSpent(claimId);
    }
    if (claim.state === 'open') this.#life.release(claim, now);
    this.#life.tellListeners();
    const slot = this.#life.alive(this.#life.table.slot(claim.entryId), now);
    return slot === undefined || slot.claim !== undefined ? undefined : viewAt(snapshotOf(slot), now);
  }

  async takeForRelease(call: ReleaseCall): Promise<readonly Taken[]> {
    const now = this.#begin();
    const answers = this.#releases.find(call.id, now) ?? this.#takeForReleaseNew(call, now);
    return answers.filter(({ claim }) => claim.state !== 'released').map((answer) => takenAt(answer, now));
  }

  async get(selector: GetSelector): Promise<GetResult> {
    const now = this.#begin();
    if (selector.kind === 'key') {
      const keyId = keyIdOf(selector.key);
      const slots = this.#life.liveOfKey(keyId, now).toReversed();
      const miss = this.#life.deadOfKey(keyId, now)?.reason ?? MissReason.NEVER_STORED;
      return { entries: slots.map((slot) => viewAt(snapshotOf(slot), now)), miss: slots.length > 0 ? undefined : miss };
    }
    const slot = this.#life.visible(selector.entryId, selector.tenant, now);
    if (slot !== undefined) return { entries: [viewAt(snapshotOf(slot), now)], miss: undefined };
    const dead = this.#life.deadEntry(selector.entryId, now);
    const mayKnow = dead !== undefined && (selector.tenant === undefined || selector.tenant === dead.tenant);
    return { entries: [], miss: mayKnow ? dead.reason : MissReason.NEVER_STORED };
  }

  async list(call: ListCall): Promise<ListPage> {
    const now = this.#begin();
    const after = call.after === undefined ? 0 : this.#seqOf(call.after);
    const entries: EntryView[] = [];
    let looked = 0;
    let last: string | undefined;
    for (const slot of this.#life.table.after(after)) {
      if (entries.length === call.size || looked === SLICE)
        return { entries, next: last, revision: this.#life.revision };
      looked += 1;
      last = slot.id;
      if (!passesFilter(slot.about, call.filter) || this.#life.alive(slot, now) === undefined) continue;
      entries.push(viewAt(snapshotOf(slot), now));
    }
    return { entries, next: undefined, revision: this.#life.revision };
  }

  async delete(call: DeleteCall): Promise<boolean> {
    const now = this.#begin();
    const replay = this.#deletes.find(call.id, now);
    if (replay !== undefined) return replay;
    const slot = this.#life.visible(call.entryId, call.tenant, now);
    if (slot !== undefined) {
      if (call.revision !== undefined && call.revision !== slot.revision)
        throw revisionMismatch(call.entryId, slot.revision);
      if (slot.claim !== undefined) {
        throw entryClaimed(slot.id);
      }
      this.#life.enqueue(slot, now);
    }
    this.#deletes.remember(call.id, slot !== undefined, now, 0);
    this.#life.tellListeners();
    return slot !== undefined;
  }

  async invalidateOwner(
    call: InvalidateCall,
  ): Promise<{ readonly droppedEntries: number; readonly droppedClaims: number }> {
    const now = this.#begin();
    const replay = this.#invalidations.find(call.id, now);
    if (replay !== undefined) return replay;
    let droppedEntries = 0;
    let droppedClaims = 0;
    for (const slot of [...this.#life.table.members(call.instanceId)]) {
      if (call.keep(slot.about.owner.life) || this.#life.alive(slot, now) === undefined) continue;
      if (slot.claim !== undefined) droppedClaims += 1;
      else if (slot.state === 'idle') droppedEntries += 1;
      this.#life.drop(slot, now);
    }
    return this.#invalidations.remember(call.id, { droppedEntries, droppedClaims }, now, 0);
  }

  async stats(filter: StoreFilter): Promise<StoreStats> {
    const now = this.#begin(SLOW_PATH_FACTOR);
    for (const memory of [this.#puts, this.#takes, this.#releases, this.#deletes, this.#invalidations]) {
      memory.trim(now, SLICE);
    }
    this.#life.trim(now, SLICE);
    const counted = this.#counters.of(filter.tenant);
    if (filter.tenant === undefined && filter.instanceId === undefined && filter.conversationId === undefined) {
      return {
        ...counted,
        entries: this.#life.table.entries,
        claims: this.#life.openClaims,
        bytes: this.#life.table.bytes,
        releaseQueue: this.#life.table.queued,
        owners: [...this.#life.table.owners].map(([instanceId, { entries, pinnedBlocks }]) => ({
          instanceId,
          entries,
          pinnedBlocks,
        })),
      };
    }
    return { ...counted, ...(await this.#countSlots(filter, now)) };
  }

  readonly onChange = (listener: ChangeListener): (() => void) => {
    const end = this.#life.onChange(listener);
    // Without calls nothing would tell that an entry is over.
    this.#sweeping ??= setInterval(() => this.#begin(SLOW_PATH_FACTOR), TELL_EVERY_MS).unref();
    return () => {
      if (end() === 0) this.#stopSweeping();
    };
  };

  readonly onReleasable = (listener: ReleasableListener): (() => void) => this.#life.onReleasable(listener);

  async [Symbol.asyncDispose](): Promise<void> {
    this.#stopSweeping();
    await this.#save?.(this.#idleEntries(this.#begin()));
  }

  /** Takes up what an earlier run saved, `awayMs` ago; resolves with how many entries are still worth it. */
  async restore(saved: readonly SavedEntry[], awayMs: number): Promise<number> {
    let count = 0;
    for (const { entry, ageMs } of saved) {
      const ttlMs = entry.ttlMs - awayMs;
      const bytes = sizeOf(entry);
      const fits = this.#life.table.bytes + bytes <= this.#limits.totalBytes;
      if (ttlMs <= 0 || !fits) continue;
      this.#insert({ ...entry, ttlMs }, keyIdOf(entry.key), bytes, this.#now(), ageMs + awayMs);
      count += 1;
      if (count % SAVE_SLICE === 0) await setImmediate();
    }
    return count;
  }

  /** Those with an open claim count as spent. */
  *#idleEntries(now: number): Generator<SavedEntry> {
    for (const slot of this.#life.table.after(0)) {
      if (slot.state !== 'idle' || slot.expiresAt <= now) continue;
      const chain = this.#life.table.chainOf(slot);
      const handle = this.#life.table.handleOf(slot);
      const entry = { ...slot.about, handle, ttlMs: slot.expiresAt - now, ...(chain === undefined ? {} : { chain }) };
      yield { entry, ageMs: now - slot.storedAt };
    }
  }

  #stopSweeping(): void {
    clearInterval(this.#sweeping);
    this.#sweeping = undefined;
  }

  #putNew(call: PutCall, now: number): { readonly snapshot: Snapshot; readonly displaced: readonly string[] } {
    const { entry } = call;
    const bytes = sizeOf(entry);
    if (bytes > this.#limits.entryBytes) throw limitExceeded('entry_bytes', this.#limits.entryBytes);
    const keyId = keyIdOf(entry.key);
    const live = this.#life.liveOfKey(keyId, now);
    const leaving = this.#slotsToReplace(call, live);
    const perKey = call.derivedKey ? this.#limits.entriesPerDerivedKey : this.#limits.entriesPerKey;
    const tooMany = live.length - leaving.length + 1 - perKey;
    const idle = live.filter((slot) => slot.state === 'idle' && !leaving.includes(slot));
    if (tooMany > idle.length) {
      throw limitExceeded(call.derivedKey ? 'entries_per_derived_key' : 'entries_per_key', perKey);
    }
    const evicted = idle.slice(0, Math.max(0, tooMany));
    this.#checkQuota(entry.key.tenant, bytes, [...leaving, ...evicted], now);
    const { totalBytes } = this.#limits;
    while (this.#life.table.claimedBytes + bytes > totalBytes && this.#life.sweepOne(now));
    // Claimed entries stay whatever happens, so this is known before anything is changed.
    if (this.#life.table.claimedBytes + bytes > totalBytes) throw limitExceeded('total_bytes', totalBytes);
    const displaced: string[] = [];
    const displace = (slot: Slot): void => {
      if (slot.about.key.tenant === entry.key.tenant) displaced.push(slot.id);
      this.#life.enqueue(slot, now);
    };
    for (const slot of leaving) displace(slot);
    for (const slot of evicted) {
      this.#counters.evicted(slot.about.key.tenant);
      displace(slot);
    }
    while (this.#life.table.bytes + bytes > totalBytes) {
      // What is over by itself is no eviction.
      if (this.#life.sweepOne(now)) continue;
      const next = this.#life.table.nextToExpire('idle');
      if (next === undefined) break;
      this.#counters.evicted(next.about.key.tenant);
      displace(next);
    }
    const slot = this.#insert(entry, keyId, bytes, now);
    this.#counters.put(entry.key.tenant);
    return this.#puts.remember(
      call.id,
      { snapshot: snapshotOf(slot), displaced: displaced.length === 0 ? NONE : displaced },
      now,
      2 * keyId.length + 512,
    );
  }

  /** Throws QUOTA_EXCEEDED where one more entry of the tenant, with `leaving` gone, would be over its share. */
  #checkQuota(tenant: string, bytes: number, leaving: readonly Slot[], now: number): void {
    const { tenantEntries, tenantBytes } = this.#limits;
    const freed = leaving.reduce((sum, slot) => sum + slot.bytes, 0);
    const { table } = this.#life;
    const excess = (): (() => BatonError) | undefined => {
      const held = table.tenant(tenant);
      if (held.entries - leaving.length + 1 > tenantEntries)
        return () => quotaExceeded('tenant_entries', tenantEntries);
      if (held.bytes - freed + bytes > tenantBytes) return () => quotaExceeded('tenant_bytes', tenantBytes);
      return undefined;
    };
    let refusal = excess();
    // What is over by itself counts no more; a call clears only so much.
    for (let left = QUOTA_SWEEP; refusal !== undefined && left > 0 && this.#life.sweepOne(now); left--)
      refusal = excess();
    if (refusal !== undefined) throw refusal();
  }

  #slotsToReplace(call: PutCall, live: readonly Slot[]): readonly Slot[] {
    const { precondition } = call;
    if (precondition === undefined) return [];
    if (precondition === 'absent') {
      const newest = live.at(-1);
      if (newest === undefined) return [];
      throw entryExists(newest.id);
    }
    return [slotAt(live, precondition)];
  }

  #insert(entry: NewEntry, keyId: string, bytes: number, now: number, ageMs = 0): Slot {
    const { handle, chain, ttlMs, ...about } = entry;
    const { table } = this.#life;
    this.#lastSeq += 1;
    const slot: Slot = {
      id: `e-${this.runId}-${this.#lastSeq.toString(36).padStart(9, '0')}`,
      seq: this.#lastSeq,
      keyId,
      about: table.share(about),
      cells: table.keep(entry),
      handleBytes: handle.byteLength,
      chainTokens: chain?.tokenCount ?? 0,
      hasChain: chain !== undefined,
      bytes,
      storedAt: now - ageMs,
      expiresAt: now + ttlMs,
      revision: this.#life.nextRevision(),
      state: 'idle',
      claim: undefined,
      expiryNode: undefined,
      ownerNode: undefined,
    };
    this.#life.add(slot, now);
    return slot;
  }

  #takeNew(call: TakeCall, now: number): TakeAnswer {
    const keyId = keyIdOf(call.key);
    const live = this.#life.liveOfKey(keyId, now);
    const candidates = call.precondition === undefined ? live : [slotAt(live, call.precondition)];
    const { table } = this.#life;
    const choice = chooseSlot(candidates, call, this.#life.deadOfKey(keyId, now), (slot) => table.chainOf(slot));
    const { tenant } = call.key;
    if (choice.kind === 'miss') {
      for (const slot of choice.mismatched) this.#life.enqueue(slot, now);
      this.#counters.missed(tenant, choice.reason);
      const missed = { kind: 'miss' as const, reason: choice.reason, matchedTokens: choice.matchedTokens };
      return this.#takes.remember(call.id, { missed }, now, 0);
    }
    const { slot, matchedTokens } = choice;
    const claim = this.#life.claim(slot, 'claimed', call.deadlineMs, now);
    this.#counters.taken(tenant);
    const answer = { claim, snapshot: snapshotOf(slot), handle: table.handleOf(slot), matchedTokens };
    return this.#takes.remember(call.id, answer, now, slot.handleBytes + 2 * keyId.length + 512);
  }

  #takeForReleaseNew(call: ReleaseCall, now: number): readonly TakenAnswer[] {
    const slots: Slot[] = [];
    for (const state of call.queuedOnly ? (['queued'] as const) : (['queued', 'idle'] as const)) {
      while (slots.length < call.max) {
        const slot = this.#life.table.oldest(call.instanceId, state);
        if (slot === undefined) break;
        if (this.#life.alive(slot, now) === undefined) continue;
        this.#life.claim(slot, 'releasing', call.deadlineMs, now);
        slots.push(slot);
      }
    }
    const answers = slots
      .sort((a, b) => a.seq - b.seq)
      .flatMap((slot) => {
        const { claim } = slot;
        if (claim === undefined) return [];
        return [{ claim, snapshot: snapshotOf(slot), handle: this.#life.table.handleOf(slot), matchedTokens: 0 }];
      });
    const bytes = slots.reduce((sum, slot) => sum + slot.handleBytes + 2 * slot.keyId.length + 512, 0);
    return this.#releases.remember(call.id, answers, now, bytes);
  }

  /** The time of a call, which clears some of what is due on its way. */
  #begin(factor = 1): number {
    const now = this.#now();
    this.#life.sweep(now, this.#bounds.sweep * factor);
    return now;
  }

  async #countSlots(
    filter: StoreFilter,
    now: number,
  ): Promise<Pick<StoreStats, 'entries' | 'claims' | 'bytes' | 'releaseQueue' | 'owners'>> {
    const owners = new Map<string, { entries: number; pinnedBlocks: number }>();
    let [looked, entries, claims, bytes, releaseQueue] = [0, 0, 0, 0, 0];
    for (const slot of this.#life.table.members(filter.instanceId)) {
      looked += 1;
      if (looked % SLICE === 0) await setImmediate();
      if (!passesFilter(slot.about, filter) || this.#life.alive(slot, now) === undefined) continue;
      const { instanceId } = slot.about.owner;
      const owner = owners.get(instanceId) ?? { entries: 0, pinnedBlocks: 0 };
      owners.set(instanceId, owner);
      owner.pinnedBlocks += slot.about.blocks;
      if (slot.claim !== undefined) claims += 1;
      if (slot.state === 'queued') releaseQueue += 1;
      if (!isLive(slot.state)) continue;
      entries += 1;
      bytes += slot.bytes;
      owner.entries += 1;
    }
    const list = [...owners].map(([instanceId, counts]) => ({ instanceId, ...counts }));
    return { entries, claims, bytes, releaseQueue, owners: list };
  }

  #seqOf(entryId: string): number {
    const prefix = `e-${this.runId}-`;
    const digits = entryId.slice(prefix.length);
    if (!entryId.startsWith(prefix) || !/^[0-9a-z]{9,10}$/.test(digits)) {
      throw pageTokenInvalid();
    }
    return Number.parseInt(digits, 36);
  }
}

function takenAt(answer: TakenAnswer, now: number): Taken {
  return {
    claimId: answer.claim.id,
    claimRemainingMs: Math.max(0, answer.claim.deadline - now),
    entry: viewAt(answer.snapshot, now),
    handle: answer.handle,
    matchedTokens: answer.matchedTokens,
  };
}

function slotAt(live: readonly Slot[], wanted: AtRevision): Slot {
  const slot = live.find(({ id }) => id === wanted.entryId);
  if (slot === undefined || slot.state !== 'idle' || slot.revision !== wanted.revision) {
    throw revisionMismatch(wanted.entryId, slot?.revision);
  }
  return slot;
}
