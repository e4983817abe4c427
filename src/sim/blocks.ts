/** Token id of a slot that was never written. */
export const emptySlot = -1;

/**
 * Paged KV memory: fixed blocks with reference counts, a free list in least-recently-freed order, and a prefix cache.
 * A freed block keeps its content and its cache entry until it is handed out again, so a late reader may see either.
 * Block 0 is reserved, as in vLLM.
 */
export class BlockPool {
  readonly numBlocks: number;
  readonly blockSize: number;
  readonly tokens: Int32Array;
  readonly positions: Int32Array;
  readonly cells: Uint32Array;
  freeCount: number;
  private readonly refs: Int32Array;
  private readonly next: Int32Array;
  private readonly previous: Int32Array;
  private readonly keys: (number | undefined)[];
  private readonly cached = new Map<number, number>();
  private readonly caches: boolean;

  /** `caches` false: no block is found again by what it holds. */
  constructor(numBlocks: number, blockSize: number, caches = true) {
    this.caches = caches;
    this.numBlocks = numBlocks;
    this.blockSize = blockSize;
    this.tokens = new Int32Array(numBlocks * blockSize).fill(emptySlot);
    this.positions = new Int32Array(numBlocks * blockSize).fill(emptySlot);
    this.cells = new Uint32Array(numBlocks * blockSize);
    this.refs = new Int32Array(numBlocks);
    this.next = new Int32Array(numBlocks);
    this.previous = new Int32Array(numBlocks);
    this.keys = new Array<number | undefined>(numBlocks);
    this.freeCount = numBlocks - 1;
    for (let id = 0; id < numBlocks; id += 1) {
      this.next[id] = (id + 1) % numBlocks;
      this.previous[id] = (id + numBlocks - 1) % numBlocks;
    }
  }

  /** Share of the usable blocks that is referenced, 0..1. */
  get usage(): number {
    const usable = this.numBlocks - 1;
    return (usable - this.freeCount) / usable;
  }

  /** True for an id that a request can own. */
  isBlock(id: number): boolean {
    return id > 0 && id < this.numBlocks;
  }

  /** Longest run of cached blocks for the chain of keys; nothing is retained. */
  findPrefix(keys: readonly number[], limit: number): number[] {
    const found: number[] = [];
    for (let i = 0; i < limit; i += 1) {
      const key = keys[i];
      const id = key === undefined ? undefined : this.cached.get(key);
      if (id === undefined) break;
      found.push(id);
    }
    return found;
  }

  /** Retains the cached blocks and takes `fresh` more, or returns undefined and changes nothing. */
  take(hits: readonly number[], fresh: number): number[] | undefined {
    const idleHits = hits.reduce((count, id) => count + (this.refs[id] === 0 ? 1 : 0), 0);
    if (this.freeCount - idleHits < fresh) return undefined;
    for (const id of hits) {
      if (this.refs[id] === 0) this.unlink(id);
      this.refs[id] = (this.refs[id] ?? 0) + 1;
    }
    const blocks = [...hits];
    for (let i = 0; i < fresh; i += 1) {
      const id = this.next[0] ?? 0;
      this.unlink(id);
      this.forget(id);
      this.refs[id] = 1;
      blocks.push(id);
    }
    return blocks;
  }

  /** Drops one reference each; the last blocks go to the free list first, so a prefix outlives its tail. */
  release(blocks: readonly number[]): void {
    for (let i = blocks.length - 1; i >= 0; i -= 1) {
      const id = blocks[i] ?? 0;
      const left = (this.refs[id] ?? 0) - 1;
      if (left < 0) throw new Error(`block ${id} was released twice`);
      this.refs[id] = left;
      if (left === 0) this.link(id);
    }
  }

  /** Files a full block under its key; the first block filed under a key stays. */
  file(id: number, key: number): void {
    if (!this.caches || this.keys[id] !== undefined || this.cached.has(key)) return;
    this.keys[id] = key;
    this.cached.set(key, id);
  }

  /** Writes one slot. */
  write(id: number, offset: number, token: number, position: number, cell: number): void {
    const slot = id * this.blockSize + offset;
    this.tokens[slot] = token;
    this.positions[slot] = position;
    this.cells[slot] = cell;
  }

  private forget(id: number): void {
    const key = this.keys[id];
    if (key === undefined) return;
    this.keys[id] = undefined;
    this.cached.delete(key);
  }

  private unlink(id: number): void {
    const before = this.previous[id] ?? 0;
    const after = this.next[id] ?? 0;
    this.next[before] = after;
    this.previous[after] = before;
    this.freeCount -= 1;
  }

  private link(id: number): void {
    const last = this.previous[0] ?? 0;
    this.next[last] = id;
    this.previous[id] = last;
    this.next[id] = 0;
    this.previous[0] = id;
    this.freeCount += 1;
  }
}
