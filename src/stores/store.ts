import type { MissReason } from '../../gen/baton/v1/kv_cache_store_pb.ts';
import type { PackedChain } from '../core/chain.ts';
import type { ValkeySettings } from '../core/valkey-settings.ts';

/** What entries are found by; compared byte by byte, the tenant is never empty by accident: the service fills it in. */
export interface StoreKey {
  readonly tenant: string;
  readonly model: string;
  readonly adapter: string;
  readonly cacheSalt: string;
  readonly conversationId: string;
}

/** One life of an instance, as `baton.v1.Incarnation` describes it. */
export interface StoreLife {
  readonly processStartSeconds: number | undefined;
  readonly engineId: string;
  readonly generation: number;
}

/** Who holds the blocks of an entry. */
export interface StoreOwner {
  readonly instanceId: string;
  readonly engineId: string;
  readonly life: StoreLife;
  /** Empty: no restriction. */
  readonly compatGroup: string;
}

/** A handle and all that is known of it. A backend keeps it as it is: nobody else holds its arrays. */
export interface NewEntry {
  readonly key: StoreKey;
  readonly owner: StoreOwner;
  readonly connector: string;
  /** The handle, encoded; opaque to a backend. */
  readonly handle: Uint8Array;
  readonly storedTokens: number;
  /** Absent: only an unverified take finds the entry. */
  readonly chain?: PackedChain;
  readonly engineBlockSize: number;
  /** Blocks that the handle pins at its owner. */
  readonly blocks: number;
  /** Until the blocks are gone; never renewed. */
  readonly ttlMs: number;
  /** The turn that left it had been given a stored one: its conversation goes on. Default false. */
  readonly afterHit?: boolean;
}

/** An entry without its handle, as it is at the moment of the call. */
export interface EntryView extends Omit<NewEntry, 'handle' | 'chain' | 'ttlMs'> {
  readonly entryId: string;
  /** 0 without a chain. */
  readonly chainTokens: number;
  readonly hasChain: boolean;
  readonly remainingMs: number;
  readonly ageMs: number;
  readonly claimed: boolean;
  readonly revision: bigint;
}

/** Names a call for replay. */
export interface CallId {
  /** Who calls; keys of different scopes never meet. */
  readonly scope: string;
  readonly key: string;
  /** Digest of the whole request; another one under the same key is IDEMPOTENCY_KEY_REUSED. */
  readonly fingerprint: Uint8Array;
}

/** An entry as the caller knows it. */
export interface AtRevision {
  readonly entryId: string;
  readonly revision: bigint;
}

export interface PutCall {
  readonly id: CallId;
  readonly entry: NewEntry;
  readonly derivedKey: boolean;
  /** `absent`: the key has no live entry. An entry: it is idle at that revision, and is replaced. */
  readonly precondition?: 'absent' | AtRevision;
}

export interface PutResult {
  readonly entry: EntryView;
  /** Entries of the same tenant that went to the release queue for it. */
  readonly displaced: readonly string[];
}

/** Leading tokens of the taker's prompt that are proven equal to `chain`, at most `limit`. */
export type Prove = (chain: PackedChain, limit: number) => number;

export interface TakeCall {
  readonly id: CallId;
  readonly key: StoreKey;
  /** Absent: an unverified take, which the caller is permitted. */
  readonly prove?: Prove;
  /** At least 1. */
  readonly minTokens: number;
  /** With fewer equal tokens an entry that was compared is given up. Default `minTokens`. */
  readonly keepTokens?: number;
  readonly precondition?: AtRevision;
  /** Empty: no restriction. */
  readonly compatGroup: string;
  readonly deadlineMs: number;
}

/** A claim with the handle that it is for. */
export interface Taken {
  readonly claimId: string;
  readonly claimRemainingMs: number;
  readonly entry: EntryView;
  readonly handle: Uint8Array;
  readonly matchedTokens: number;
}

export interface Missed {
  readonly kind: 'miss';
  readonly reason: MissReason;
  /** Of the best entry, with PREFIX_MISMATCH; else 0. */
  readonly matchedTokens: number;
}

export type TakeResult = { readonly kind: 'taken'; readonly taken: Taken } | Missed;

/** Whether the caller may end this claim; otherwise it does not exist for him. */
export type ClaimGuard = (claim: { readonly tenant: string; readonly forRelease: boolean }) => boolean;

export interface ReleaseCall {
  readonly id: CallId;
  readonly instanceId: string;
  readonly max: number;
  /** Leaves live entries alone and gives only what the release queue holds. */
  readonly queuedOnly: boolean;
  /** Entries with `afterHit` that are younger are given only where there are no others. Default 0: all are alike. */
  readonly spareAfterHitMs?: number;
  readonly deadlineMs: number;
}

export interface InvalidateCall {
  readonly id: CallId;
  readonly instanceId: string;
  /** Whether the blocks of that life are still there. */
  readonly keep: (life: StoreLife) => boolean;
}

export interface DeleteCall {
  readonly id: CallId;
  readonly entryId: string;
  /** Whose entries the caller sees; undefined sees all. */
  readonly tenant: string | undefined;
  readonly revision: bigint | undefined;
}

/** Which entries; undefined means any. */
export interface StoreFilter {
  readonly tenant?: string;
  readonly instanceId?: string;
  readonly conversationId?: string;
}

export interface ListCall {
  readonly filter: StoreFilter;
  /** Entries behind this id; undefined from the first. */
  readonly after: string | undefined;
  readonly size: number;
}

export interface ListPage {
  /** Ordered by id. */
  readonly entries: readonly EntryView[];
  /** Id behind which the next page begins; undefined on the last. A page that is not full can have one. */
  readonly next: string | undefined;
  readonly revision: bigint;
}

