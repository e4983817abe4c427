/** What a script answered: a list of texts, numbers, bytes and lists. Reading what is not there throws. */
export class Reply {
  readonly #items: readonly unknown[];

  constructor(items: unknown) {
    if (!Array.isArray(items)) throw new TypeError('the server answered something else than a list');
    this.#items = items;
  }

  get length(): number {
    return this.#items.length;
  }

  bytes(index: number): Buffer {
    const item = this.#items[index];
    if (Buffer.isBuffer(item)) return item;
    throw new TypeError(`the server's answer has no bytes at ${index}`);
  }

  text(index: number): string {
    return this.bytes(index).toString('utf8');
  }

  /** A number, also one that came as digits. */
  number(index: number): number {
    const item = this.#items[index];
    return typeof item === 'number' ? item : Number(this.text(index));
  }

  list(index: number): Reply {
    return new Reply(this.#items[index]);
  }

  /** All items, which are lists. */
  lists(): readonly Reply[] {
    return this.#items.map((item) => new Reply(item));
  }

  /** All items, which are texts. */
  texts(): readonly string[] {
    return this.#items.map((_item, index) => this.text(index));
  }

  /** Field after field, as HGETALL and streams tell them. */
  pairs(): ReadonlyMap<string, Buffer> {
    const map = new Map<string, Buffer>();
    for (let index = 0; index + 1 < this.#items.length; index += 2) map.set(this.text(index), this.bytes(index + 1));
    return map;
  }
}
