import type { AgingMapOptions } from '../aging-map.ts';
import { RowIndex } from './row-index.ts';
import { QUEUE_COLUMNS, RowQueue } from './row-queue.ts';
import { NO_ROW, Rows } from './rows.ts';

/** How many numbers a key has, and how many a value. */
interface Shape {
  readonly key: number;
  readonly value: number;
}

/** The key follows, its first number being the hash, and the value. */
const COLUMN = { next: 0, queue: 1, key: 1 + QUEUE_COLUMNS } as const;

/** What `AgingMap` is for objects, for lists of numbers under lists of numbers: outside the heap. */
export class AgingRows {
  readonly #shape: Shape;
  readonly #rows: Rows;
  readonly #index: RowIndex;
  readonly #queue: RowQueue;

  constructor(shape: Shape, { onForgotten, ...bounds }: AgingMapOptions<readonly number[]>) {
    this.#shape = shape;
    this.#rows = new Rows(COLUMN.key + shape.key + shape.value);
    this.#index = new RowIndex(this.#rows, { hash: COLUMN.key, next: COLUMN.next });
    this.#queue = new RowQueue(this.#rows, COLUMN.queue, {
      ...bounds,
      onForgotten: (row) => {
        const value = this.#free(row);
        onForgotten?.(value);
      },
    });
  }

  /** The value, unless it is older than the lifetime. */
  get(key: readonly number[], now: number): readonly number[] | undefined {
    const row = this.#rowOf(key);
    return row === NO_ROW || this.#queue.isOld(row, now) ? undefined : this.#valueOf(row);
  }

  /** Remembers a value from `now` on, in place of an earlier one. */
  set(key: readonly number[], value: readonly number[], now: number, bytes: number): void {
    const before = this.#rowOf(key);
    if (before !== NO_ROW) this.#queue.forget(before);
    const row = this.#rows.acquire();
    let column: number = COLUMN.key;
    for (const numbers of [key, value]) for (const number of numbers) this.#rows.set(row, column++, number);
    this.#index.add(row);
    this.#queue.push(row, now, bytes);
  }

  /** Forgets up to `batch` values that are too old. */
  trim(now: number, batch: number): void {
    this.#queue.trim(now, batch);
  }

  /** Gives up a row; returns its value. */
  #free(row: number): readonly number[] {
    const value = this.#valueOf(row);
    this.#index.delete(row);
    this.#rows.release(row);
    return value;
  }

  #rowOf(key: readonly number[]): number {
    for (const row of this.#index.of(key[0] ?? 0)) {
      if (key.every((word, index) => this.#rows.get(row, COLUMN.key + index) === word)) return row;
    }
    return NO_ROW;
  }

  #valueOf(row: number): readonly number[] {
    const first = COLUMN.key + this.#shape.key;
    return Array.from({ length: this.#shape.value }, (_, index) => this.#rows.get(row, first + index));
  }
}
