/** A power of two. */
const SHARDS = 64;
/** Characters of a text that choose its shard: the last ones, where ids differ most. */
const HASHED = 24;

/**
 * A map in many parts: one map with a million keys stands still for tens of milliseconds when it grows. Which part a key
 * is in changes nothing but that, so keys that all meet in one cost no more than a plain map.
 */
export class ShardedMap<K extends string | number, V> {
  readonly #shards = Array.from({ length: SHARDS }, () => new Map<K, V>());
  #size = 0;

  get size(): number {
    return this.#size;
  }

  get(key: K): V | undefined {
    return this.#shard(key)?.get(key);
  }

  set(key: K, value: V): void {
    const shard = this.#shard(key);
    const before = shard?.size ?? 0;
    shard?.set(key, value);
    this.#size += (shard?.size ?? 0) - before;
  }

  delete(key: K): void {
    if (this.#shard(key)?.delete(key) === true) this.#size -= 1;
  }

  #shard(key: K): Map<K, V> | undefined {
    return this.#shards[(typeof key === 'number' ? key : hashOfEnd(key)) & (SHARDS - 1)];
  }
}

function hashOfEnd(text: string): number {
  let hash = 0;
  for (let at = Math.max(0, text.length - HASHED); at < text.length; at++) {
    hash = Math.imul(hash ^ text.charCodeAt(at), 0x01000193);
  }
  return hash ^ (hash >>> 15);
}