export type GetSelector =
  | { readonly kind: 'key'; readonly key: StoreKey }
  | { readonly kind: 'entry'; readonly entryId: string; readonly tenant: string | undefined };

export interface GetResult {
  /** Live entries, newest first. */
  readonly entries: readonly EntryView[];
  /** Why there is none; undefined if there is one. */
  readonly miss: MissReason | undefined;
}

/** Counts of a store; counters start at 0 with each run. Counts may include what is due and not yet cleared away. */
export interface StoreStats {
  readonly entries: number;
  readonly claims: number;
  readonly bytes: number;
  readonly releaseQueue: number;
  readonly puts: number;
  readonly takes: number;
  readonly misses: ReadonlyMap<MissReason, number>;
  readonly evictions: number;
  /** Entries whose time ran out before anyone took them. */
  readonly expirations: number;
  readonly owners: readonly { readonly instanceId: string; readonly entries: number; readonly pinnedBlocks: number }[];
}

/** Limits of the contract; sizes in bytes. */
export interface StoreLimits {
  readonly entryBytes: number;
  readonly chainDigests: number;
  readonly promptTokens: number;
  readonly entriesPerKey: number;
  readonly entriesPerDerivedKey: number;
  readonly tenantEntries: number;
  readonly tenantBytes: number;
  readonly totalBytes: number;
  readonly tenantWatches: number;
}

/** Limits that every caller may rely on. */
export const STORE_LIMITS: StoreLimits = {
  entryBytes: 4 * 1024 * 1024,
  chainDigests: 16_384,
  promptTokens: 1_048_576,
  entriesPerKey: 8,
  entriesPerDerivedKey: 64,
  tenantEntries: 100_000,
  tenantBytes: 256 * 1024 * 1024,
  totalBytes: 1024 * 1024 * 1024,
  tenantWatches: 64,
};

/** What a backend is opened with. */
export interface StoreOptions {
  /** Monotonic, milliseconds. */
  readonly now: () => number;
  readonly limits: StoreLimits;
  /** Id of this run, `[a-z0-9]+`. Default a random one. */
  readonly runId?: string;
  /** The memory backend's file over a restart; absent: nothing is kept. */
  readonly snapshotFile?: string;
  /** How the valkey backend reaches its server; it needs them. */
  readonly valkey?: ValkeyOptions;
  /** Hears what an operator should know, such as a server that went away; must not throw. */
  readonly onNotice?: (notice: StoreNotice) => void;
}

/** The server, and what tests put in its place. */
export interface ValkeyOptions extends ValkeySettings {
  /** Stands for the server's clock, milliseconds. Default the server's own. */
  readonly clock?: () => number;
}

/** Something an operator should know; `fields` hold ids and counts, never keys or handles. */
export interface StoreNotice {
  readonly level: 'info' | 'warn' | 'error';
  readonly message: string;
  readonly fields?: Readonly<Record<string, string | number>>;
}

/** One change of a live entry. Changes come in the order of their revisions. */
export type StoreChange = { readonly revision: bigint } & (
  | { readonly kind: 'upserted'; readonly entry: EntryView }
  | {
      readonly kind: 'removed';
      readonly entryId: string;
      /** What a take of it answers. */
      readonly reason: MissReason;
      /** For filters. */
      readonly tenant: string;
      readonly instanceId: string;
      readonly conversationId: string;
    }
);

/** Hears of changes; must not throw. `gap`: changes were missed, or the run is another one; it goes on behind `revision`. */
export type ChangeListener = (change: StoreChange | { readonly kind: 'gap'; readonly revision: bigint }) => void;

/** Hears of an instance for which the release queue holds entries, and how many; must not throw. */
export type ReleasableListener = (instanceId: string, queued: number) => void;

/**
 * A place that keeps entries and gives each away at most once. It may lose entries and never repeats one. The service
 * in front of it has checked all arguments. Refusals are BatonErrors with the reasons of the KVCacheStore contract.
 */
export interface KvStore extends AsyncDisposable {
  /** Id of this run; entries of another run are never given. */
  readonly runId: string;
  readonly put: (call: PutCall) => Promise<PutResult>;
  readonly take: (call: TakeCall) => Promise<TakeResult>;
  readonly commit: (claimId: string, mayEnd: ClaimGuard) => Promise<void>;
  /** Resolves with the entry that can be taken again, or undefined if it is gone. */
  readonly release: (claimId: string, mayEnd: ClaimGuard) => Promise<EntryView | undefined>;
  /** Oldest first. */
  readonly takeForRelease: (call: ReleaseCall) => Promise<readonly Taken[]>;
  readonly get: (selector: GetSelector) => Promise<GetResult>;
  readonly list: (call: ListCall) => Promise<ListPage>;
  /** Resolves with whether the entry was there. */
  readonly delete: (call: DeleteCall) => Promise<boolean>;
  readonly invalidateOwner: (
    call: InvalidateCall,
  ) => Promise<{ readonly droppedEntries: number; readonly droppedClaims: number }>;
  /** Counts entries that pass the filter; puts, takes, misses, evictions and expirations heed its tenant alone. */
  readonly stats: (filter: StoreFilter) => Promise<StoreStats>;
  /** Calls `listener` with every change of a live entry until the returned function is called. */
  readonly onChange: (listener: ChangeListener) => () => void;
  /** Calls `listener` whenever entries came to the release queue; returns what ends that. */
  readonly onReleasable: (listener: ReleasableListener) => () => void;
}

/** Opens a backend; where it cannot, the message of the error says what to do. */
export type OpenStore = (options: StoreOptions) => Promise<KvStore>;
