import { createHash, type Hash } from 'node:crypto';
import { type FileHandle, readFile, rename, rm } from 'node:fs/promises';
import { setImmediate } from 'node:timers/promises';
import type { PackedChain } from '../core/chain.ts';
import { codeOf, isOwnFile, replaceFile, syncFolder } from './own-file.ts';
import type { NewEntry } from './store.ts';

/** An entry as it is kept over a restart. */
export interface SavedEntry {
  readonly entry: NewEntry;
  readonly ageMs: number;
}

/** What {@link loadSnapshot} found. */
export type LoadedSnapshot =
  /** No file: nothing was saved, or it was used up before. */
  | { readonly kind: 'none' }
  | { readonly kind: 'loaded'; readonly entries: readonly SavedEntry[]; readonly awayMs: number }
  /** The file is not a whole snapshot of this version; its entries are lost. */
  | { readonly kind: 'refused'; readonly why: string };

/** What the files of every version begin with. */
const FAMILY = 'baton-store-';
const MAGIC = `${FAMILY}1\n`;
const DIGEST_BYTES = 32;
/** Entries that are written or read before other work gets its turn. */
const SLICE = 256;

/**
 * Reads a snapshot and uses it up: it is moved away, for good, before the first byte of it is read. A process that is
 * killed at any moment from there on leaves nothing that could be read again.
 *
 * @param nowMs wall clock, milliseconds
 */
export async function loadSnapshot(file: string, nowMs: number): Promise<LoadedSnapshot> {
  if (!(await isOwnFile(file, FAMILY, 'store'))) return { kind: 'none' };
  const taken = `${file}.taken`;
  // Left by a process that was killed while it read.
  await rm(taken, { force: true });
  try {
    await rename(file, taken);
  } catch (error) {
    if (codeOf(error) === 'ENOENT') return { kind: 'none' };
    throw new Error(`${file} cannot be moved (${codeOf(error)})`);
  }
  await syncFolder(file);
  const bytes = await readFile(taken);
  await rm(taken);
  await syncFolder(file);
  return decode(bytes, nowMs);
}

/** Writes a snapshot in place of an earlier one; it is there whole or not at all. */
export async function saveSnapshot(file: string, entries: Iterable<SavedEntry>, nowMs: number): Promise<number> {
  let count = 0;
  await replaceFile(file, async (handle) => {
    const hash = createHash('sha256');
    await write(handle, hash, [Buffer.from(MAGIC), Buffer.from(`${JSON.stringify({ savedAt: nowMs })}\n`)]);
    let batch: Buffer[] = [];
    for (const saved of entries) {
      batch.push(...encodeEntry(saved));
      count += 1;
      if (count % SLICE > 0) continue;
      await write(handle, hash, batch);
      batch = [];
    }
    await write(handle, hash, batch);
    await handle.writeFile(hash.digest());
  });
  return count;
}

async function write(handle: FileHandle, hash: Hash, parts: readonly Buffer[]): Promise<void> {
  const bytes = Buffer.concat(parts);
  hash.update(bytes);
  await handle.writeFile(bytes);
}

function encodeEntry({ entry, ageMs }: SavedEntry): Buffer[] {
  const { handle, chain, ...rest } = entry;
  const words = chain === undefined ? Buffer.alloc(0) : bytesOf(chain.words);
  const tail = chain === undefined ? Buffer.alloc(0) : bytesOf(chain.tail);
  const head = Buffer.from(JSON.stringify({ ...rest, ageMs, chainTokens: chain?.tokenCount }));
  const sizes = Buffer.alloc(16);
  for (const [index, part] of [head, handle, words, tail].entries()) sizes.writeUInt32LE(part.byteLength, 4 * index);
  return [sizes, head, Buffer.from(handle), words, tail];
}

async function decode(bytes: Buffer, nowMs: number): Promise<LoadedSnapshot> {
  const refused = (why: string) => ({ kind: 'refused', why }) as const;
  if (bytes.toString('latin1', 0, MAGIC.length) !== MAGIC) return refused('is not a snapshot of this version');
  const end = bytes.length - DIGEST_BYTES;
  const whole = createHash('sha256')
    .update(bytes.subarray(0, Math.max(0, end)))
    .digest();
  if (end < MAGIC.length || !whole.equals(bytes.subarray(end))) return refused('is damaged');
  let at = bytes.indexOf('\n', MAGIC.length) + 1;
  const { savedAt }: { readonly savedAt: number } = JSON.parse(bytes.toString('utf8', MAGIC.length, at));
  const awayMs = nowMs - savedAt;
  // How long the blocks are there cannot be told any more.
  if (awayMs < 0) return refused('is of a time to come: the clock was set back');
  const entries: SavedEntry[] = [];
  while (at < end) {
    const [head = 0, handle = 0, words = 0, tail = 0] = [0, 4, 8, 12].map((offset) => bytes.readUInt32LE(at + offset));
    at += 16;
    const part = (length: number) => {
      at += length;
      return bytes.subarray(at - length, at);
    };
    // The digest holds: these are the bytes that encodeEntry wrote.
    const { ageMs, chainTokens, ...rest }: SavedHead = JSON.parse(part(head).toString());
    const handleBytes = new Uint8Array(part(handle));
    const chain: PackedChain = { words: wordsOf(part(words)), tail: wordsOf(part(tail)), tokenCount: chainTokens ?? 0 };
    entries.push({
      entry: { ...rest, handle: handleBytes, ...(chainTokens === undefined ? {} : { chain }) },
      ageMs,
    });
    if (entries.length % SLICE === 0) await setImmediate();
  }
  return { kind: 'loaded', entries, awayMs };
}

type SavedHead = Omit<NewEntry, 'handle' | 'chain'> & { readonly ageMs: number; readonly chainTokens?: number };

function bytesOf(words: Uint32Array): Buffer {
  return Buffer.from(words.buffer, words.byteOffset, words.byteLength);
}

/** Words in memory of their own: a file's bytes need not lie where words may. */
function wordsOf(bytes: Uint8Array): Uint32Array {
  return new Uint32Array(new Uint8Array(bytes).buffer);
}
