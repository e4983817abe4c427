const QUOTE = 0x22;
const COMMA = 0x2c;
const MINUS = 0x2d;
const COLON = 0x3a;
const OPEN_BRACKET = 0x5b;
const BACKSLASH = 0x5c;
const CLOSE_BRACKET = 0x5d;
const OPEN_BRACE = 0x7b;
const CLOSE_BRACE = 0x7d;

/** The seven kinds of JSON value; `true` and `false` are told apart so that flags can be read without a decode. */
export type JsonType = 'object' | 'array' | 'string' | 'number' | 'true' | 'false' | 'null';

/** One member of a scanned object; offsets are absolute in the scanned bytes, ends are exclusive. */
export interface Member {
  /** The key with its escapes decoded. */
  readonly key: string;
  /** Offset of the key's opening quote. */
  readonly keyStart: number;
  /** Offset behind the key's closing quote. */
  readonly keyEnd: number;
  readonly valueStart: number;
  readonly valueEnd: number;
  readonly type: JsonType;
}

/** One element of a scanned array; offsets are absolute in the scanned bytes, the end is exclusive. */
export interface Element {
  readonly valueStart: number;
  readonly valueEnd: number;
  readonly type: JsonType;
}

/** A valid object: `start` is the offset of `{`, `end` the one behind `}`, members in the order written. */
export interface ScannedObject {
  readonly kind: 'object';
  readonly start: number;
  readonly end: number;
  readonly members: readonly Member[];
}

/**
 * What `scanObject` found: an object, another valid JSON value, the offset of the first byte that is no JSON, or the first
 * member that is over a limit, behind which nothing was read.
 */
export type ObjectScan =
  | ScannedObject
  | { readonly kind: 'not-object'; readonly type: JsonType }
  | { readonly kind: 'invalid'; readonly offset: number; readonly message: string }
  | { readonly kind: 'over-limit'; readonly key: string; readonly message: string };

/** What a scanned object may have itself; objects within it are not counted. */
interface ScanLimits {
  /** Most members, duplicates included. */
  readonly members: number;
  /** Longest key as it is written, in bytes. */
  readonly nameBytes: number;
}

const UNLIMITED: ScanLimits = { members: Infinity, nameBytes: Infinity };

/** Bytes of a key that are told. */
const TOLD_BYTES = 64;

/** Changes to an object's members; values are complete JSON texts, a key in both `set` and `drop` is set. */
export interface Edits {
  readonly set: ReadonlyMap<string, string | Uint8Array>;
  readonly drop: ReadonlySet<string>;
}

// ignoreBOM keeps U+FEFF as the character it is inside a JSON text.
const decoder = new TextDecoder('utf-8', { ignoreBOM: true });
const encoder = new TextEncoder();

// 1 for the bytes that end the plain run of a string: quote, backslash, control characters.
const STRING_STOP = new Uint8Array(256).fill(1, 0, 0x20);
STRING_STOP[QUOTE] = 1;
STRING_STOP[BACKSLASH] = 1;

const SIMPLE_ESCAPES = new Uint8Array(256);
for (const c of encoder.encode('"\\/bfnrt')) SIMPLE_ESCAPES[c] = 1;

const HEX = new Uint8Array(256);
for (const c of encoder.encode('0123456789abcdefABCDEF')) HEX[c] = 1;

const LITERALS: ReadonlyMap<number, Uint8Array> = new Map(
  ['true', 'false', 'null'].map((word) => [word.charCodeAt(0), encoder.encode(word)]),
);

// Every skip function returns the offset behind what it read, or ~offset (negative) of the first byte that does not fit.

function skipSpace(bytes: Uint8Array, from: number, end: number): number {
  let i = from;
  while (i < end) {
    const c = bytes[i];
    if (c !== 0x20 && c !== 0x0a && c !== 0x0d && c !== 0x09) break;
    i++;
  }
  return i;
}

/** `from` is the offset behind the opening quote. */
function skipString(bytes: Uint8Array, from: number, end: number): number {
  let i = from;
  for (;;) {
    while (i < end && STRING_STOP[bytes[i] ?? 0] === 0) i++;
    if (i >= end) return ~end;
    const c = bytes[i];
    if (c === QUOTE) return i + 1;
    if (c !== BACKSLASH) return ~i;
    i++;
    if (i >= end) return ~end;
    const letter = bytes[i] ?? 0;
    if (SIMPLE_ESCAPES[letter] === 1) {
      i++;
    } else if (letter === 0x75) {
      for (let k = 1; k <= 4; k++) {
        if (i + k >= end) return ~end;
        if (HEX[bytes[i + k] ?? 0] === 0) return ~(i + k);
      }
      i += 5;
    } else {
      return ~i;
    }
  }
}

