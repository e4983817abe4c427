/** SHA-256 over the parts one after the other, 32 bytes; the pure folders get it from their caller. */
export type Sha256 = (parts: readonly Uint8Array[]) => Uint8Array;

/** Name of the only chain algorithm. */
export const CHAIN_ALGORITHM = 'c1';
/** Token ids per block of a chain, whatever block size an engine uses. */
export const CHAIN_BLOCK_TOKENS = 64;
/** Bytes of a digest as it travels; the next digest takes all 32. */
export const CHAIN_DIGEST_BYTES = 16;

const HASH_BYTES = 32;
const BLOCK_BYTES = CHAIN_BLOCK_TOKENS * 4;
/** A travelling digest as 32-bit words, which compare faster than bytes. */
const DIGEST_WORDS = CHAIN_DIGEST_BYTES / 4;

/** What a chain begins with: equal tokens of another model, adapter or salt have another KV. */
export interface ChainSeed {
  readonly model: string;
  readonly adapter: string;
  readonly cacheSalt: string;
}

/** A chain as `baton.v1.TokenChain` carries it. */
export interface Chain {
  readonly algorithm: string;
  readonly digests: Uint8Array[];
  readonly tailTokenIds: number[];
  readonly tokenCount: number;
}

/** A chain as it is kept and compared: all digests in one array, in this machine's byte order. */
export interface PackedChain {
  /** Four words per full block. */
  readonly words: Uint32Array;
  /** Ids after the last full block. */
  readonly tail: Uint32Array;
  /** Token ids that the chain covers. */
  readonly tokenCount: number;
}

/** One block of a prompt as token ids; `index` counts blocks from 0. */
export interface RawBlockIds {
  readonly index: number;
  readonly tokenIds: readonly number[];
}

/** A prompt that chains are compared with; the digests are made when a comparison gets to them. */
export interface ProvablePrompt {
  /** Blocks of 64 ids. */
  readonly fullBlocks: number;
  /** Array in which the words of that full block's digest stand at `4 * block`. */
  readonly wordsUpTo: (block: number) => Uint32Array;
  /** Ids of that block, the one after the last full block included; undefined where the prompt does not tell them. */
  readonly idsOf: (block: number) => ArrayLike<number> | undefined;
}

/** A mistake in a chain or a raw block; `field` is the path below the message. */
export interface ChainFault {
  readonly field: string;
  readonly what: string;
}

/** Token ids as little-endian uint32, which is what the chain hashes. */
export function encodeTokenIds(tokenIds: ArrayLike<number>): Uint8Array {
  const bytes = new Uint8Array(tokenIds.length * 4);
  const view = new DataView(bytes.buffer);
  for (let i = 0; i < tokenIds.length; i++) view.setUint32(i * 4, tokenIds[i] ?? 0, true);
  return bytes;
}

/** The chain over `tokenIds`, each a uint32. */
export function buildChain(tokenIds: ArrayLike<number>, seed: ChainSeed, sha256: Sha256): Chain {
  const bytes = encodeTokenIds(tokenIds);
  const blocks = Math.floor(tokenIds.length / CHAIN_BLOCK_TOKENS);
  const next = chainHasher(seed, sha256);
  const digests: Uint8Array[] = [];
  for (let block = 0; block < blocks; block++) {
    // A copy: the digest may be a view of a larger buffer, which would live as long as the chain.
    digests.push(new Uint8Array(next(bytes, block).subarray(0, CHAIN_DIGEST_BYTES)));
  }
  const tailTokenIds: number[] = [];
  for (let i = blocks * CHAIN_BLOCK_TOKENS; i < tokenIds.length; i++) tailTokenIds.push(tokenIds[i] ?? 0);
  return { algorithm: CHAIN_ALGORITHM, digests, tailTokenIds, tokenCount: tokenIds.length };
}

/** What is wrong with the shape of a chain; undefined for a right one. The digests themselves cannot be checked. */
export function findChainFault(chain: {
  readonly algorithm: string;
  readonly digests: readonly Uint8Array[];
  readonly tailTokenIds: readonly number[];
  readonly tokenCount: number;
}): ChainFault | undefined {
  if (chain.algorithm !== CHAIN_ALGORITHM) return { field: 'algorithm', what: `is not "${CHAIN_ALGORITHM}"` };
  if (chain.digests.some((digest) => digest.length !== CHAIN_DIGEST_BYTES)) {
    return { field: 'digests', what: `has a digest that is not ${CHAIN_DIGEST_BYTES} bytes long` };
  }
  if (chain.tailTokenIds.length >= CHAIN_BLOCK_TOKENS) {
    return { field: 'tail_token_ids', what: `has ${CHAIN_BLOCK_TOKENS} ids or more` };
  }
  if (chain.tokenCount !== chain.digests.length * CHAIN_BLOCK_TOKENS + chain.tailTokenIds.length) {
    return { field: 'token_count', what: 'does not count the ids of the digests and the tail' };
  }
  return undefined;
}

/** What is wrong with raw blocks beside a prompt's chain; undefined for right ones. */
export function findRawBlockFault(
  chain: { readonly digests: readonly Uint8Array[]; readonly tailTokenIds: readonly number[] },
  rawBlocks: readonly RawBlockIds[],
): ChainFault | undefined {
  const seen = new Set<number>();
  for (const { index, tokenIds } of rawBlocks) {
    if (seen.has(index)) return { field: 'index', what: 'occurs twice' };
    seen.add(index);
    if (index > chain.digests.length) return { field: 'index', what: 'is behind the end of the prompt' };
    if (index < chain.digests.length && tokenIds.length !== CHAIN_BLOCK_TOKENS) {
      return { field: 'token_ids', what: `has not ${CHAIN_BLOCK_TOKENS} ids although the block is full` };
    }
    if (index === chain.digests.length && !equalIds(tokenIds, chain.tailTokenIds)) {
      return { field: 'token_ids', what: "differs from the chain's tail" };
    }
  }
  return undefined;
}

