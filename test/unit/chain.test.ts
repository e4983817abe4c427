import { spawnSync } from 'node:child_process';
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import {
  buildChain,
  type ChainSeed,
  encodeTokenIds,
  findChainFault,
  findRawBlockFault,
  matchChain,
  packChain,
  promptOfChain,
  promptOfIds,
  type Sha256,
} from '../../src/core/chain.ts';
import { sha256 } from '../../src/services/sha256.ts';

interface Vector {
  readonly name: string;
  readonly model: string;
  readonly adapter: string;
  readonly cache_salt: string;
  readonly token_ids: readonly number[];
  readonly chain: { readonly digests: readonly string[]; readonly tail_token_ids: readonly number[] };
}

const fixture = join(import.meta.dirname, '..', 'fixtures', 'chain.json');
const { vectors }: { vectors: readonly Vector[] } = JSON.parse(readFileSync(fixture, 'utf8'));
const SEED: ChainSeed = { model: 'm', adapter: '', cacheSalt: '' };

// Written from the contract alone, so that the fixture is not this project's code in another spelling.
const PYTHON = `
import hashlib, json, struct, sys
bad = 0
vectors = json.load(open(sys.argv[1]))["vectors"]
for v in vectors:
    h = b"baton.c1"
    for part in (v["model"], v["adapter"], v["cache_salt"]):
        h += struct.pack("<I", len(part.encode())) + part.encode()
    h, ids, digests = hashlib.sha256(h).digest(), v["token_ids"], []
    while len(ids) >= 64:
        h, ids = hashlib.sha256(h + struct.pack("<64I", *ids[:64])).digest(), ids[64:]
        digests.append(h[:16].hex())
    want = {"algorithm": "c1", "digests": digests, "tail_token_ids": ids, "token_count": len(v["token_ids"])}
    bad += want != v["chain"]
print(len(vectors), bad)
`;

describe('chain c1', () => {
  it.each(vectors)('gives the test vector: $name', (vector) => {
    const seed = { model: vector.model, adapter: vector.adapter, cacheSalt: vector.cache_salt };
    const chain = buildChain(vector.token_ids, seed, sha256);
    expect({
      algorithm: chain.algorithm,
      digests: chain.digests.map((digest) => Buffer.from(digest).toString('hex')),
      tail_token_ids: chain.tailTokenIds,
      token_count: chain.tokenCount,
    }).toEqual(vector.chain);
    expect(findChainFault(chain)).toBeUndefined();
  });

  it('is what Python computes', ({ skip }) => {
    const run = spawnSync('python3', ['-c', PYTHON, fixture], { encoding: 'utf8' });
    if (run.error !== undefined) skip('SKIPPED: there is no python3 to check the chain vectors with');
    expect(run.stdout.trim(), run.stderr).toBe(`${vectors.length} 0`);
    expect(vectors.length).toBeGreaterThan(8);
  });
});

describe('a chain with a mistake', () => {
  const chain = buildChain(range(130), SEED, sha256);
  it.each([
    ['algorithm', { ...chain, algorithm: 'c2' }],
    ['digests', { ...chain, digests: [new Uint8Array(16), new Uint8Array(32)] }],
    ['tail_token_ids', { ...chain, tailTokenIds: range(64) }],
    ['token_count', { ...chain, tokenCount: 131 }],
  ])('is told by %s', (field, broken) => {
    expect(findChainFault(broken)?.field).toBe(field);
  });

  it.each([
    ['index', [{ index: 3, tokenIds: [] }]],
    [
      'index',
      [
        { index: 1, tokenIds: range(64) },
        { index: 1, tokenIds: range(64) },
      ],
    ],
    ['token_ids', [{ index: 1, tokenIds: range(63) }]],
    ['token_ids', [{ index: 2, tokenIds: [128] }]],
  ])('is told by %s of a raw block', (field, blocks) => {
    expect(findRawBlockFault(chain, blocks)?.field).toBe(field);
  });

  it('is not seen in right ones', () => {
    const blocks = [
      { index: 0, tokenIds: range(64) },
      { index: 2, tokenIds: [128, 129] },
    ];
    expect(findRawBlockFault(chain, blocks)).toBeUndefined();
  });
});