function skipDigits(bytes: Uint8Array, from: number, end: number): number {
  let i = from;
  while (i < end) {
    const c = bytes[i] ?? 0;
    if (c < 0x30 || c > 0x39) break;
    i++;
  }
  return i === from ? ~i : i;
}

function skipNumber(bytes: Uint8Array, from: number, end: number): number {
  let i = bytes[from] === MINUS ? from + 1 : from;
  if (i < end && bytes[i] === 0x30) i++;
  else i = skipDigits(bytes, i, end);
  if (i >= 0 && i < end && bytes[i] === 0x2e) i = skipDigits(bytes, i + 1, end);
  if (i >= 0 && i < end && (bytes[i] === 0x65 || bytes[i] === 0x45)) {
    i++;
    if (i < end && (bytes[i] === 0x2b || bytes[i] === MINUS)) i++;
    i = skipDigits(bytes, i, end);
  }
  return i;
}

/** A number, `true`, `false` or `null`. */
function skipScalar(bytes: Uint8Array, from: number, end: number): number {
  if (from >= end) return ~end;
  const c = bytes[from] ?? 0;
  if (c === MINUS || (c >= 0x30 && c <= 0x39)) return skipNumber(bytes, from, end);
  const word = LITERALS.get(c);
  if (word === undefined) return ~from;
  for (let k = 1; k < word.length; k++) {
    if (from + k >= end) return ~end;
    if (bytes[from + k] !== word[k]) return ~(from + k);
  }
  return from + word.length;
}

/** From a key's opening quote to its value: returns the value's offset. */
function skipKey(bytes: Uint8Array, from: number, end: number): number {
  if (from >= end) return ~end;
  if (bytes[from] !== QUOTE) return ~from;
  const keyEnd = skipString(bytes, from + 1, end);
  return keyEnd < 0 ? keyEnd : skipColon(bytes, keyEnd, end);
}

function skipColon(bytes: Uint8Array, from: number, end: number): number {
  const i = skipSpace(bytes, from, end);
  if (i >= end) return ~end;
  return bytes[i] === COLON ? skipSpace(bytes, i + 1, end) : ~i;
}

/** Levels whose bits are in one number. */
const SHALLOW = 30;

/** Iterative, with one bit a level, so that no depth of nesting ends the process. */
function skipValue(bytes: Uint8Array, from: number, end: number): number {
  let i = from;
  let depth = 0;
  let inObject = false;
  let outer = 0;
  // Most values have no more levels than one number has bits.
  let deeper: boolean[] | undefined;
  for (;;) {
    const c = i < end ? bytes[i] : -1;
    if (c === QUOTE) {
      i = skipString(bytes, i + 1, end);
      if (i < 0) return i;
    } else if (c === OPEN_BRACE || c === OPEN_BRACKET) {
      const closer = c === OPEN_BRACE ? CLOSE_BRACE : CLOSE_BRACKET;
      i = skipSpace(bytes, i + 1, end);
      if (i < end && bytes[i] === closer) {
        i++;
      } else {
        if (depth < SHALLOW) {
          outer = inObject ? outer | (1 << depth) : outer & ~(1 << depth);
        } else {
          deeper ??= [];
          deeper[depth - SHALLOW] = inObject;
        }
        depth++;
        inObject = c === OPEN_BRACE;
        if (inObject) {
          i = skipKey(bytes, i, end);
          if (i < 0) return i;
        }
        continue;
      }
    } else {
      i = skipScalar(bytes, i, end);
      if (i < 0) return i;
    }
    // Behind a value: close as many containers as end here, or go to the next value.
    for (;;) {
      if (depth === 0) return i;
      i = skipSpace(bytes, i, end);
      if (i >= end) return ~end;
      const d = bytes[i];
      if (d === COMMA) {
        i = skipSpace(bytes, i + 1, end);
        if (inObject) {
          i = skipKey(bytes, i, end);
          if (i < 0) return i;
        }
        break;
      }
      if (d !== (inObject ? CLOSE_BRACE : CLOSE_BRACKET)) return ~i;
      i++;
      depth--;
      inObject = depth < SHALLOW ? (outer & (1 << depth)) !== 0 : deeper?.[depth - SHALLOW] === true;
    }
  }
}

