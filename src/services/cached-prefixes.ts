import type { Instance } from '../../gen/baton/v1/instance_pb.ts';
import { CHAIN_BLOCK_TOKENS, CHAIN_DIGEST_BYTES, type ProvablePrompt } from '../core/chain.ts';
import { isSameLife } from './instance-record.ts';

/** Blocks that are remembered of an instance that does not tell the size of its cache: a million tokens. */
const DEFAULT_BLOCKS = 16_384;
/** Instances come and go; the first of more are forgotten. */
const MAX_INSTANCES = 4096;
const WORD = 2 ** 32;
/** As many bits of a digest as a number holds; what is guessed wrong by a collision costs time and never rightness. */
const HIGH_BITS = 2 ** 21;

interface Cache {
  readonly life: Instance['incarnation'];
  /** The least recently used first. */
  readonly blocks: Set<number>;
}

/**
 * What engines likely hold in their prefix caches, as this router saw it: the blocks of the chains of the turns they
 * worked on, as many as fit into the engine, the least recently used forgotten first. A guess: others use the engines
 * too, and what they evict is not told.
 */
export class CachedPrefixes {
  readonly #caches = new Map<string, Cache>();

  /** The instance has computed or read the first `tokens` tokens of a chain with these digests. */
  note(instance: Instance, digests: readonly Uint8Array[], tokens: number): void {
    const { blocks } = this.#cacheOf(instance);
    const count = Math.min(digests.length, Math.floor(tokens / CHAIN_BLOCK_TOKENS));
    // From the end, so that the beginnings are the last to be forgotten.
    for (let block = count - 1; block >= 0; block--) touch(blocks, keyOfBytes(digests[block]));
    const limit = limitOf(instance);
    for (const oldest of blocks) {
      if (blocks.size <= limit) break;
      blocks.delete(oldest);
    }
  }

  /** Leading tokens of a prompt that the instance likely holds, a multiple of the block of a chain. */
  held(instance: Instance, prompt: ProvablePrompt): number {
    const { blocks } = this.#cacheOf(instance);
    let block = 0;
    while (block < prompt.fullBlocks && blocks.has(keyOfWords(prompt.wordsUpTo(block), block))) block++;
    return block * CHAIN_BLOCK_TOKENS;
  }

  #cacheOf({ id, incarnation: life }: Instance): Cache {
    const known = this.#caches.get(id);
    if (known !== undefined && life !== undefined && known.life !== undefined && isSameLife(known.life, life)) {
      return known;
    }
    const cache: Cache = { life, blocks: new Set() };
    this.#caches.delete(id);
    this.#caches.set(id, cache);
    const [oldest] = this.#caches.size > MAX_INSTANCES ? this.#caches.keys() : [];
    if (oldest !== undefined) this.#caches.delete(oldest);
    return cache;
  }
}

function touch(blocks: Set<number>, key: number): void {
  blocks.delete(key);
  blocks.add(key);
}

function limitOf({ engine }: Instance): number {
  const tokens = (engine?.numGpuBlocks ?? 0) * (engine?.blockSize ?? 0);
  return tokens === 0 ? DEFAULT_BLOCKS : Math.ceil(tokens / CHAIN_BLOCK_TOKENS);
}

const words = new Uint32Array(CHAIN_DIGEST_BYTES / 4);
const bytes = new Uint8Array(words.buffer);

function keyOfBytes(digest: Uint8Array | undefined): number {
  if (digest !== undefined) bytes.set(digest);
  return keyOfWords(words, 0);
}

function keyOfWords(chain: Uint32Array, block: number): number {
  const at = block * words.length;
  return ((chain[at] ?? 0) % HIGH_BITS) * WORD + (chain[at + 1] ?? 0);
}
