interface Kept<T> {
  readonly id: string;
  readonly value: T;
  members: number;
}

/** One object in place of many equal ones, known by a number, for as long as something has need of it. */
export class Shared<T> {
  readonly #idOf: (value: T) => string;
  readonly #numbers = new Map<string, number>();
  readonly #kept: (Kept<T> | undefined)[] = [];
  readonly #free: number[] = [];

  /** @param idOf the same text for equal values alone */
  constructor(idOf: (value: T) => string) {
    this.#idOf = idOf;
  }

  /** The number of the value, which has one member more. */
  join(value: T): number {
    const id = this.#idOf(value);
    const known = this.#numbers.get(id);
    const kept = known === undefined ? undefined : this.#kept[known];
    if (known !== undefined && kept !== undefined) {
      kept.members += 1;
      return known;
    }
    const number = this.#free.pop() ?? this.#kept.length;
    this.#kept[number] = { id, value, members: 1 };
    this.#numbers.set(id, number);
    return number;
  }

  get(number: number): T {
    return this.#of(number).value;
  }

  /** One member less; the number of a value without any is given to another. */
  leave(number: number): void {
    const kept = this.#of(number);
    kept.members -= 1;
    if (kept.members > 0) return;
    this.#kept[number] = undefined;
    this.#numbers.delete(kept.id);
    this.#free.push(number);
  }

  #of(number: number): Kept<T> {
    const kept = this.#kept[number];
    if (kept === undefined) throw new Error('a value is looked for that is not kept');
    return kept;
  }
}