function typeAt(bytes: Uint8Array, at: number): JsonType {
  switch (bytes[at]) {
    case OPEN_BRACE:
      return 'object';
    case OPEN_BRACKET:
      return 'array';
    case QUOTE:
      return 'string';
    case 0x74:
      return 'true';
    case 0x66:
      return 'false';
    case 0x6e:
      return 'null';
    default:
      return 'number';
  }
}

function invalidAt(bytes: Uint8Array, offset: number, end: number): ObjectScan {
  const c = bytes[offset] ?? 0;
  let message = 'unexpected end of input';
  if (offset < end) {
    const printable = c > 0x20 && c < 0x7f;
    message = `unexpected ${printable ? `character '${String.fromCharCode(c)}'` : `byte 0x${c.toString(16).padStart(2, '0')}`}`;
  }
  return { kind: 'invalid', offset, message: `${message} at offset ${offset}` };
}

function overLimit(count: number, nameBytes: number, limits: ScanLimits): string | undefined {
  if (count > limits.members) return `more than ${limits.members} members`;
  return nameBytes > limits.nameBytes ? `a member whose name is longer than ${limits.nameBytes} bytes` : undefined;
}

/** The beginning of a key as it is written. */
function toldKey(bytes: Uint8Array, keyStart: number, keyEnd: number): string {
  return decoder.decode(bytes.subarray(keyStart + 1, Math.min(keyEnd - 1, keyStart + 1 + TOLD_BYTES)));
}

/**
 * Validates the range [start, end) as exactly one RFC 8259 value with optional white space around it and lists the
 * members of an object; defaults to all bytes and no limits, an empty or blank range is invalid with the message "empty".
 */
export function scanObject(bytes: Uint8Array, start = 0, end = bytes.length, limits = UNLIMITED): ObjectScan {
  const limit = Math.min(end, bytes.length);
  const open = skipSpace(bytes, start, limit);
  if (open >= limit) return { kind: 'invalid', offset: limit, message: 'empty' };
  if (bytes[open] !== OPEN_BRACE) {
    let i = skipValue(bytes, open, limit);
    if (i < 0) return invalidAt(bytes, ~i, limit);
    i = skipSpace(bytes, i, limit);
    return i < limit ? invalidAt(bytes, i, limit) : { kind: 'not-object', type: typeAt(bytes, open) };
  }
  const members: Member[] = [];
  let i = skipSpace(bytes, open + 1, limit);
  if (i < limit && bytes[i] === CLOSE_BRACE) {
    i++;
  } else {
    for (;;) {
      const keyStart = i;
      if (i >= limit || bytes[i] !== QUOTE) return invalidAt(bytes, i, limit);
      const keyEnd = skipString(bytes, i + 1, limit);
      if (keyEnd < 0) return invalidAt(bytes, ~keyEnd, limit);
      const fault = overLimit(members.length + 1, keyEnd - keyStart - 2, limits);
      if (fault !== undefined) return { kind: 'over-limit', key: toldKey(bytes, keyStart, keyEnd), message: fault };
      const valueStart = skipColon(bytes, keyEnd, limit);
      if (valueStart < 0) return invalidAt(bytes, ~valueStart, limit);
      const valueEnd = skipValue(bytes, valueStart, limit);
      if (valueEnd < 0) return invalidAt(bytes, ~valueEnd, limit);
      const key = keyText(bytes, keyStart, keyEnd);
      members.push({ key, keyStart, keyEnd, valueStart, valueEnd, type: typeAt(bytes, valueStart) });
      i = skipSpace(bytes, valueEnd, limit);
      if (i < limit && bytes[i] === COMMA) {
        i = skipSpace(bytes, i + 1, limit);
        continue;
      }
      if (i >= limit || bytes[i] !== CLOSE_BRACE) return invalidAt(bytes, i, limit);
      i++;
      break;
    }
  }
  const tail = skipSpace(bytes, i, limit);
  return tail < limit ? invalidAt(bytes, tail, limit) : { kind: 'object', start: open, end: i, members };
}

