/** Rows that are got from the system at once are two to this power. */
const CHUNK_BITS = 10;
const CHUNK_ROWS = 1 << CHUNK_BITS;
/** No row. */
export const NO_ROW = -1;

/**
 * A table of numbers outside the heap: objects in their place would take three times the memory, and the garbage
 * collector would have to look at each one again and again. A row is known by its number, which is used again after
 * `release`. All values are exact up to 2^53.
 */
export class Rows {
  readonly #columns: number;
  readonly #chunks: Float64Array[] = [];
  /** The first free row that was used before; the next stands in its first column. */
  #free = NO_ROW;
  /** The first row that never was used. */
  #unused = 0;

  constructor(columns: number) {
    this.#columns = columns;
  }

  /** A row with what was last written into it; all columns of a new one are 0. */
  acquire(): number {
    const row = this.#free;
    if (row !== NO_ROW) {
      this.#free = this.get(row, 0);
      return row;
    }
    if (this.#unused % CHUNK_ROWS === 0) this.#chunks.push(new Float64Array(CHUNK_ROWS * this.#columns));
    this.#unused += 1;
    return this.#unused - 1;
  }

  /** Gives a row up; overwrites its first column alone. */
  release(row: number): void {
    this.set(row, 0, this.#free);
    this.#free = row;
  }

  get(row: number, column: number): number {
    return this.#chunk(row)[(row & (CHUNK_ROWS - 1)) * this.#columns + column] ?? 0;
  }

  set(row: number, column: number, value: number): void {
    this.#chunk(row)[(row & (CHUNK_ROWS - 1)) * this.#columns + column] = value;
  }

  #chunk(row: number): Float64Array {
    const chunk = this.#chunks[row >> CHUNK_BITS];
    if (chunk === undefined) throw new Error('a row is looked for that is not there');
    return chunk;
  }
}
