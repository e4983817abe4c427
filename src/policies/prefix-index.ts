import type { PrefixMark } from '../core/policy.ts';

/** What an entry takes at most, measured with four holders: key, its places in a table that is always rewritten, holders, time. */
export const PREFIX_ENTRY_BYTES = 400;
/** Instances that are remembered for one prefix. */
const MAX_HOLDERS = 4;

interface Entry {
  /** Instance ids, the one that had it last at the end. */
  holders: readonly string[];
  usedAt: number;
}

/** Which instances were given which beginnings of prompts; bounded, the least recently used goes first. */
export class PrefixIndex {
  readonly #entries = new Map<bigint, Entry>();
  readonly #maxEntries: number;
  readonly #maxAgeMs: number;

  /** @param maxAgeMs an entry that was not used for longer says nothing; 0 = it always does. */
  constructor(maxBytes: number, maxAgeMs: number) {
    this.#maxEntries = Math.floor(maxBytes / PREFIX_ENTRY_BYTES);
    this.#maxAgeMs = maxAgeMs;
  }

  get size(): number {
    return this.#entries.size;
  }

  /** The longest known beginning of each instance that holds one, in bytes. */
  match(prefix: readonly PrefixMark[], now: number): ReadonlyMap<string, number> {
    const lengths = new Map<string, number>();
    for (const { hash, bytes } of prefix) {
      const entry = this.#entries.get(hash);
      if (entry === undefined || this.#isOld(entry, now)) continue;
      // Shortest first: a longer one overwrites.
      for (const id of entry.holders) lengths.set(id, bytes);
    }
    return lengths;
  }

  add(prefix: readonly PrefixMark[], instanceId: string, now: number): void {
    for (const { hash } of prefix) {
      const entry = this.#entries.get(hash) ?? { holders: [], usedAt: now };
      if (entry.holders.at(-1) !== instanceId) {
        entry.holders = [...entry.holders.filter((id) => id !== instanceId).slice(1 - MAX_HOLDERS), instanceId];
      }
      entry.usedAt = now;
      this.#entries.delete(hash);
      this.#entries.set(hash, entry);
    }
    for (const [hash, entry] of this.#entries) {
      if (this.#entries.size <= this.#maxEntries && !this.#isOld(entry, now)) break;
      this.#entries.delete(hash);
    }
  }

  #isOld({ usedAt }: Entry, now: number): boolean {
    return this.#maxAgeMs > 0 && now - usedAt > this.#maxAgeMs;
  }
}
