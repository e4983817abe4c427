/** Numbers per chunk. */
const SPAN = 1024;

/** Values under ascending numbers, read in order from any number on without a pass over those before it. */
export class Sequence<T> {
  readonly #chunks = new Map<number, Map<number, T>>();
  #end = 0;

  /** Adds a value; `number` is greater than every one before. */
  add(number: number, value: T): void {
    const chunk = Math.floor(number / SPAN);
    const values = this.#chunks.get(chunk);
    if (values === undefined) this.#chunks.set(chunk, new Map([[number, value]]));
    else values.set(number, value);
    this.#end = number;
  }

  delete(number: number): void {
    const chunk = Math.floor(number / SPAN);
    const values = this.#chunks.get(chunk);
    if (values === undefined) return;
    values.delete(number);
    if (values.size === 0) this.#chunks.delete(chunk);
  }

  /** The values whose number is greater than `number`, in order. */
  *after(number: number): Generator<T> {
    for (let chunk = Math.floor((number + 1) / SPAN); chunk * SPAN <= this.#end; chunk++) {
      for (const [at, value] of this.#chunks.get(chunk) ?? []) if (at > number) yield value;
    }
  }
}
