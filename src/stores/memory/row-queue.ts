import type { AgingMapOptions } from '../aging-map.ts';
import { NO_ROW, type Rows } from './rows.ts';

/** Columns that a queue takes, from the first of its own on. */
const OWN = { older: 0, newer: 1, at: 2, bytes: 3 } as const;

/** How many columns a queue takes. */
export const QUEUE_COLUMNS = 4;

/** How many that are too old leave with each new one. */
const TRIM_PER_PUSH = 2;

/** Rows by age: they are forgotten with their lifetime, and where a bound is passed the oldest. */
export class RowQueue {
  readonly #rows: Rows;
  readonly #column: number;
  readonly #options: AgingMapOptions<number>;
  #oldest = NO_ROW;
  #newest = NO_ROW;
  #count = 0;
  #bytes = 0;

  /** @param column the first of {@link QUEUE_COLUMNS} that are this queue's own */
  constructor(rows: Rows, column: number, options: AgingMapOptions<number>) {
    this.#rows = rows;
    this.#column = column;
    this.#options = options;
  }

  /** Takes in a row, which may be forgotten at once. */
  push(row: number, now: number, bytes: number): void {
    this.#set(row, 'older', this.#newest);
    this.#set(row, 'newer', NO_ROW);
    this.#set(row, 'at', now);
    this.#set(row, 'bytes', bytes);
    if (this.#newest === NO_ROW) this.#oldest = row;
    else this.#set(this.#newest, 'newer', row);
    this.#newest = row;
    this.#count += 1;
    this.#bytes += bytes;
    this.trim(now, TRIM_PER_PUSH);
    const { maxCount, maxBytes = Number.POSITIVE_INFINITY } = this.#options;
    while (this.#count > maxCount || this.#bytes > maxBytes) this.forget(this.#oldest);
  }

  /** Forgets a row that is in it. */
  forget(row: number): void {
    const [older, newer] = [this.#get(row, 'older'), this.#get(row, 'newer')];
    if (older === NO_ROW) this.#oldest = newer;
    else this.#set(older, 'newer', newer);
    if (newer === NO_ROW) this.#newest = older;
    else this.#set(newer, 'older', older);
    this.#count -= 1;
    this.#bytes -= this.#get(row, 'bytes');
    this.#options.onForgotten?.(row);
  }

  /** Whether a row that is in it counts as forgotten. */
  isOld(row: number, now: number): boolean {
    return now - this.#get(row, 'at') >= this.#options.lifetimeMs;
  }

  /** Forgets up to `batch` rows that are too old. */
  trim(now: number, batch: number): void {
    for (let left = batch; left > 0 && this.#oldest !== NO_ROW && this.isOld(this.#oldest, now); left--) {
      this.forget(this.#oldest);
    }
  }

  #get(row: number, column: keyof typeof OWN): number {
    return this.#rows.get(row, this.#column + OWN[column]);
  }

  #set(row: number, column: keyof typeof OWN, value: number): void {
    this.#rows.set(row, this.#column + OWN[column], value);
  }
}
