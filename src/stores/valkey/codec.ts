import { hash } from 'node:crypto';
import { endianness } from 'node:os';
import type { PackedChain } from '../../core/chain.ts';
import { keyIdOf } from '../entry.ts';
import type { CallId, EntryView, NewEntry, StoreKey } from '../store.ts';

const IS_BIG_ENDIAN = endianness() === 'BE';

/** What a view tells of an entry beside its state, which the scripts keep. */
export type Facts = Omit<EntryView, 'entryId' | 'remainingMs' | 'ageMs' | 'claimed' | 'revision'>;

/** Name of a key's list; only equal keys share one. */
export function keyName(key: StoreKey): string {
  return hash('sha256', keyIdOf(key), 'base64url');
}

/** Name of the answer to a call. */
export function replayName(method: string, { scope, key }: CallId): string {
  return `r:${method}:${hash('sha256', `${scope.length}:${scope}${key}`, 'base64url')}`;
}

/** The facts of a new entry as bytes: each text led by its length. */
export function encodeFacts({ key, owner, chain, ...entry }: NewEntry): Buffer {
  return packTexts([
    key.tenant,
    key.model,
    key.adapter,
    key.cacheSalt,
    key.conversationId,
    owner.instanceId,
    owner.engineId,
    owner.life.processStartSeconds === undefined ? '' : String(owner.life.processStartSeconds),
    owner.life.engineId,
    String(owner.life.generation),
    owner.compatGroup,
    entry.connector,
    String(entry.storedTokens),
    String(entry.engineBlockSize),
    String(entry.blocks),
    chain === undefined ? '' : String(chain.tokenCount),
    entry.afterHit === true ? '1' : '',
  ]);
}

/** Reads what {@link encodeFacts} wrote. */
export function decodeFacts(bytes: Buffer): Facts {
  const texts = unpackTexts(bytes);
  const text = (index: number): string => texts[index] ?? '';
  const chainTokens = text(15);
  return {
    key: { tenant: text(0), model: text(1), adapter: text(2), cacheSalt: text(3), conversationId: text(4) },
    owner: {
      instanceId: text(5),
      engineId: text(6),
      life: {
        processStartSeconds: text(7) === '' ? undefined : Number(text(7)),
        engineId: text(8),
        generation: Number(text(9)),
      },
      compatGroup: text(10),
    },
    connector: text(11),
    storedTokens: Number(text(12)),
    engineBlockSize: Number(text(13)),
    blocks: Number(text(14)),
    chainTokens: chainTokens === '' ? 0 : Number(chainTokens),
    hasChain: chainTokens !== '',
    ...(text(16) === '1' ? { afterHit: true } : {}),
  };
}

/** A chain as bytes: its length, the number of its digest words, both arrays; little-endian on every machine. */
export function encodeChain({ words, tail, tokenCount }: PackedChain): Buffer {
  const bytes = Buffer.allocUnsafe(8 + 4 * (words.length + tail.length));
  bytes.writeUInt32LE(tokenCount, 0);
  bytes.writeUInt32LE(words.length, 4);
  bytes.set(bytesOf(words), 8);
  bytes.set(bytesOf(tail), 8 + 4 * words.length);
  if (IS_BIG_ENDIAN) bytes.subarray(8).swap32();
  return bytes;
}

/** Reads what {@link encodeChain} wrote. */
export function decodeChain(bytes: Buffer): PackedChain {
  const count = bytes.readUInt32LE(4);
  // A copy, so that the words stand where they may.
  const all = new Uint32Array((bytes.length - 8) / 4);
  const copy = bytesOf(all);
  copy.set(bytes.subarray(8));
  if (IS_BIG_ENDIAN) copy.swap32();
  return { tokenCount: bytes.readUInt32LE(0), words: all.subarray(0, count), tail: all.subarray(count) };
}

function bytesOf(words: Uint32Array): Buffer {
  return Buffer.from(words.buffer, words.byteOffset, words.byteLength);
}

function packTexts(texts: readonly string[]): Buffer {
  const lengths = texts.map((text) => Buffer.byteLength(text));
  const bytes = Buffer.allocUnsafe(lengths.reduce((sum, length) => sum + 4 + length, 0));
  let at = 0;
  for (const [index, text] of texts.entries()) {
    at = bytes.writeUInt32LE(lengths[index] ?? 0, at);
    at += bytes.write(text, at);
  }
  return bytes;
}

function unpackTexts(bytes: Buffer): readonly string[] {
  const texts: string[] = [];
  for (let at = 0; at < bytes.length; ) {
    const end = at + 4 + bytes.readUInt32LE(at);
    texts.push(bytes.toString('utf8', at + 4, end));
    at = end;
  }
  return texts;
}