describe('matching', () => {
  const match = (stored: readonly number[], prompt: readonly number[], limit = stored.length): number =>
    matchChain(promptOfIds(prompt, SEED, sha256), packChain(buildChain(stored, SEED, sha256)), limit);

  it.each([
    { stored: 200, prompt: 300, limit: 200, matched: 200 },
    { stored: 200, prompt: 300, limit: 199, matched: 199 },
    { stored: 200, prompt: 200, limit: 200, matched: 200 },
    { stored: 200, prompt: 197, limit: 200, matched: 197 },
    { stored: 200, prompt: 100, limit: 200, matched: 64 },
    { stored: 192, prompt: 192, limit: 192, matched: 192 },
    { stored: 192, prompt: 300, limit: 191, matched: 191 },
    { stored: 192, prompt: 191, limit: 192, matched: 128 },
    { stored: 200, prompt: 300, limit: 250, matched: 200 },
    { stored: 200, prompt: 300, limit: 70, matched: 70 },
    { stored: 20, prompt: 300, limit: 20, matched: 20 },
    { stored: 20, prompt: 0, limit: 20, matched: 0 },
    { stored: 0, prompt: 300, limit: 0, matched: 0 },
  ])('proves $matched of $stored tokens, n = $limit, against $prompt', ({ stored, prompt, limit, matched }) => {
    expect(match(range(stored), range(prompt), limit)).toBe(matched);
  });

  it('ends at the first difference: to the token in the tail, at its begin in a full block', () => {
    const changed = (at: number) => range(300).map((id, index) => (index === at ? 99_999 : id));
    expect(match(range(200), changed(195))).toBe(195);
    expect(match(range(200), changed(192))).toBe(192);
    expect(match(range(200), changed(191))).toBe(128);
    expect(match(range(200), changed(0))).toBe(0);
    expect(match(range(200), changed(200))).toBe(200);
  });

  it('does not match tokens of another model, adapter or salt', () => {
    const stored = packChain(buildChain(range(200), SEED, sha256));
    for (const other of [{ model: 'n' }, { adapter: 'a' }, { cacheSalt: 's' }]) {
      expect(matchChain(promptOfIds(range(200), { ...SEED, ...other }, sha256), stored, 200)).toBe(0);
    }
  });

  it('hashes no further than an entry goes, and once for several', () => {
    let hashes = 0;
    const counting: Sha256 = (parts) => {
      hashes += 1;
      return sha256(parts);
    };
    const prompt = promptOfIds(range(64 * 500), SEED, counting);
    const entry = (tokens: number) => packChain(buildChain(range(tokens), SEED, sha256));
    expect(hashes).toBe(0);
    expect(matchChain(prompt, entry(64 * 10), 64 * 10)).toBe(64 * 10);
    expect(hashes).toBe(11);
    expect(matchChain(prompt, entry(64 * 20 + 5), 64 * 20 + 5)).toBe(64 * 20 + 5);
    expect(matchChain(prompt, entry(64 * 20), 64 * 3)).toBe(64 * 3);
    expect(hashes).toBe(21);
    const other = packChain(buildChain(range(64 * 400).with(70, 1), SEED, sha256));
    expect(matchChain(promptOfIds(range(64 * 500), SEED, counting), other, 64 * 400)).toBe(64);
    expect(hashes).toBe(21 + 3);
  });

  it('of a chain with its raw block gives what all ids give', () => {
    const small = fc.array(fc.nat(2), { maxLength: 300 });
    const shared = fc.nat(300);
    fc.assert(
      fc.property(small, small, small, shared, fc.nat(310), (head, a, b, keep, n) => {
        const stored = [...head, ...a.slice(0, keep)];
        const prompt = [...head, ...b];
        const packed = packChain(buildChain(stored, SEED, sha256));
        const limit = Math.min(n, stored.length);
        const byIds = matchChain(promptOfIds(prompt, SEED, sha256), packed, limit);
        const chain = buildChain(prompt, SEED, sha256);
        const at = Math.floor(limit / 64);
        const raw = at <= chain.digests.length ? [{ index: at, tokenIds: prompt.slice(at * 64, at * 64 + 64) }] : [];
        expect(findRawBlockFault(chain, raw)).toBeUndefined();
        const byChain = matchChain(promptOfChain(chain, raw), packed, limit);
        const equal = commonPrefix(stored, prompt);
        expect(byChain).toBe(byIds);
        expect(byIds).toBeLessThanOrEqual(Math.min(equal, limit));
        // Only inside a full block of the stored chain may proof fall short of truth.
        const exact = equal >= Math.min(limit, Math.floor(stored.length / 64) * 64);
        const blocks = Math.floor(Math.min(equal, limit) / 64) * 64;
        const inFullBlock = limit <= Math.floor(stored.length / 64) * 64 && equal < Math.ceil(limit / 64) * 64;
        if (exact && !inFullBlock) expect(byIds).toBe(Math.min(equal, limit));
        else expect(byIds).toBeGreaterThanOrEqual(blocks);
      }),
      { numRuns: 500 },
    );
  });

  it('keeps nothing of the chain it was given', () => {
    const chain = buildChain(range(130), SEED, sha256);
    const packed = packChain(chain);
    chain.digests[0]?.fill(0);
    chain.tailTokenIds[0] = 7;
    expect(matchChain(promptOfIds(range(130), SEED, sha256), packed, 130)).toBe(130);
  });

  it('writes ids as little-endian uint32', () => {
    expect([...encodeTokenIds([1, 0x01020304, 4_294_967_295])]).toEqual([1, 0, 0, 0, 4, 3, 2, 1, 255, 255, 255, 255]);
  });
});

function range(length: number): number[] {
  return Array.from({ length }, (_, index) => index);
}

function commonPrefix(a: readonly number[], b: readonly number[]): number {
  let length = 0;
  while (length < a.length && length < b.length && a[length] === b[length]) length++;
  return length;
}
