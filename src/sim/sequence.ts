import type { BlockPool } from './blocks.ts';
import { foldInto, type HashState, toKey } from './hash.ts';
import type { JsonObject } from './json.ts';
import type { NoticeFault } from './kv-sender.ts';
import type { MediaContents } from './media.ts';
import type { SamplerSettings } from './sampler.ts';
import type { PeerSlots } from './side-channel.ts';

/** A forced token: an id, or a lower-case letter that the KV content decides. */
export type ForcedToken = number | 'letter';

/** One generated token; `state` is the KV digest it was drawn from and only valid during the call. */
export interface TokenStep {
  readonly id: number;
  readonly state: HashState;
  readonly isLast: boolean;
}

/** One engine request: one prompt, one choice. */
export interface EngineRequest {
  readonly internalId: string;
  readonly prompt: readonly number[];
  /** What the prompt's pictures show: their KV is not that of their tokens. */
  readonly media: MediaContents;
  /** Digest of what separates KV: weights, adapter, cache salt. */
  readonly partition: HashState;
  readonly maxTokens: number;
  readonly minTokens: number;
  readonly ignoreEos: boolean;
  readonly stopTokenIds: ReadonlySet<number>;
  readonly sampler: SamplerSettings;
  /** Undefined also for an empty object, which engines treat as absent. */
  readonly kv: JsonObject | undefined;
  /** What an injected fault does to the notices of this request's KV. */
  readonly noticeFault?: NoticeFault;
  /** Prompt log probabilities need every position computed. */
  readonly skipCache: boolean;
  readonly force?: (state: HashState) => readonly ForcedToken[];
  readonly slowMs: number;
  readonly signal: AbortSignal;
  /** Called after prefill and for each token; false ends the request as the front end's abort does. */
  readonly onStart?: () => void;
  readonly onToken: (step: TokenStep) => boolean;
}

/** How a request ended, with its handle if the engine gives one. */
export interface EngineResult {
  readonly finish: 'stop' | 'length' | 'abort';
  readonly stopReason: number | null;
  readonly output: readonly number[];
  readonly cachedTokens: number;
  readonly createdTokens: number;
  readonly handle: JsonObject | null;
}

/** Why a request has no result. */
export class EngineError extends Error {
  readonly kind: 'load_failure' | 'dead' | 'aborted';

  constructor(kind: 'load_failure' | 'dead' | 'aborted') {
    super(kind);
    this.name = 'EngineError';
    this.kind = kind;
  }
}

/** The KV side of one running request: its tokens, its blocks, and the digest of what those blocks really hold. */
export class Sequence {
  readonly tokens: number[];
  readonly keys: number[] = [];
  blocks: number[] = [];
  hitTokens = 0;
  /** Positions whose KV is in the blocks and folded into `state`. */
  computed = 0;
  state: HashState;
  private readonly keyState: HashState;
  private readonly pool: BlockPool;
  private readonly partition: HashState;
  private readonly media: MediaContents;

  constructor(request: EngineRequest, pool: BlockPool) {
    this.tokens = [...request.prompt];
    this.pool = pool;
    this.partition = request.partition;
    this.media = request.media;
    this.state = { ...request.partition };
    this.keyState = { ...request.partition };
    foldInto(this.keyState, 0x6b657973);
  }

  /** Block list filled so far plus the ones still to fill. */
  get blocksNeeded(): number {
    return Math.ceil(this.tokens.length / this.pool.blockSize);
  }

  /** Brings the prefix-cache keys up to the full blocks of the tokens. */
  extendKeys(): void {
    const { blockSize } = this.pool;
    while ((this.keys.length + 1) * blockSize <= this.tokens.length) {
      const start = this.keys.length * blockSize;
      for (let i = start; i < start + blockSize; i += 1) foldInto(this.keyState, this.contentAt(i));
      this.keys.push(toKey(this.keyState));
    }
  }

