import { randomUUID } from 'node:crypto';
import { setImmediate } from 'node:timers/promises';
import { MissReason } from '../../../gen/baton/v1/kv_cache_store_pb.ts';
import { chooseSlot } from '../choose-entry.ts';
import { passesFilter, sizeOf } from '../entry.ts';
import { FilteredCounts } from '../filtered-counts.ts';
import { reasonOf } from '../miss-reason.ts';
import { claimNotFound, claimSpent, entryClaimed, pageTokenInvalid, revisionMismatch } from '../refusals.ts';
import type { SavedEntry } from '../snapshot-file.ts';
import type {
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
} from '../store.ts';
import { StoreCounters } from '../store-counters.ts';
import type { Claim } from './claims.ts';
import { type Dropped, Lifecycle, type MemoryBounds } from './life.ts';
import { makeRoom } from './make-room.ts';
import { ReplayWindow } from './replay-window.ts';
import { NO_ROW } from './rows.ts';
import { entryIdOf, isLive, type Slot, seqOf, slotAt } from './slot.ts';

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
  sweep: 8,
};

/** How much more a call clears that is not on a request's path. */
const SLOW_PATH_FACTOR = 32;
/** How often listeners to changes are told of what is over by itself. */
const TELL_EVERY_MS = 1000;
/** Rough size of a remembered claim, beside its handle and what {@link ReplayWindow} counts itself. */
const TAKE_ANSWER_BYTES = 512;
/** Due entries and claims that are cleared away before other work gets its turn. */
const DUE_SLICE = 64;
/** Saved entries that are taken up before other work gets its turn. */
const RESTORE_SLICE = 1000;
/** Answers of each method, and of each kind of what is remembered of the dead, that one look at the counts clears away. */
const TRIM_SLICE = 256;
/** Slots looked at before other work gets its turn. */
const SLICE = 2000;

/**
 * The store in memory. Every call is one step, so nothing can come between its checks and its changes. What is due is
 * seen as gone when it is looked at, and cleared away a little with every call; where much is due at once, the rest
 * follows in turns of its own.
 */
