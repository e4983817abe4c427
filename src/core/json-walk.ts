// Walks JSON that `scanObject` has found valid. Strings are searched for their end instead of being checked byte by
// byte, which is several times faster on long texts; on anything else the offsets mean nothing, but every walk ends.

const QUOTE = 0x22;
const COMMA = 0x2c;
const OPEN_BRACKET = 0x5b;
const BACKSLASH = 0x5c;
const CLOSE_BRACKET = 0x5d;
const OPEN_BRACE = 0x7b;
const CLOSE_BRACE = 0x7d;

/** Bytes of one JSON value; the end is exclusive. */
export interface ValueRange {
  readonly valueStart: number;
  readonly valueEnd: number;
}

/** Whether a byte is one of JSON's four white space characters. */
export function isSpace(byte: number | undefined): boolean {
  return byte === 0x20 || byte === 0x0a || byte === 0x0d || byte === 0x09;
}

/** The offset behind the string whose opening quote is at `from`. */
export function endOfString(bytes: Uint8Array, from: number): number {
  for (let i = from + 1; ; ) {
    const quote = bytes.indexOf(QUOTE, i);
    if (quote < 0) return bytes.length;
    let slashes = 0;
    while (bytes[quote - 1 - slashes] === BACKSLASH) slashes++;
    if (slashes % 2 === 0) return quote + 1;
    i = quote + 1;
  }
}

function endOfValue(bytes: Uint8Array, from: number): number {
  let depth = 0;
  let i = from;
  while (i < bytes.length) {
    const c = bytes[i];
    if (c === QUOTE) {
      i = endOfString(bytes, i);
      if (depth === 0) return i;
      continue;
    }
    if (c === OPEN_BRACE || c === OPEN_BRACKET) depth++;
    else if (c === CLOSE_BRACE || c === CLOSE_BRACKET) {
      if (depth === 0) return i;
      depth--;
      if (depth === 0) return i + 1;
    } else if (depth === 0 && (c === COMMA || isSpace(c))) return i;
    i++;
  }
  return i;
}

function skipTo(bytes: Uint8Array, from: number): number {
  let i = from;
  // Valid JSON has at most one comma or colon between two values.
  while (isSpace(bytes[i]) || bytes[i] === COMMA || bytes[i] === 0x3a) i++;
  return i;
}

/** The elements of a valid array; empty where the value is no array. */
export function elementsOf(bytes: Uint8Array, array: ValueRange): readonly ValueRange[] {
  const elements: ValueRange[] = [];
  if (bytes[array.valueStart] !== OPEN_BRACKET) return elements;
  const end = array.valueEnd - 1;
  for (let i = skipTo(bytes, array.valueStart + 1); i < end; ) {
    const valueEnd = endOfValue(bytes, i);
    elements.push({ valueStart: i, valueEnd });
    i = skipTo(bytes, valueEnd);
  }
  return elements;
}

/**
 * The value of a valid object's own member; `isKey` gets the key's bytes with its quotes. Of duplicates the last, as
 * Python's json reads them; undefined where there is none, or where the value is no object.
 */
export function memberOf(
  bytes: Uint8Array,
  object: ValueRange,
  isKey: (key: ValueRange) => boolean,
): ValueRange | undefined {
  if (bytes[object.valueStart] !== OPEN_BRACE) return undefined;
  const end = object.valueEnd - 1;
  let found: ValueRange | undefined;
  for (let i = skipTo(bytes, object.valueStart + 1); i < end; ) {
    const key = { valueStart: i, valueEnd: endOfString(bytes, i) };
    const valueStart = skipTo(bytes, key.valueEnd);
    const valueEnd = endOfValue(bytes, valueStart);
    if (isKey(key)) found = { valueStart, valueEnd };
    i = skipTo(bytes, valueEnd);
  }
  return found;
}
