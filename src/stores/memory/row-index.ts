import { NO_ROW, type Rows } from './rows.ts';

/** Buckets that are got from the system at once are two to this power. */
const CHUNK_BITS = 10;
const CHUNK = 1 << CHUNK_BITS;

/** The columns that an index reads and writes. */
export interface RowIndexColumns {
  /** Whole numbers that say where a row is found; the low 32 bits count. */
  readonly hash: number;
  /** The index's own. */
  readonly next: number;
}

/**
 * Finds rows by a hash. They lie in buckets outside the heap, of which there are as many as rows: one more comes with a
 * row where they are too few (linear hashing), so that growing never takes longer than that.
 */
export class RowIndex {
  readonly #rows: Rows;
  readonly #columns: RowIndexColumns;
  /** The newest row of each bucket, which leads to the older ones. */
  readonly #newest: Int32Array[] = [];
  /** The greatest power of two that is not above the number of buckets. */
  #round = CHUNK;
  #buckets = CHUNK;
  #count = 0;

  constructor(rows: Rows, columns: RowIndexColumns) {
    this.#rows = rows;
    this.#columns = columns;
    this.#newest.push(new Int32Array(CHUNK).fill(NO_ROW));
  }

  /** The rows with a hash, newest first. */
  *of(hash: number): Generator<number> {
    for (let row = this.#first(this.#bucketOf(hash)); row !== NO_ROW; row = this.#after(row)) {
      if (this.#hashOf(row) === hash) yield row;
    }
  }

  /** Takes in a row, whose hash stays as it is now. */
  add(row: number): void {
    this.#count += 1;
    if (this.#count > this.#buckets) this.#grow();
    this.#lead(this.#bucketOf(this.#hashOf(row)), row);
  }

  /** Takes out a row that is in it. */
  delete(row: number): void {
    this.#count -= 1;
    const after = this.#after(row);
    const bucket = this.#bucketOf(this.#hashOf(row));
    let before = this.#first(bucket);
    if (before === row) {
      this.#setFirst(bucket, after);
      return;
    }
    for (let next = this.#after(before); next !== row; next = this.#after(before)) before = next;
    this.#rows.set(before, this.#columns.next, after);
  }

  /** One bucket more: some of the rows of an older one go there. */
  #grow(): void {
    const from = this.#buckets - this.#round;
    if (this.#buckets % CHUNK === 0) this.#newest.push(new Int32Array(CHUNK).fill(NO_ROW));
    this.#buckets += 1;
    if (this.#buckets === 2 * this.#round) this.#round = this.#buckets;
    const moved: number[] = [];
    for (let row = this.#first(from); row !== NO_ROW; row = this.#after(row)) moved.push(row);
    this.#setFirst(from, NO_ROW);
    for (const row of moved.reverse()) this.#lead(this.#bucketOf(this.#hashOf(row)), row);
  }

  #bucketOf(hash: number): number {
    const bucket = hash & (2 * this.#round - 1);
    return bucket < this.#buckets ? bucket : hash & (this.#round - 1);
  }

  #lead(bucket: number, row: number): void {
    this.#rows.set(row, this.#columns.next, this.#first(bucket));
    this.#setFirst(bucket, row);
  }

  #first(bucket: number): number {
    return this.#newest[bucket >> CHUNK_BITS]?.[bucket & (CHUNK - 1)] ?? NO_ROW;
  }

  #setFirst(bucket: number, row: number): void {
    const chunk = this.#newest[bucket >> CHUNK_BITS];
    if (chunk === undefined) throw new Error('a bucket is looked for that is not there');
    chunk[bucket & (CHUNK - 1)] = row;
  }

  #after(row: number): number {
    return this.#rows.get(row, this.#columns.next);
  }

  #hashOf(row: number): number {
    return this.#rows.get(row, this.#columns.hash);
  }
}
