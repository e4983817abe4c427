import { concatBytes } from './json-scan.ts';

const LF = 0x0a;
const CR = 0x0d;
const EMPTY = new Uint8Array(0);

/**
 * Cuts a byte stream into server-sent events (WHATWG HTML, "event streams") without changing a byte: the events and the
 * rest, joined, are the input.
 *
 * An event is handed out as soon as its blank line is there. A lone blank line is an event of its own, and so is an LF
 * that arrives in a later chunk than the CR which had already ended the event before it.
 */
export class SseSplitter {
  readonly #pending: Uint8Array[] = [];
  #pendingBytes = 0;
  #atLineStart = true;
  #afterCr = false;

  /** Takes the next bytes and returns the events they complete; an event that lies in one chunk is a view of it. */
  push(chunk: Uint8Array): readonly Uint8Array[] {
    const events: Uint8Array[] = [];
    const size = chunk.length;
    if (size === 0) return events;
    let from = 0;
    let at = 0;
    if (this.#afterCr && chunk[0] === LF) {
      at = 1;
      if (this.#pendingBytes === 0) {
        events.push(chunk.subarray(0, 1));
        from = 1;
      }
    }
    this.#afterCr = false;
    // Both searches only move forward, so a chunk is read at most twice however many lines it has.
    let nextCr = indexOrSize(chunk, CR, at);
    let nextLf = indexOrSize(chunk, LF, at);
    while (at < size) {
      const lineEnd = nextCr < nextLf ? nextCr : nextLf;
      if (lineEnd === size) {
        this.#atLineStart = false;
        break;
      }
      const blank = this.#atLineStart && lineEnd === at;
      at = lineEnd + 1;
      if (lineEnd === nextCr) {
        if (chunk[at] === LF) at++;
        this.#afterCr = at === size && chunk[at - 1] === CR;
      }
      this.#atLineStart = true;
      if (nextCr < at) nextCr = indexOrSize(chunk, CR, at);
      if (nextLf < at) nextLf = indexOrSize(chunk, LF, at);
      if (blank) {
        events.push(this.#take(chunk.subarray(from, at)));
        from = at;
      }
    }
    if (from < size) {
      this.#pending.push(from === 0 ? chunk : chunk.subarray(from));
      this.#pendingBytes += size - from;
    }
    return events;
  }

  /** The bytes behind the last complete event; they stay pending. */
  rest(): Uint8Array {
    return this.#pending.length === 1 ? (this.#pending[0] ?? EMPTY) : concatBytes(this.#pending);
  }

  /** Number of bytes behind the last complete event. */
  get pendingBytes(): number {
    return this.#pendingBytes;
  }

  #take(tail: Uint8Array): Uint8Array {
    if (this.#pendingBytes === 0) return tail;
    this.#pending.push(tail);
    const event = concatBytes(this.#pending);
    this.#pending.length = 0;
    this.#pendingBytes = 0;
    return event;
  }
}

function indexOrSize(bytes: Uint8Array, value: number, from: number): number {
  const index = bytes.indexOf(value, from);
  return index < 0 ? bytes.length : index;
}

/** The payload of one `data` line, as offsets in the event. */
export interface DataLine {
  readonly start: number;
  readonly end: number;
}

/** The payloads of an event's `data` lines in order; a byte order mark before the first line is passed over. */
export function dataLines(event: Uint8Array): readonly DataLine[] {
  const lines: DataLine[] = [];
  const size = event.length;
  let at = event[0] === 0xef && event[1] === 0xbb && event[2] === 0xbf ? 3 : 0;
  let nextCr = indexOrSize(event, CR, at);
  while (at < size) {
    if (nextCr < at) nextCr = indexOrSize(event, CR, at);
    const nextLf = event.indexOf(LF, at);
    const end = nextLf >= 0 && nextLf < nextCr ? nextLf : nextCr;
    // "data" alone is the field with an empty value; anything but a colon behind it is another field.
    if (
      event[at] === 0x64 &&
      event[at + 1] === 0x61 &&
      event[at + 2] === 0x74 &&
      event[at + 3] === 0x61 &&
      (at + 4 === end || event[at + 4] === 0x3a)
    ) {
      let start = at + 4 === end ? end : at + 5;
      if (event[start] === 0x20) start++;
      lines.push({ start, end });
    }
    at = end + 1;
  }
  return lines;
}

/**
 * The payload of an event: `start` and `end` are its offsets in the event where it is one line (else -1), several lines
 * are joined by LF; undefined where the event has no `data` line.
 */
export function eventData(
  event: Uint8Array,
): { readonly text: Uint8Array; readonly start: number; readonly end: number; readonly lines: number } | undefined {
  const lines = dataLines(event);
  const first = lines[0];
  if (first === undefined) return undefined;
  if (lines.length === 1) {
    return { text: event.subarray(first.start, first.end), start: first.start, end: first.end, lines: 1 };
  }
  return { text: joinLines(event, lines), start: -1, end: -1, lines: lines.length };
}

/** The payloads of several `data` lines joined by LF. */
export function joinLines(event: Uint8Array, lines: readonly DataLine[]): Uint8Array {
  let length = lines.length - 1;
  for (const line of lines) length += line.end - line.start;
  const text = new Uint8Array(Math.max(length, 0)).fill(LF);
  let at = 0;
  for (const line of lines) {
    text.set(event.subarray(line.start, line.end), at);
    at += line.end - line.start + 1;
  }
  return text;
}
