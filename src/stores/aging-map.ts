import { ShardedMap } from './sharded-map.ts';

interface Node<K, V> {
  readonly key: K;
  readonly value: V;
  readonly at: number;
  readonly bytes: number;
  older: Node<K, V> | undefined;
  newer: Node<K, V> | undefined;
}

/** Bounds of an {@link AgingMap}; a lifetime in milliseconds. */
export interface AgingMapOptions<V> {
  readonly lifetimeMs: number;
  readonly maxCount: number;
  /** Of what is told to `set`. Default no bound. */
  readonly maxBytes?: number;
  /** Told each value that is remembered no more. */
  readonly onForgotten?: (value: V) => void;
}

/** How many that are too old leave with each write. */
const TRIM_PER_WRITE = 2;

/**
 * Remembers values for a while and never more than its bounds allow; the oldest are forgotten first. Each call costs
 * the same however many values there are.
 */
export class AgingMap<K extends string | number, V> {
  readonly #options: AgingMapOptions<V>;
  readonly #nodes = new ShardedMap<K, Node<K, V>>();
  #oldest: Node<K, V> | undefined;
  #newest: Node<K, V> | undefined;
  #bytes = 0;

  constructor(options: AgingMapOptions<V>) {
    this.#options = options;
  }

  get size(): number {
    return this.#nodes.size;
  }

  /** The value, unless it is older than the lifetime. */
  get(key: K, now: number): V | undefined {
    const node = this.#nodes.get(key);
    return node === undefined || this.#isOld(node, now) ? undefined : node.value;
  }

  /** Remembers a value from `now` on, in place of an earlier one. */
  set(key: K, value: V, now: number, bytes = 0): void {
    const before = this.#nodes.get(key);
    if (before !== undefined) this.#drop(before);
    const node: Node<K, V> = { key, value, at: now, bytes, older: this.#newest, newer: undefined };
    if (this.#newest !== undefined) this.#newest.newer = node;
    this.#newest = node;
    this.#oldest ??= node;
    this.#nodes.set(key, node);
    this.#bytes += bytes;
    this.trim(now, TRIM_PER_WRITE);
    const maxBytes = this.#options.maxBytes ?? Number.POSITIVE_INFINITY;
    while (this.#oldest !== undefined && (this.size > this.#options.maxCount || this.#bytes > maxBytes)) {
      this.#drop(this.#oldest);
    }
  }

  /** Forgets a value. */
  delete(key: K): void {
    const node = this.#nodes.get(key);
    if (node !== undefined) this.#drop(node);
  }

  /** Forgets up to `batch` values that are too old. */
  trim(now: number, batch: number): void {
    for (let left = batch; left > 0 && this.#oldest !== undefined && this.#isOld(this.#oldest, now); left--) {
      this.#drop(this.#oldest);
    }
  }

  #isOld(node: Node<K, V>, now: number): boolean {
    return now - node.at >= this.#options.lifetimeMs;
  }

  #drop(node: Node<K, V>): void {
    this.#nodes.delete(node.key);
    this.#bytes -= node.bytes;
    if (node.older === undefined) this.#oldest = node.newer;
    else node.older.newer = node.newer;
    if (node.newer === undefined) this.#newest = node.older;
    else node.newer.older = node.older;
    this.#options.onForgotten?.(node.value);
  }
}
