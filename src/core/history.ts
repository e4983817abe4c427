import { decodeString, findMember, type ScannedObject } from './json-scan.ts';
import { elementsOf, endOfString, isSpace, memberOf, type ValueRange } from './json-walk.ts';

/** An incremental hash; Node's `createHash('sha256')` fits. */
export interface IncrementalHash {
  update(bytes: Uint8Array): unknown;
  copy(): IncrementalHash;
  digest(encoding: 'hex'): string;
}

/**
 * Hashes of a request's history, over the bytes of each element of `messages` without the white space outside strings:
 * equal exactly where these bytes are equal, whatever else the bodies hold.
 */
export interface HistoryHashes {
  /** Of all messages, or of the prompt: what an entry is put under, and where a regenerated answer finds it. */
  readonly all: string;
  /** Of the messages before the last assistant message that is not the last message; undefined where there is none. */
  readonly beforeAssistant: string | undefined;
  /** Of the messages before an assistant message that is the last message; undefined where the last is another. */
  readonly beforeTrailing: string | undefined;
  /** How many leading messages each of these hashes is of; empty for completions. */
  readonly lengths: ReadonlyMap<string, number>;
}

/** Hashes the history of a valid body; undefined where it has no `messages` list, or for completions no `prompt`. */
export function hashHistory(
  api: 'chat.completions' | 'completions',
  body: Uint8Array,
  scan: ScannedObject,
  createHash: () => IncrementalHash,
): HistoryHashes | undefined {
  const member = findMember(scan, api === 'completions' ? 'prompt' : 'messages');
  if (member === undefined || member.type === 'null') return undefined;
  // The two APIs render differently: equal bytes are not the same prompt.
  const hash = createHash();
  hash.update(ENCODER.encode(`${api}\n`));
  if (api === 'completions') {
    hashCompact(body, member, hash);
    return { all: hash.digest('hex'), beforeAssistant: undefined, beforeTrailing: undefined, lengths: new Map() };
  }
  if (member.type !== 'array') return undefined;
  const messages = elementsOf(body, member);
  const trailing = isAssistant(body, messages.at(-1)) ? messages.length - 1 : -1;
  const earlier = lastAssistant(body, messages, messages.length - 1);
  let beforeAssistant: string | undefined;
  let beforeTrailing: string | undefined;
  const lengths = new Map<string, number>();
  const digest = (length: number): string => {
    const hex = hash.copy().digest('hex');
    lengths.set(hex, length);
    return hex;
  };
  for (const [index, message] of messages.entries()) {
    if (index === earlier) beforeAssistant = digest(index);
    if (index === trailing) beforeTrailing = digest(index);
    hashCompact(body, message, hash);
  }
  return { all: digest(messages.length), beforeAssistant, beforeTrailing, lengths };
}

/** Shortest beginning of a prompt that is looked for, bytes: fewer tokens are not worth a transfer. */
const SHORTEST_PREFIX = 256;

/**
 * Hashes of the beginnings of a completion's prompt whose lengths are powers of two, longest first. A prompt goes on
 * with what was the prompt of the turn before, so the longest of that one is among these. Empty for a short prompt.
 */
export function hashPromptPrefixes(
  body: Uint8Array,
  scan: ScannedObject,
  createHash: () => IncrementalHash,
): readonly string[] {
  const member = findMember(scan, 'prompt');
  if (member === undefined) return [];
  const hash = createHash();
  hash.update(ENCODER.encode('completions\n'));
  const hashes: string[] = [];
  let length = 0;
  let next = SHORTEST_PREFIX;
  const add = (piece: Uint8Array) => {
    let from = 0;
    while (length + piece.length - from >= next) {
      const end = from + next - length;
      hash.update(piece.subarray(from, end));
      hashes.push(hash.copy().digest('hex'));
      from = end;
      length = next;
      next *= 2;
    }
    hash.update(piece.subarray(from));
    length += piece.length - from;
  };
  feedCompact(body, member, add);
  return hashes.reverse();
}

/** The hashes under which an earlier turn may be found, in the order of the look-ups: the longest history first. */
export function historyLookups(hashes: HistoryHashes): readonly string[] {
  const { all, beforeTrailing, beforeAssistant } = hashes;
  return [all, beforeTrailing, beforeAssistant].filter((hash) => hash !== undefined);
}

/** Whether a valid chat body continues a conversation: its `messages` hold an assistant message. */
export function hasAssistantMessage(body: Uint8Array, scan: ScannedObject): boolean {
  const member = findMember(scan, 'messages');
  if (member?.type !== 'array') return false;
  const messages = elementsOf(body, member);
  return lastAssistant(body, messages, messages.length) >= 0;
}

const ENCODER = new TextEncoder();
// White space outside strings is dropped and a string cannot hold a raw line feed: no message has one.
const END_OF_MESSAGE = ENCODER.encode('\n');

/** Index of the last assistant message before `end`, or -1. */
function lastAssistant(body: Uint8Array, messages: readonly ValueRange[], end: number): number {
  for (let i = end - 1; i >= 0; i--) if (isAssistant(body, messages[i])) return i;
  return -1;
}

function isAssistant(body: Uint8Array, message: ValueRange | undefined): boolean {
  if (message === undefined) return false;
  const role = memberOf(body, message, (key) => decodeString(body, key) === 'role');
  return role !== undefined && body[role.valueStart] === 0x22 && decodeString(body, role) === 'assistant';
}

/** Pieces shorter than this are collected: a hash call costs more than a copy of them. */
const SMALL = 512;
const SCRATCH = 8192;

/** Feeds the bytes of one value without the white space outside strings, and a line feed, to `hash`. */
function hashCompact(body: Uint8Array, value: ValueRange, hash: IncrementalHash): void {
  feedCompact(body, value, (piece) => hash.update(piece), END_OF_MESSAGE);
}

/** Gives the bytes of one value without the white space outside strings to `take`, and `end` behind them. */
function feedCompact(
  body: Uint8Array,
  value: ValueRange,
  take: (piece: Uint8Array) => void,
  end: Uint8Array = new Uint8Array(),
): void {
  const scratch = new Uint8Array(Math.min(SCRATCH, value.valueEnd - value.valueStart + 1));
  let used = 0;
  const flush = () => {
    // A copy: the hash may keep what it is given until its end, and the scratch is written again.
    if (used > 0) take(scratch.slice(0, used));
    used = 0;
  };
  const add = (piece: Uint8Array) => {
    if (piece.length === 0) return;
    if (used + piece.length > scratch.length) flush();
    if (piece.length >= SMALL || piece.length > scratch.length) {
      flush();
      take(piece);
      return;
    }
    scratch.set(piece, used);
    used += piece.length;
  };
  let from = value.valueStart;
  let i = from;
  while (i < value.valueEnd) {
    const c = body[i];
    if (c === 0x22) {
      i = endOfString(body, i);
    } else if (isSpace(c)) {
      add(body.subarray(from, i));
      while (i < value.valueEnd && isSpace(body[i])) i++;
      from = i;
    } else {
      i++;
    }
  }
  add(body.subarray(from, value.valueEnd));
  add(end);
  flush();
}
