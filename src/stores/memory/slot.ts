import { CHAIN_BLOCK_TOKENS, CHAIN_DIGEST_BYTES, type PackedChain } from '../../core/chain.ts';
import { revisionMismatch } from '../refusals.ts';
import type { AtRevision, EntryView, NewEntry, StoreKey } from '../store.ts';
import type { CellPool } from './cell-pool.ts';
import type { Claim, ClaimTable } from './claims.ts';
import type { Family } from './families.ts';
import { NO_ROW, type Rows } from './rows.ts';
import type { Shared } from './shared.ts';

/** Idle and claimed entries are live; queued ones wait to be freed; releasing ones are claimed for that. */
export type SlotState = 'idle' | 'claimed' | 'queued' | 'releasing' | 'dead';

/** In the order of their numbers. */
const STATES: readonly SlotState[] = ['dead', 'idle', 'claimed', 'queued', 'releasing'];

export function isLive(state: SlotState): boolean {
  return state === 'idle' || state === 'claimed';
}

/** Columns of a slot's row. The first is overwritten when the row is given up. */
export const COLUMN = {
  hash: 0,
  /** In the index of keys. */
  next: 1,
  seq: 2,
  family: 3,
  cells: 4,
  saltBytes: 5,
  conversationBytes: 6,
  handleBytes: 7,
  /** Behind a chain of no token comes none: -1. */
  chainTokens: 8,
  bytes: 9,
  storedTokens: 10,
  engineBlockSize: 11,
  blocks: 12,
  storedAt: 13,
  expiresAt: 14,
  revision: 15,
  state: 16,
  expiryPlace: 17,
  agePlace: 18,
  /** Answers that may have to be given again with what the slot holds. */
  answers: 19,
  /** Row of the open claim; -1 without one. */
  claim: 20,
  /** 1 for one whose conversation goes on. */
  afterHit: 21,
} as const;

/** Columns of a row. */
export const COLUMNS = 22;

/** Where slots lie. */
export interface SlotSpace {
  readonly rows: Rows;
  readonly pool: CellPool;
  readonly families: Shared<Family>;
  readonly claims: ClaimTable;
  readonly runId: string;
}

/** Id of the entry with that number of the run. */
export function entryIdOf(runId: string, seq: number): string {
  return `e-${runId}-${seq.toString(36).padStart(9, '0')}`;
}

/** The number in an id that {@link entryIdOf} made for this run. */
export function seqOf(runId: string, entryId: string): number | undefined {
  const prefix = `e-${runId}-`;
  const digits = entryId.slice(prefix.length);
  return entryId.startsWith(prefix) && /^[0-9a-z]{9,10}$/.test(digits) ? Number.parseInt(digits, 36) : undefined;
}

/**
 * A stored entry: a view of its row, made when it is looked at. Two views of one slot are not the same object; `seq` says
 * which slot it is. Where it lies in the indexes is the table's to change.
 */
export class Slot {
  readonly row: number;
  readonly #space: SlotSpace;

  constructor(row: number, space: SlotSpace) {
    this.row = row;
    this.#space = space;
  }

  /** Order of the puts. */
  get seq(): number {
    return this.#get(COLUMN.seq);
  }

