/** How a {@link Heap} orders its items, and where it notes in which place each one is. */
export interface HeapOrder<T> {
  readonly priority: (item: T) => number;
  readonly place: (item: T) => number;
  readonly setPlace: (item: T, place: number) => void;
}

/** Smallest priority first; any item leaves in O(log n), so that nothing dead stays behind. */
export class Heap<T> {
  readonly #items: T[] = [];
  readonly #order: HeapOrder<T>;

  constructor(order: HeapOrder<T>) {
    this.#order = order;
  }

  get size(): number {
    return this.#items.length;
  }

  /** The item with the smallest priority. */
  peek(): T | undefined {
    return this.#items[0];
  }

  /** Takes in an item, whose priority stays as it is now. */
  push(item: T): void {
    this.#put(item, this.#items.length);
    this.#rise(item);
  }

  /** Takes out an item that is in this heap. */
  remove(item: T): void {
    const last = this.#items.pop();
    if (last === undefined || last === item) return;
    this.#put(last, this.#order.place(item));
    this.#sink(last);
    this.#rise(last);
  }

  #put(item: T, place: number): void {
    this.#items[place] = item;
    this.#order.setPlace(item, place);
  }

  #rise(item: T): void {
    const { priority, place } = this.#order;
    const own = priority(item);
    for (let at = place(item); at > 0; ) {
      const above = (at - 1) >> 1;
      const parent = this.#items[above];
      if (parent === undefined || priority(parent) <= own) return;
      this.#put(parent, at);
      this.#put(item, above);
      at = above;
    }
  }

  #sink(item: T): void {
    const { priority, place } = this.#order;
    const own = priority(item);
    for (let at = place(item); ; ) {
      const [left, right] = [this.#items[2 * at + 1], this.#items[2 * at + 2]];
      if (left === undefined) return;
      const isRight = right !== undefined && priority(right) < priority(left);
      const least = isRight ? right : left;
      if (priority(least) >= own) return;
      const below = 2 * at + (isRight ? 2 : 1);
      this.#put(least, at);
      this.#put(item, below);
      at = below;
    }
  }
}