/** Lists the elements of the one array in [start, end); undefined where the range is not exactly one valid array. */
export function scanArray(bytes: Uint8Array, start: number, end: number): readonly Element[] | undefined {
  const limit = Math.min(end, bytes.length);
  let i = skipSpace(bytes, start, limit);
  if (i >= limit || bytes[i] !== OPEN_BRACKET) return undefined;
  const elements: Element[] = [];
  i = skipSpace(bytes, i + 1, limit);
  if (i < limit && bytes[i] === CLOSE_BRACKET) return skipSpace(bytes, i + 1, limit) === limit ? elements : undefined;
  for (;;) {
    const valueEnd = skipValue(bytes, i, limit);
    if (valueEnd < 0) return undefined;
    elements.push({ valueStart: i, valueEnd, type: typeAt(bytes, i) });
    i = skipSpace(bytes, valueEnd, limit);
    if (i < limit && bytes[i] === COMMA) {
      i = skipSpace(bytes, i + 1, limit);
      continue;
    }
    if (i >= limit || bytes[i] !== CLOSE_BRACKET) return undefined;
    return skipSpace(bytes, i + 1, limit) === limit ? elements : undefined;
  }
}

/**
 * The numbers of an array that is known to be valid JSON: whole, not negative, below 2^53, in plain digits; undefined where
 * one is not. The ids of a long prompt are some 100 kB of them, so that the list is made as long as it gets at once.
 */
export function readWholeNumbers(bytes: Uint8Array, list: Element): number[] | undefined {
  const { valueStart: start, valueEnd: end } = list;
  let commas = 0;
  for (let i = start + 1; i < end; i++) if (bytes[i] === COMMA) commas++;
  const numbers = new Array<number>(commas + 1);
  let count = 0;
  let n = -1;
  for (let i = start + 1; i < end; i++) {
    const c = bytes[i] ?? 0;
    if (c >= 0x30 && c <= 0x39) {
      n = (n < 0 ? 0 : n * 10) + (c - 0x30);
    } else if (c === COMMA || c === CLOSE_BRACKET) {
      if (n > Number.MAX_SAFE_INTEGER) return undefined;
      if (n >= 0) numbers[count++] = n;
      n = -1;
    } else if (c !== 0x20 && c !== 0x0a && c !== 0x0d && c !== 0x09) {
      return undefined;
    }
  }
  numbers.length = count;
  return numbers;
}

/** The member of that (decoded) key; of duplicates the last, as Python's json and JSON.parse read them. */
export function findMember(scan: { readonly members: readonly Member[] }, key: string): Member | undefined {
  return scan.members.findLast((member) => member.key === key);
}

/** Keys that were met last, by a hash of their bytes: most objects have the keys of the one before. */
const KEYS: string[] = Array.from({ length: 512 }, () => '');
const MAX_KEPT_KEY = 48;

/** The key between the quotes at `keyStart` and before `keyEnd`, without making a text again that was made before. */
function keyText(bytes: Uint8Array, keyStart: number, keyEnd: number): string {
  const from = keyStart + 1;
  const length = keyEnd - 1 - from;
  if (length > MAX_KEPT_KEY) return decodeString(bytes, { valueStart: keyStart, valueEnd: keyEnd });
  let hash = length;
  for (let i = from; i < keyEnd - 1; i++) {
    const c = bytes[i] ?? 0;
    if (c === BACKSLASH || c >= 0x80) return decodeString(bytes, { valueStart: keyStart, valueEnd: keyEnd });
    hash = Math.imul(hash ^ c, 0x01000193);
  }
  const slot = (hash ^ (hash >>> 15)) & (KEYS.length - 1);
  const known = KEYS[slot] ?? '';
  let same = known.length === length ? 0 : -1;
  while (same >= 0 && same < length && known.charCodeAt(same) === bytes[from + same]) same++;
  if (same === length) return known;
  const text = decodeString(bytes, { valueStart: keyStart, valueEnd: keyEnd });
  KEYS[slot] = text;
  return text;
}

/** Decodes the JSON string at [valueStart, valueEnd), quotes included; lone surrogates written as escapes are kept. */
export function decodeString(bytes: Uint8Array, m: { readonly valueStart: number; readonly valueEnd: number }): string {
  const from = m.valueStart + 1;
  const to = m.valueEnd - 1;
  // Short plain ASCII (every usual key) needs neither the decoder nor the parser.
  if (to - from <= 48) {
    let text = '';
    let i = from;
    for (; i < to; i++) {
      const c = bytes[i] ?? 0;
      if (c === BACKSLASH || c >= 0x80) break;
      text += String.fromCharCode(c);
    }
    if (i === to) return text;
  }
  const inner = bytes.subarray(from, to);
  if (!inner.includes(BACKSLASH)) return decoder.decode(inner);
  const value: unknown = JSON.parse(decoder.decode(bytes.subarray(m.valueStart, m.valueEnd)));
  return typeof value === 'string' ? value : '';
}

