import { createHash } from 'node:crypto';
import type { PackedChain } from '../../core/chain.ts';
import { keyIdOf } from '../entry.ts';
import type { CallId, EntryView, NewEntry, StoreKey } from '../store.ts';

/** What a view tells of an entry beside its state, which the scripts keep. */
export type Facts = Omit<EntryView, 'entryId' | 'remainingMs' | 'ageMs' | 'claimed' | 'revision'>;

/** Name of a key's list; only equal keys share one. */
export function keyName(key: StoreKey): string {
  return createHash('sha256').update(keyIdOf(key)).digest('base64url');
}

/** Name of the answer to a call. */
export function replayName(method: string, { scope, key }: CallId): string {
  return `r:${method}:${createHash('sha256').update(`${scope.length}:${scope}${key}`).digest('base64url')}`;
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
  let at = 8;
  for (const list of [words, tail]) for (const word of list) at = bytes.writeUInt32LE(word, at);
  return bytes;
}

/** Reads what {@link encodeChain} wrote. */
export function decodeChain(bytes: Buffer): PackedChain {
  const count = bytes.readUInt32LE(4);
  const list = (from: number, length: number): Uint32Array => {
    const array = new Uint32Array(length);
    for (let index = 0; index < length; index++) array[index] = bytes.readUInt32LE(from + 4 * index);
    return array;
  };
  const tailAt = 8 + 4 * count;
  return {
    tokenCount: bytes.readUInt32LE(0),
    words: list(8, count),
    tail: list(tailAt, (bytes.length - tailAt) / 4),
  };
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
