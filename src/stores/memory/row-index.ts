import { ShardedMap } from '../sharded-map.ts';
import { NO_ROW, type Rows } from './rows.ts';

/** Finds rows by a hash: those with equal ones are linked through a column, the newest first. */
export class RowIndex {
  readonly #newest = new ShardedMap<number, number>();
  readonly #rows: Rows;
  readonly #next: number;

  /** @param next column that is this index's own */
  constructor(rows: Rows, next: number) {
    this.#rows = rows;
    this.#next = next;
  }

  /** The rows with a hash, newest first. */
  *of(hash: number): Generator<number> {
    for (let row = this.#newest.get(hash) ?? NO_ROW; row !== NO_ROW; row = this.#rows.get(row, this.#next)) yield row;
  }

  add(hash: number, row: number): void {
    this.#rows.set(row, this.#next, this.#newest.get(hash) ?? NO_ROW);
    this.#newest.set(hash, row);
  }

  /** Takes out a row that `add` put under this hash. */
  delete(hash: number, row: number): void {
    const after = this.#rows.get(row, this.#next);
    let before = NO_ROW;
    for (const other of this.of(hash)) {
      if (other === row) break;
      before = other;
    }
    if (before !== NO_ROW) this.#rows.set(before, this.#next, after);
    else if (after !== NO_ROW) this.#newest.set(hash, after);
    else this.#newest.delete(hash);
  }
}