/** Concatenates byte pieces into one new array. */
export function concatBytes(parts: readonly Uint8Array[]): Uint8Array {
  let length = 0;
  for (const part of parts) length += part.length;
  const out = new Uint8Array(length);
  let at = 0;
  for (const part of parts) {
    out.set(part, at);
    at += part.length;
  }
  return out;
}

/**
 * The bytes with members of the scanned object replaced, appended or dropped; every other byte is kept as written, and
 * the same reference comes back where no edit applies.
 *
 * A set key's last duplicate gets the value in place and its earlier duplicates go; a missing one is appended behind the
 * last member. A dropped member goes with all its duplicates and one comma each.
 */
export function spliceObject(bytes: Uint8Array, scan: ScannedObject, edits: Edits): Uint8Array {
  const { members } = scan;
  const { set, drop } = edits;
  if (set.size === 0 && !members.some(({ key }) => drop.has(key))) return bytes;
  const isLast = lastOfKey(members);
  const parts = new Parts(bytes, members[0]?.keyStart ?? scan.start + 1);
  let previousEnd = scan.start + 1;
  let kept = 0;
  for (let index = 0; index < members.length; index++) {
    const member = members[index];
    if (member === undefined) break;
    const value = set.get(member.key);
    if (value === undefined ? !drop.has(member.key) : isLast(index)) {
      // The gap before a member holds its comma; the first kept one stands where the first member stood, without.
      if (kept > 0) parts.keep(previousEnd, member.keyStart);
      parts.keep(member.keyStart, value === undefined ? member.valueEnd : member.valueStart);
      if (value !== undefined) parts.add(value);
      kept++;
    }
    previousEnd = member.valueEnd;
  }
  for (const [key, value] of set) {
    if (members.some((member) => member.key === key)) continue;
    if (kept > 0) parts.add(',');
    parts.add(`${JSON.stringify(key)}:`);
    parts.add(value);
    kept++;
  }
  parts.keep(previousEnd, bytes.length);
  return parts.join();
}

/** Whether the member at an index is the last one of its key. */
export function lastOfKey(members: readonly Member[]): (index: number) => boolean {
  if (members.length <= MAX_COMPARED) {
    return (index) => {
      const key = members[index]?.key;
      for (let later = index + 1; later < members.length; later++) if (members[later]?.key === key) return false;
      return true;
    };
  }
  const last = new Map(members.map((member, index) => [member.key, index]));
  return (index) => last.get(members[index]?.key ?? '') === index;
}

/** Members up to which comparing each with each is cheaper than a map. */
const MAX_COMPARED = 32;

/** Pieces of one array, and others between them; pieces that follow each other are copied as one. */
class Parts {
  readonly #bytes: Uint8Array;
  readonly #parts: Uint8Array[] = [];
  #from = 0;
  #to: number;

  constructor(bytes: Uint8Array, to: number) {
    this.#bytes = bytes;
    this.#to = to;
  }

  keep(from: number, to: number): void {
    if (from !== this.#to) {
      this.#flush();
      this.#from = from;
    }
    this.#to = to;
  }

  add(value: string | Uint8Array): void {
    this.#flush();
    this.#from = this.#to;
    this.#parts.push(typeof value === 'string' ? bytesOf(value) : value);
  }

  join(): Uint8Array {
    this.#flush();
    return concatBytes(this.#parts);
  }

  #flush(): void {
    if (this.#to > this.#from) this.#parts.push(this.#bytes.subarray(this.#from, this.#to));
  }
}

/** Short texts that were wanted: connectors set the same few. */
const SHORT = new Map<string, Uint8Array>();
const MAX_SHORT = 256;
const MAX_SHORT_LENGTH = 32;

function bytesOf(text: string): Uint8Array {
  const known = SHORT.get(text);
  if (known !== undefined) return known;
  const bytes = encoder.encode(text);
  if (text.length <= MAX_SHORT_LENGTH && SHORT.size < MAX_SHORT) SHORT.set(text, bytes);
  return bytes;
}
