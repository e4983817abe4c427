/** Values kept at once; when there are more, all are forgotten and later ones are kept anew. */
const MAX_VALUES = 4096;

/** One object in place of many equal ones, as the same few texts and owners come with every entry. */
export class SharedValues<V> {
  readonly #values = new Map<string, V>();

  /** The value that first came with this key; `key` says all that is in it. */
  of(key: string, value: V): V {
    const known = this.#values.get(key);
    if (known !== undefined) return known;
    if (this.#values.size === MAX_VALUES) this.#values.clear();
    this.#values.set(key, value);
    return value;
  }
}