export class MemoryStore implements KvStore {
  readonly runId: string;
  readonly #now: () => number;
  readonly #limits: StoreOptions['limits'];
  readonly #bounds: MemoryBounds;
  readonly #life: Lifecycle;
  /** Of each the entry's number and revision, its time, and the numbers of the entries that it displaced. */
  readonly #puts: ReplayWindow;
  /** Of each the row of its claim; or {@link NO_ROW}, the reason of the miss and the matched tokens. */
  readonly #takes: ReplayWindow;
  /** Of each the rows of its claims. */
  readonly #releases: ReplayWindow;
  /** Of each 1 where the entry was there. */
  readonly #deletes: ReplayWindow;
  /** Of each its number among the dropped. */
  readonly #invalidations: ReplayWindow;
  readonly #dropped = new Map<number, Promise<Dropped>>();
  #lastDropped = 0;
  readonly #counters = new StoreCounters();
  readonly #save: ((entries: Iterable<SavedEntry>) => Promise<void>) | undefined;
  #sweeping: NodeJS.Timeout | undefined;
  #isClearing = false;

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
    const letGo = (rows: readonly number[]) => {
      for (const row of rows) this.#life.letGo(this.#life.answered(row));
    };
    this.#puts = new ReplayWindow(window);
    this.#takes = new ReplayWindow({
      ...window,
      onForgotten: ([row = NO_ROW]) => letGo(row === NO_ROW ? [] : [row]),
    });
    this.#releases = new ReplayWindow({ ...window, onForgotten: letGo });
    this.#deletes = new ReplayWindow(window);
    this.#invalidations = new ReplayWindow({
      ...window,
      onForgotten: ([number = 0]) => void this.#dropped.delete(number),
    });
  }

  async put(call: PutCall): Promise<PutResult> {
    const now = this.#begin();
    const answer = this.#puts.find(call.id, now) ?? this.#putNew(call, now);
    this.#life.tellListeners();
    const [seq = 0, revision = 0, at = 0, ...displaced] = answer;
    const entry = this.#putView(call.entry, { seq, revision, at }, now);
    return { entry, displaced: displaced.map((other) => entryIdOf(this.runId, other)) };
  }

  async take(call: TakeCall): Promise<TakeResult> {
    const now = this.#begin();
    const answer = this.#takes.find(call.id, now) ?? this.#takeNew(call, now);
    this.#life.tellListeners();
    const [row = NO_ROW, reason = 0, matchedTokens = 0] = answer;
    if (row === NO_ROW) return { kind: 'miss', reason: reasonOf(reason), matchedTokens };
    const claim = this.#life.answered(row);
    // Once the claim was put back the handle is somebody else's to take.
    if (claim.state === 'released') return { kind: 'miss', reason: MissReason.TAKEN, matchedTokens: 0 };
    return { kind: 'taken', taken: this.#takenAt(claim, now) };
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
    const slot = this.#life.alive(this.#life.table.bySeq(claim.seq), now);
    return slot === undefined || slot.claim !== undefined ? undefined : slot.viewAt(now);
  }

  async takeForRelease(call: ReleaseCall): Promise<readonly Taken[]> {
    const now = this.#begin();
    const rows = this.#releases.find(call.id, now) ?? this.#takeForReleaseNew(call, now);
    const claims = rows.map((row) => this.#life.answered(row));
    return claims.filter(({ state }) => state !== 'released').map((claim) => this.#takenAt(claim, now));
  }

  async get(selector: GetSelector): Promise<GetResult> {
    const now = this.#begin();
    if (selector.kind === 'key') {
      const slots = this.#life.liveOfKey(selector.key, now).toReversed();
      const miss = this.#life.deadOfKey(selector.key, now)?.reason ?? MissReason.NEVER_STORED;
      return { entries: slots.map((slot) => slot.viewAt(now)), miss: slots.length > 0 ? undefined : miss };
    }
    const slot = this.#life.visible(selector.entryId, selector.tenant, now);
    if (slot !== undefined) return { entries: [slot.viewAt(now)], miss: undefined };
    const dead = this.#life.deadEntry(selector.entryId, now);
    const mayKnow = dead !== undefined && (selector.tenant === undefined || selector.tenant === dead.tenant);
    return { entries: [], miss: mayKnow ? dead.reason : MissReason.NEVER_STORED };
  }

  async list(call: ListCall): Promise<ListPage> {
    const now = this.#begin();
    const after = call.after === undefined ? 0 : seqOf(this.runId, call.after);
    if (after === undefined) throw pageTokenInvalid();
    const entries: EntryView[] = [];
    let looked = 0;
    let last: string | undefined;
    for (const slot of this.#life.table.after(after)) {
      if (entries.length === call.size || looked === SLICE)
        return { entries, next: last, revision: this.#life.revision };
      looked += 1;
      last = slot.id;
      if (!isLive(slot.state) || !passesFilter(slot, call.filter) || this.#life.alive(slot, now) === undefined)
        continue;
      entries.push(slot.viewAt(now));
    }
    return { entries, next: undefined, revision: this.#life.revision };
  }

  async delete(call: DeleteCall): Promise<boolean> {
    const now = this.#begin();
    const replay = this.#deletes.find(call.id, now);
    if (replay !== undefined) return replay[0] === 1;
    const slot = this.#life.visible(call.entryId, call.tenant, now);
    if (slot !== undefined) {
      if (call.revision !== undefined && call.revision !== BigInt(slot.revision)) {
        throw revisionMismatch(call.entryId, BigInt(slot.revision));
      }
      if (slot.claim !== undefined) {
        throw entryClaimed(slot.id);
      }
      this.#life.enqueue(slot, now);
    }
    this.#deletes.remember(call.id, [slot === undefined ? 0 : 1], now);
    this.#life.tellListeners();
    return slot !== undefined;
  }

  invalidateOwner(call: InvalidateCall): Promise<Dropped> {
    const now = this.#begin();
    const replay = this.#dropped.get(this.#invalidations.find(call.id, now)?.[0] ?? 0);
    if (replay !== undefined) return replay;
    const dropped = this.#life.condemn(call.instanceId, call.keep, now);
    this.#lastDropped += 1;
    this.#dropped.set(this.#lastDropped, dropped);
    this.#invalidations.remember(call.id, [this.#lastDropped], now);
    return dropped;
  }

  async stats(filter: StoreFilter): Promise<StoreStats> {
    const now = this.#begin(SLOW_PATH_FACTOR);
    for (const memory of [this.#puts, this.#takes, this.#releases, this.#deletes, this.#invalidations]) {
      memory.trim(now, TRIM_SLICE);
    }
    this.#life.trim(now, TRIM_SLICE);
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
    this.#sweeping ??= setInterval(() => void this.#clearDue(), TELL_EVERY_MS).unref();
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
      this.#insert({ ...entry, ttlMs }, bytes, this.#now(), ageMs + awayMs);
      count += 1;
      if (count % RESTORE_SLICE === 0) await setImmediate();
    }
    return count;
  }

  /** Those with an open claim count as spent. */
  *#idleEntries(now: number): Generator<SavedEntry> {
    for (const slot of this.#life.table.after(0)) {
      if (slot.state !== 'idle' || slot.expiresAt <= now) continue;
      const { chain, handle } = slot;
      const { key, owner, connector, storedTokens, engineBlockSize, blocks, afterHit, remainingMs, ageMs } =
        slot.viewAt(now);
      const goesOn = afterHit === true ? { afterHit } : {};
      const about = { key, owner, connector, storedTokens, engineBlockSize, blocks, ttlMs: remainingMs, ...goesOn };
      yield { entry: { ...about, handle, ...(chain === undefined ? {} : { chain }) }, ageMs };
    }
  }

  /** Clears away all that is due, with turns for other work between. */
  async #clearDue(): Promise<void> {
    if (this.#isClearing) return;
    this.#isClearing = true;
    do await setImmediate();
    while (this.#life.sweep(this.#now(), DUE_SLICE));
    this.#isClearing = false;
  }

  #stopSweeping(): void {
    clearInterval(this.#sweeping);
    this.#sweeping = undefined;
  }

  #putNew(call: PutCall, now: number): readonly number[] {
    const bytes = sizeOf(call.entry);
    const room = { life: this.#life, counters: this.#counters, limits: this.#limits };
    const displaced = makeRoom(room, call, bytes, now);
    const { seq, revision } = this.#insert(call.entry, bytes, now);
    this.#counters.put(call.entry.key.tenant);
    return this.#puts.remember(call.id, [seq, revision, now, ...displaced], now);
  }

  /** The entry as it was put. */
  #putView(
    entry: NewEntry,
    { seq, revision, at }: { readonly seq: number; readonly revision: number; readonly at: number },
    now: number,
  ): EntryView {
    const { handle: _, chain, ttlMs, ...about } = entry;
    return {
      ...about,
      entryId: entryIdOf(this.runId, seq),
      chainTokens: chain?.tokenCount ?? 0,
      hasChain: chain !== undefined,
      claimed: false,
      revision: BigInt(revision),
      remainingMs: Math.max(0, at + ttlMs - now),
      ageMs: Math.max(0, now - at),
    };
  }

  #insert(entry: NewEntry, bytes: number, now: number, ageMs = 0): Slot {
    return this.#life.add({ entry, bytes, storedAt: now - ageMs, expiresAt: now + entry.ttlMs }, now);
  }

  #takeNew(call: TakeCall, now: number): readonly number[] {
    const live = this.#life.liveOfKey(call.key, now);
    const candidates = call.precondition === undefined ? live : [slotAt(live, call.precondition)];
    const choice = chooseSlot(candidates, call, this.#life.deadOfKey(call.key, now), (slot) => slot.chain);
    const { tenant } = call.key;
    if (choice.kind === 'miss') {
      for (const slot of choice.mismatched) this.#life.enqueue(slot, now);
      this.#counters.missed(tenant, choice.reason);
      return this.#takes.remember(call.id, [NO_ROW, choice.reason, choice.matchedTokens], now);
    }
    const { slot, matchedTokens } = choice;
    const { row } = this.#life.claim(slot, 'claimed', { deadlineMs: call.deadlineMs, matchedTokens }, now);
    this.#counters.taken(tenant);
    return this.#takes.remember(call.id, [row], now, bytesHeldOf(slot));
  }

  #takeForReleaseNew(call: ReleaseCall, now: number): readonly number[] {
    const claimed: { readonly slot: Slot; readonly row: number }[] = [];
    while (claimed.length < call.max) {
      const slot = this.#nextForRelease(call, now);
      if (slot === undefined) break;
      if (this.#life.alive(slot, now) === undefined) continue;
      const { row } = this.#life.claim(slot, 'releasing', { deadlineMs: call.deadlineMs, matchedTokens: 0 }, now);
      claimed.push({ slot, row });
    }
    claimed.sort((a, b) => a.slot.seq - b.slot.seq);
    const bytes = claimed.reduce((sum, { slot }) => sum + bytesHeldOf(slot), 0);
    const rows = claimed.map(({ row }) => row);
    return this.#releases.remember(call.id, rows, now, bytes);
  }

  #nextForRelease({ instanceId, queuedOnly, spareAfterHitMs = 0 }: ReleaseCall, now: number): Slot | undefined {
    const { table } = this.#life;
    const queued = table.oldest(instanceId, 'queued');
    if (queued !== undefined || queuedOnly) return queued;
    const [idle, goingOn] = [table.oldest(instanceId, 'idle'), table.oldest(instanceId, 'goingOn')];
    if (idle === undefined || goingOn === undefined) return idle ?? goingOn;
    return goingOn.seq < idle.seq && now - goingOn.storedAt >= spareAfterHitMs ? goingOn : idle;
  }

  #takenAt(claim: Claim, now: number): Taken {
    const { id, deadline, revision, matchedTokens } = claim;
    const slot = this.#life.table.held(claim.slotRow);
    return {
      claimId: id,
      claimRemainingMs: Math.max(0, deadline - now),
      entry: slot.viewAt(now, { revision, claimed: true }),
      handle: slot.handle,
      matchedTokens,
    };
  }

  /** The time of a call, which clears some of what is due on its way; where that was not all, the rest goes in between. */
  #begin(factor = 1): number {
    const now = this.#now();
    if (this.#life.sweep(now, this.#bounds.sweep * factor)) void this.#clearDue();
    return now;
  }

  async #countSlots(filter: StoreFilter, now: number): Promise<FilteredCounts['counts']> {
    const counted = new FilteredCounts();
    let looked = 0;
    for (const slot of this.#life.table.after(0)) {
      looked += 1;
      if (looked % SLICE === 0) await setImmediate();
      if (!passesFilter(slot, filter) || this.#life.alive(slot, now) === undefined) continue;
      const { owner, blocks, bytes, state } = slot;
      const claimed = slot.claim !== undefined;
      counted.add({ owner, blocks, bytes, claimed, queued: state === 'queued', live: isLive(state) });
    }
    return counted.counts;
  }
}

/** What an answer with the handle of a slot holds. */
function bytesHeldOf(slot: Slot): number {
  return slot.handleBytes + TAKE_ANSWER_BYTES;
}
