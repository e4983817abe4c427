import { NO_ROW } from './rows.ts';

/** Numbers per chunk. */
const SPAN = 1024;

interface Chunk {
  readonly rows: Int32Array;
  /** Rows in it; without any it goes. */
  count: number;
}

/** Rows under ascending numbers, read in order from any number on without a pass over those before it. */
export class Sequence {
  readonly #chunks = new Map<number, Chunk>();
  #end = 0;

  /** Adds a row; `number` is greater than every one before. */
  add(number: number, row: number): void {
    const at = Math.floor(number / SPAN);
    let chunk = this.#chunks.get(at);
    if (chunk === undefined) {
      chunk = { rows: new Int32Array(SPAN).fill(NO_ROW), count: 0 };
      this.#chunks.set(at, chunk);
    }
    chunk.rows[number % SPAN] = row;
    chunk.count += 1;
    this.#end = number;
  }

  /** The row under that number. */
  get(number: number): number | undefined {
    const row = this.#chunks.get(Math.floor(number / SPAN))?.rows[number % SPAN];
    return row === NO_ROW ? undefined : row;
  }

  delete(number: number): void {
    const at = Math.floor(number / SPAN);
    const chunk = this.#chunks.get(at);
    if (chunk === undefined || this.get(number) === undefined) return;
    chunk.rows[number % SPAN] = NO_ROW;
    chunk.count -= 1;
    if (chunk.count === 0) this.#chunks.delete(at);
  }

  /** The rows whose number is greater than `number`, in order. */
  *after(number: number): Generator<number> {
    const first = number + 1;
    for (let at = Math.floor(first / SPAN); at * SPAN <= this.#end; at++) {
      const rows = this.#chunks.get(at)?.rows;
      if (rows === undefined) continue;
      for (let offset = Math.max(0, first - at * SPAN); offset < SPAN; offset++) {
        const row = rows[offset] ?? NO_ROW;
        if (row !== NO_ROW) yield row;
      }
    }
  }
}
