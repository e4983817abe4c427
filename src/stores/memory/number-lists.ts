import { NO_ROW, Rows } from './rows.ts';

const COLUMN = { number: 0, next: 1 } as const;

/** Lists of numbers outside the heap, each known by a number. */
export class NumberLists {
  readonly #rows = new Rows(2);

  write(numbers: readonly number[]): number {
    let list = NO_ROW;
    for (const number of numbers.toReversed()) {
      const row = this.#rows.acquire();
      this.#rows.set(row, COLUMN.number, number);
      this.#rows.set(row, COLUMN.next, list);
      list = row;
    }
    return list;
  }

  read(list: number): readonly number[] {
    const numbers: number[] = [];
    for (let row = list; row !== NO_ROW; row = this.#rows.get(row, COLUMN.next)) {
      numbers.push(this.#rows.get(row, COLUMN.number));
    }
    return numbers;
  }

  free(list: number): void {
    for (let row = list; row !== NO_ROW; ) {
      const next = this.#rows.get(row, COLUMN.next);
      this.#rows.release(row);
      row = next;
    }
  }
}