/** The chain as it is kept; shares no memory with `chain`, whose shape must be right. */
export function packChain(chain: {
  readonly digests: readonly Uint8Array[];
  readonly tailTokenIds: readonly number[];
  readonly tokenCount: number;
}): PackedChain {
  const words = new Uint32Array(chain.digests.length * DIGEST_WORDS);
  const bytes = new Uint8Array(words.buffer);
  for (const [block, digest] of chain.digests.entries()) bytes.set(digest, block * CHAIN_DIGEST_BYTES);
  return { words, tail: Uint32Array.from(chain.tailTokenIds), tokenCount: chain.tokenCount };
}

/** A prompt given by all its ids; `bytes` is {@link encodeTokenIds} of them, where the caller has it already. */
export function promptOfIds(
  tokenIds: ArrayLike<number>,
  seed: ChainSeed,
  sha256: Sha256,
  bytes: Uint8Array = encodeTokenIds(tokenIds),
): ProvablePrompt {
  const fullBlocks = Math.floor(tokenIds.length / CHAIN_BLOCK_TOKENS);
  let words = new Uint32Array(0);
  let hashed = 0;
  let next: ReturnType<typeof chainHasher> | undefined;
  return {
    fullBlocks,
    wordsUpTo: (block) => {
      if (next === undefined) {
        next = chainHasher(seed, sha256);
        words = new Uint32Array(fullBlocks * DIGEST_WORDS);
      }
      for (; hashed <= block; hashed++) {
        const digest = next(bytes, hashed);
        new Uint8Array(words.buffer).set(digest.subarray(0, CHAIN_DIGEST_BYTES), hashed * CHAIN_DIGEST_BYTES);
      }
      return words;
    },
    idsOf: (block) => {
      const start = block * CHAIN_BLOCK_TOKENS;
      const length = Math.max(0, Math.min(CHAIN_BLOCK_TOKENS, tokenIds.length - start));
      return Array.from({ length }, (_, index) => tokenIds[start + index] ?? 0);
    },
  };
}

/** A prompt given by its chain, with raw ids of some blocks; both must have the right shape. `words` are those of its digests. */
export function promptOfChain(
  chain: {
    readonly digests: readonly Uint8Array[];
    readonly tailTokenIds: readonly number[];
    readonly tokenCount: number;
  },
  rawBlocks: readonly RawBlockIds[],
  words: Uint32Array = packChain(chain).words,
): ProvablePrompt {
  const raw = new Map(rawBlocks.map((block) => [block.index, block.tokenIds]));
  return {
    fullBlocks: chain.digests.length,
    wordsUpTo: () => words,
    idsOf: (block) => (block === chain.digests.length ? chain.tailTokenIds : raw.get(block)),
  };
}

/**
 * How many leading tokens of the prompt are proven equal to those of `stored`, at most `limit`. Exact to the token
 * where the first difference is in the stored tail; inside a full block, whose ids nobody keeps, the block's begin.
 */
export function matchChain(prompt: ProvablePrompt, stored: PackedChain, limit: number): number {
  const storedBlocks = stored.words.length / DIGEST_WORDS;
  const blocks = Math.min(prompt.fullBlocks, storedBlocks, Math.ceil(limit / CHAIN_BLOCK_TOKENS));
  let equal = 0;
  while (equal < blocks && isSameDigest(prompt.wordsUpTo(equal), stored.words, equal * DIGEST_WORDS)) equal++;
  let matched = equal * CHAIN_BLOCK_TOKENS;
  if (equal === storedBlocks && matched < limit) {
    const ids = prompt.idsOf(equal);
    if (ids !== undefined) matched += commonLength(stored.tail, ids);
  }
  return Math.min(matched, limit);
}

/** Hashes blocks in order: each call takes the block after the one before, and gives all 32 bytes of its digest. */
function chainHasher(seed: ChainSeed, sha256: Sha256): (bytes: Uint8Array, block: number) => Uint8Array {
  const input = new Uint8Array(HASH_BYTES + BLOCK_BYTES);
  const parts = [input];
  input.set(seedDigest(seed, sha256));
  return (bytes, block) => {
    input.set(bytes.subarray(block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES), HASH_BYTES);
    const digest = sha256(parts);
    input.set(digest);
    return digest;
  };
}

function seedDigest(seed: ChainSeed, sha256: Sha256): Uint8Array {
  const encoder = new TextEncoder();
  const parts: Uint8Array[] = [encoder.encode('baton.c1')];
  for (const text of [seed.model, seed.adapter, seed.cacheSalt]) {
    const bytes = encoder.encode(text);
    parts.push(encodeTokenIds([bytes.length]), bytes);
  }
  return sha256(parts);
}

function isSameDigest(a: Uint32Array, b: Uint32Array, at: number): boolean {
  return a[at] === b[at] && a[at + 1] === b[at + 1] && a[at + 2] === b[at + 2] && a[at + 3] === b[at + 3];
}

function commonLength(a: ArrayLike<number>, b: ArrayLike<number>): number {
  const end = Math.min(a.length, b.length);
  let length = 0;
  while (length < end && a[length] === b[length]) length++;
  return length;
}

function equalIds(a: readonly number[], b: readonly number[]): boolean {
  return a.length === b.length && commonLength(a, b) === a.length;
}