  get id(): string {
    return entryIdOf(this.#space.runId, this.seq);
  }

  get state(): SlotState {
    return STATES[this.#get(COLUMN.state)] ?? 'dead';
  }

  set state(state: SlotState) {
    this.#set(COLUMN.state, STATES.indexOf(state));
  }

  /** Revision of its last change. */
  get revision(): number {
    return this.#get(COLUMN.revision);
  }

  set revision(revision: number) {
    this.#set(COLUMN.revision, revision);
  }

  get claim(): Claim | undefined {
    const row = this.#get(COLUMN.claim);
    return row === NO_ROW ? undefined : this.#space.claims.at(row);
  }

  set claim(claim: Claim | undefined) {
    this.#set(COLUMN.claim, claim?.row ?? NO_ROW);
  }

  get bytes(): number {
    return this.#get(COLUMN.bytes);
  }

  get handleBytes(): number {
    return this.#get(COLUMN.handleBytes);
  }

  get blocks(): number {
    return this.#get(COLUMN.blocks);
  }

  get storedTokens(): number {
    return this.#get(COLUMN.storedTokens);
  }

  get afterHit(): boolean {
    return this.#get(COLUMN.afterHit) === 1;
  }

  get hasChain(): boolean {
    return this.#get(COLUMN.chainTokens) >= 0;
  }

  get chainTokens(): number {
    return Math.max(0, this.#get(COLUMN.chainTokens));
  }

  get storedAt(): number {
    return this.#get(COLUMN.storedAt);
  }

  get expiresAt(): number {
    return this.#get(COLUMN.expiresAt);
  }

  /** What it says as others do. */
  get family(): Family {
    return this.#space.families.get(this.#get(COLUMN.family));
  }

  get owner(): NewEntry['owner'] {
    return this.family.owner;
  }

  get tenant(): string {
    return this.family.tenant;
  }

  get key(): StoreKey {
    const { tenant, model, adapter } = this.family;
    const salt = this.#get(COLUMN.saltBytes);
    const cacheSalt = this.#text(0, salt);
    return { tenant, model, adapter, cacheSalt, conversationId: this.#text(salt, this.textBytes - salt) };
  }

  /** Bytes of the texts that lie before the handle. */
  get textBytes(): number {
    return this.#get(COLUMN.saltBytes) + this.#get(COLUMN.conversationBytes);
  }

  /** A copy, which is there until the slot is dead and no answer holds it. */
  get handle(): Uint8Array {
    return this.#read(this.textBytes, this.handleBytes);
  }

  /** A copy, which is there as long as the slot is live. */
  get chain(): PackedChain | undefined {
    if (!this.hasChain || !isLive(this.state)) return undefined;
    const { chainTokens: tokenCount } = this;
    const wordBytes = Math.floor(tokenCount / CHAIN_BLOCK_TOKENS) * CHAIN_DIGEST_BYTES;
    const tailBytes = (tokenCount % CHAIN_BLOCK_TOKENS) * Uint32Array.BYTES_PER_ELEMENT;
    const bytes = this.#read(this.textBytes + this.handleBytes, wordBytes + tailBytes).buffer;
    return { words: new Uint32Array(bytes, 0, wordBytes / 4), tail: new Uint32Array(bytes, wordBytes), tokenCount };
  }

  /** The entry without its handle, as it was at another revision if one is named. */
  viewAt(now: number, as: { readonly revision: number; readonly claimed: boolean } = this.#asIs): EntryView {
    const { owner, connector } = this.family;
    return {
      key: this.key,
      owner,
      connector,
      storedTokens: this.storedTokens,
      engineBlockSize: this.#get(COLUMN.engineBlockSize),
      blocks: this.blocks,
      entryId: this.id,
      chainTokens: this.chainTokens,
      hasChain: this.hasChain,
      claimed: as.claimed,
      ...(this.afterHit ? { afterHit: true } : {}),
      revision: BigInt(as.revision),
      remainingMs: Math.max(0, this.expiresAt - now),
      ageMs: Math.max(0, now - this.storedAt),
    };
  }

  get #asIs(): { readonly revision: number; readonly claimed: boolean } {
    return { revision: this.revision, claimed: this.claim !== undefined };
  }

  #text(offset: number, length: number): string {
    return this.#space.pool.text(this.#get(COLUMN.cells), offset, length);
  }

  #read(offset: number, length: number): Uint8Array<ArrayBuffer> {
    return this.#space.pool.read(this.#get(COLUMN.cells), offset, length);
  }

  #get(column: number): number {
    return this.#space.rows.get(this.row, column);
  }

  #set(column: number, value: number): void {
    this.#space.rows.set(this.row, column, value);
  }
}

/** The idle one of these slots that a precondition names; throws REVISION_MISMATCH if it is not as it says. */
export function slotAt(live: readonly Slot[], wanted: AtRevision): Slot {
  const slot = live.find(({ id }) => id === wanted.entryId);
  const revision = slot && BigInt(slot.revision);
  if (slot === undefined || slot.state !== 'idle' || revision !== wanted.revision) {
    throw revisionMismatch(wanted.entryId, revision);
  }
  return slot;
}