  /** Takes cached and free blocks for all tokens; false if the pool has too few. */
  allocate(skipCache: boolean): boolean {
    this.extendKeys();
    const { blockSize } = this.pool;
    const limit = Math.floor((this.tokens.length - 1) / blockSize);
    const hits = skipCache ? [] : this.pool.findPrefix(this.keys, limit);
    const blocks = this.pool.take(hits, this.blocksNeeded - hits.length);
    if (blocks === undefined) return false;
    this.blocks = blocks;
    this.hitTokens = hits.length * blockSize;
    return true;
  }

  /** Reads positions up to `until` from the blocks into the digest, whatever they hold. */
  readBack(until: number): void {
    const { blockSize, cells } = this.pool;
    this.state = { ...this.partition };
    for (let position = 0; position < until; position += 1) {
      const block = this.blocks[Math.floor(position / blockSize)] ?? 0;
      foldInto(this.state, cells[block * blockSize + (position % blockSize)] ?? 0);
    }
    this.computed = until;
  }

  /** Computes KV of the next position from its token and the digest so far, and stores it. */
  computeNext(): void {
    const { blockSize } = this.pool;
    const position = this.computed;
    const content = this.contentAt(position);
    const cell =
      (Math.imul(this.state.b ^ Math.imul(content + 1, 0x9e3779b1), 0x2545f491) ^ this.state.a ^ position) >>> 0;
    const index = Math.floor(position / blockSize);
    const block = this.blocks[index] ?? 0;
    this.pool.write(block, position % blockSize, content, position, cell);
    foldInto(this.state, cell);
    this.computed = position + 1;
    if (this.computed % blockSize === 0) {
      this.extendKeys();
      this.fileBlocks(index, this.computed);
    }
  }

  /** Copies what the first `count` positions hold. */
  copySlots(count: number): PeerSlots {
    const { blockSize, tokens, positions, cells } = this.pool;
    const slots = { tokens: new Int32Array(count), positions: new Int32Array(count), cells: new Uint32Array(count) };
    for (let position = 0; position < count; position += 1) {
      const slot = (this.blocks[Math.floor(position / blockSize)] ?? 0) * blockSize + (position % blockSize);
      slots.tokens[position] = tokens[slot] ?? -1;
      slots.positions[position] = positions[slot] ?? -1;
      slots.cells[position] = cells[slot] ?? 0;
    }
    return slots;
  }

  /**
   * Writes slots that a peer gave, the first of them at position `from`, behind the local hit; how many of the first
   * `count` are of another token, picture or place than the prompt's.
   */
  store(slots: PeerSlots, from: number, size: number, count: number): number {
    const { blockSize } = this.pool;
    let wrong = 0;
    for (let i = this.hitTokens - from; i < size; i += 1) {
      const position = from + i;
      const token = slots.tokens[i] ?? -1;
      const place = slots.positions[i] ?? -1;
      const block = this.blocks[Math.floor(position / blockSize)] ?? 0;
      this.pool.write(block, position % blockSize, token, place, slots.cells[i] ?? 0);
      if (i < count && (token !== this.contentAt(position) || place !== position)) wrong += 1;
    }
    this.fileBlocks(Math.floor(this.hitTokens / blockSize), from + count);
    return wrong;
  }

  /** What the KV of a place is computed from. */
  private contentAt(position: number): number {
    return this.media.get(position) ?? this.tokens[position] ?? 0;
  }

  /** Files full blocks below `tokens` in the prefix cache, from the given index, under the keys of the right tokens. */
  fileBlocks(from: number, tokens: number): void {
    const full = Math.floor(tokens / this.pool.blockSize);
    for (let index = from; index < full; index += 1) {
      const key = this.keys[index];
      const block = this.blocks[index];
      if (key !== undefined && block !== undefined) this.pool.file(block, key);
    }
  }
}

/** One request in an engine, from its arrival to its end. */
export interface Run {
  readonly request: EngineRequest;
  readonly sequence: Sequence;
  readonly stop: AbortController;
  failure: 'dead' | 'aborted' | undefined;
  wake: (() => void) | undefined;
  phase: 'waiting' | 'loading' | 'running' | 'hung';
  scheduled: boolean;
}
