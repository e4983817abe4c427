import type { EntryView, StoreStats } from './store.ts';

/** What is counted of an entry. */
interface Counted extends Pick<EntryView, 'owner' | 'blocks'> {
  readonly bytes: number;
  readonly claimed: boolean;
  readonly queued: boolean;
  readonly live: boolean;
}

type Counts = Pick<StoreStats, 'entries' | 'claims' | 'bytes' | 'releaseQueue' | 'owners'>;

/** Counts entries that a filter has let through, one at a time. */
export class FilteredCounts {
  readonly #owners = new Map<string, { entries: number; pinnedBlocks: number }>();
  #entries = 0;
  #claims = 0;
  #bytes = 0;
  #releaseQueue = 0;

  add({ owner: { instanceId }, blocks, bytes, claimed, queued, live }: Counted): void {
    const owner = this.#owners.get(instanceId) ?? { entries: 0, pinnedBlocks: 0 };
    this.#owners.set(instanceId, owner);
    // Blocks stay until they are freed, also those of entries that are live no more.
    owner.pinnedBlocks += blocks;
    if (claimed) this.#claims += 1;
    if (queued) this.#releaseQueue += 1;
    if (!live) return;
    this.#entries += 1;
    this.#bytes += bytes;
    owner.entries += 1;
  }

  get counts(): Counts {
    const owners = [...this.#owners].map(([instanceId, of]) => ({ instanceId, ...of }));
    return {
      entries: this.#entries,
      claims: this.#claims,
      bytes: this.#bytes,
      releaseQueue: this.#releaseQueue,
      owners,
    };
  }
}
