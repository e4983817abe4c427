import type { AgingMapOptions } from '../aging-map.ts';
import { Heap } from './heap.ts';
import { RowIndex } from './row-index.ts';
import { QUEUE_COLUMNS, RowQueue } from './row-queue.ts';
import { Rows } from './rows.ts';
import { Shared } from './shared.ts';

/** `dropped`: its entry was lost with its owner; nothing is left to commit or put back. */
type ClaimState = 'open' | 'committed' | 'released' | 'dropped';

/** In the order of their numbers. */
const STATES: readonly ClaimState[] = ['open', 'committed', 'released', 'dropped'];

/** Columns of a claim's row. */
const COLUMN = {
  hash: 0,
  next: 1,
  state: 2,
  tenant: 3,
  seq: 4,
  slotRow: 5,
  forRelease: 6,
  deadline: 7,
  /** In the heap of deadlines. */
  place: 8,
  revision: 9,
  matchedTokens: 10,
  /** Who has need of the row: the callers that may name it count as one, and its answer as another. */
  holders: 11,
  queue: 12,
} as const;

/** A claim as it begins. */
export interface NewClaim {
  readonly tenant: string;
  /** Number of the slot. */
  readonly seq: number;
  readonly slotRow: number;
  readonly forRelease: boolean;
  readonly deadline: number;
  /** Of the entry, with the claim on it. */
  readonly revision: number;
  readonly matchedTokens: number;
}

/** The exclusive right to use the handle of one slot: a view of its row, as a `Slot` is one. */
export class Claim implements NewClaim {
  readonly row: number;
  readonly #rows: Rows;
  readonly #tenants: Shared<string>;
  readonly #runId: string;

  constructor(row: number, rows: Rows, tenants: Shared<string>, runId: string) {
    this.row = row;
    this.#rows = rows;
    this.#tenants = tenants;
    this.#runId = runId;
  }

  get id(): string {
    return claimIdOf(this.#runId, this.#get('hash'));
  }

  get state(): ClaimState {
    return STATES[this.#get('state')] ?? 'open';
  }

  get tenant(): string {
    return this.#tenants.get(this.#get('tenant'));
  }

  get seq(): number {
    return this.#get('seq');
  }

  get slotRow(): number {
    return this.#get('slotRow');
  }

  get forRelease(): boolean {
    return this.#get('forRelease') === 1;
  }

  get deadline(): number {
    return this.#get('deadline');
  }

  get revision(): number {
    return this.#get('revision');
  }

  get matchedTokens(): number {
    return this.#get('matchedTokens');
  }

  #get(column: keyof typeof COLUMN): number {
    return this.#rows.get(this.row, COLUMN[column]);
  }
}

/** The open claims, those that ended a while ago, and those that an answer tells of. Knows no clock. */
export class ClaimTable {
  readonly #runId: string;
  readonly #rows = new Rows(COLUMN.queue + QUEUE_COLUMNS);
  /** Those that a caller may name. */
  readonly #known = new RowIndex(this.#rows, COLUMN);
  /** Open ones. */
  readonly #deadlines: Heap<number>;
  readonly #ended: RowQueue;
  readonly #tenants = new Shared<string>((tenant) => tenant);
  #last = 0;

  /** @param ended bounds of what is remembered of claims that ended */
  constructor(runId: string, ended: AgingMapOptions<unknown>) {
    this.#runId = runId;
    const rows = this.#rows;
    this.#deadlines = new Heap<number>({
      priority: (row) => rows.get(row, COLUMN.deadline),
      place: (row) => rows.get(row, COLUMN.place),
      setPlace: (row, place) => rows.set(row, COLUMN.place, place),
    });
    this.#ended = new RowQueue(rows, COLUMN.queue, {
      ...ended,
      onForgotten: (row) => {
        this.#known.delete(row);
        this.#letGo(row);
      },
    });
  }

  get open(): number {
    return this.#deadlines.size;
  }

  /** The claim of a row. */
  at(row: number): Claim {
    return new Claim(row, this.#rows, this.#tenants, this.#runId);
  }

  /** Opens a claim, which has an answer until {@link letGo}. */
  add(claim: NewClaim): Claim {
    this.#last += 1;
    const row = this.#rows.acquire();
    const values: readonly (readonly [column: number, value: number])[] = [
      [COLUMN.hash, this.#last],
      [COLUMN.state, STATES.indexOf('open')],
      [COLUMN.tenant, this.#tenants.join(claim.tenant)],
      [COLUMN.seq, claim.seq],
      [COLUMN.slotRow, claim.slotRow],
      [COLUMN.forRelease, claim.forRelease ? 1 : 0],
      [COLUMN.deadline, claim.deadline],
      [COLUMN.revision, claim.revision],
      [COLUMN.matchedTokens, claim.matchedTokens],
      [COLUMN.holders, 2],
    ];
    for (const [column, value] of values) this.#rows.set(row, column, value);
    this.#known.add(row);
    this.#deadlines.push(row);
    return this.at(row);
  }

  /** A claim that is open, or ended not long ago. */
  find(claimId: string, now: number): Claim | undefined {
    const prefix = claimIdOf(this.#runId, 0).slice(0, -1);
    const number = claimId.startsWith(prefix) ? Number.parseInt(claimId.slice(prefix.length), 36) : Number.NaN;
    // One number can be written in many ways, and only one of them is an id.
    if (claimIdOf(this.#runId, number) !== claimId) return undefined;
    for (const row of this.#known.of(number)) {
      const claim = this.at(row);
      return claim.state !== 'open' && this.#ended.isOld(row, now) ? undefined : claim;
    }
    return undefined;
  }

  /** The open claim whose deadline comes first. */
  next(): Claim | undefined {
    const row = this.#deadlines.peek();
    return row === undefined ? undefined : this.at(row);
  }

  /** Ends an open claim. */
  end({ row }: Claim, state: Exclude<ClaimState, 'open'>, now: number): void {
    this.#deadlines.remove(row);
    this.#rows.set(row, COLUMN.state, STATES.indexOf(state));
    this.#ended.push(row, now, 0);
  }

  /** The answer of a claim is forgotten. */
  letGo({ row }: Claim): void {
    this.#letGo(row);
  }

  /** Forgets up to `batch` claims that ended too long ago. */
  trim(now: number, batch: number): void {
    this.#ended.trim(now, batch);
  }

  #letGo(row: number): void {
    const holders = this.#rows.get(row, COLUMN.holders) - 1;
    this.#rows.set(row, COLUMN.holders, holders);
    if (holders > 0) return;
    this.#tenants.leave(this.#rows.get(row, COLUMN.tenant));
    this.#rows.release(row);
  }
}

function claimIdOf(runId: string, number: number): string {
  return `c-${runId}-${number.toString(36)}`;
}
