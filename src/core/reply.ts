import {
  concatBytes,
  decodeString,
  type Element,
  findMember,
  type Member,
  readWholeNumbers,
  type ScannedObject,
  scanArray,
  scanObject,
} from './json-scan.ts';
import { type DataLine, dataLines, eventData } from './sse.ts';

/** The members that a reply must show as null: of the reply object itself, and of each element of its `choices`. */
export interface MuteSpec {
  readonly top: readonly string[];
  readonly choice: readonly string[];
}

/** An engine's error object; `message` is '' where the engine gave none. */
export interface ReplyError {
  readonly message: string;
  readonly type: string | null;
  readonly param: string | null;
  readonly code: number | string | null;
}

/** Token counts as the engine reports them; counts it leaves out are 0. */
export interface ReplyUsage {
  readonly promptTokens: number;
  readonly completionTokens: number;
  readonly cachedTokens: number;
}

/** What a reply, or one event of a streamed reply, says beyond its bytes. */
export interface EventFacts {
  /** The event is the end marker `[DONE]`. */
  readonly done: boolean;
  readonly error?: ReplyError;
  /** Generated output, a finish reason, or a payload that is not understood: to be shown, no longer to be held. */
  readonly hasContent: boolean;
  /** Indexes of the choices that occur. */
  readonly seen: readonly number[];
  /** Indexes of the choices that carry a finish reason. */
  readonly finished: readonly number[];
  /** The raw JSON of a top-level `kv_transfer_params` that is not null. */
  readonly kvTransferParams?: Uint8Array;
  /** Of the reply (chat) or of choice 0 (completions); absent where null or not a list of non-negative integers. */
  readonly promptTokenIds?: readonly number[];
  /** Of choice 0; absent where null or not a list of non-negative integers. */
  readonly tokenIds?: readonly number[];
  readonly usage?: ReplyUsage;
}

type Writable<T> = { -readonly [K in keyof T]: T[K] };

const decoder = new TextDecoder('utf-8', { ignoreBOM: true });
const encoder = new TextEncoder();
const NULL = encoder.encode('null');
/** As it is written. */
const ERROR_WORD = '"error"';
const DONE = encoder.encode('[DONE]');

const NOTHING: EventFacts = { done: false, hasContent: false, seen: [], finished: [] };
const UNKNOWN: EventFacts = { done: false, hasContent: true, seen: [], finished: [] };

/**
 * Reads one event as `SseSplitter` gives it; never throws.
 *
 * A payload that is no JSON object or none of the known shapes counts as content, because what is not understood has to
 * reach the client; role-only, usage-only and empty chunks, comments and errors have no content.
 */
export function readEvent(event: Uint8Array): EventFacts {
  const data = eventData(event);
  if (data === undefined) return NOTHING;
  if (isDone(data.text)) return { ...NOTHING, done: true };
  const scan = scanObject(data.text);
  return scan.kind === 'object' ? readObject(data.text, scan) : UNKNOWN;
}

/** Reads a whole JSON reply body; anything but one JSON object is invalid. */
export function readReply(
  body: Uint8Array,
): { readonly kind: 'invalid' } | ({ readonly kind: 'ok' } & Omit<EventFacts, 'done'>) {
  const scan = scanObject(body);
  if (scan.kind !== 'object') return { kind: 'invalid' };
  const { done: _done, ...facts } = readObject(body, scan);
  return { kind: 'ok', ...facts };
}

function isDone(text: Uint8Array): boolean {
  let end = text.length;
  while (end > 0 && text[end - 1] === 0x20) end--;
  return end === DONE.length && DONE.every((c, i) => text[i] === c);
}

function readObject(bytes: Uint8Array, scan: ScannedObject): EventFacts {
  const facts: Writable<EventFacts> = { done: false, hasContent: false, seen: [], finished: [] };
  const error = readError(bytes, scan);
  if (error !== undefined) facts.error = error;
  const usage = readUsage(bytes, findMember(scan, 'usage'));
  if (usage !== undefined) facts.usage = usage;
  const params = findMember(scan, 'kv_transfer_params');
  if (params !== undefined && params.type !== 'null') {
    facts.kvTransferParams = bytes.subarray(params.valueStart, params.valueEnd);
  }
  const promptTokenIds = readInts(bytes, findMember(scan, 'prompt_token_ids'));
  if (promptTokenIds !== undefined) facts.promptTokenIds = promptTokenIds;
  const choices = findMember(scan, 'choices');
  if (choices === undefined) facts.hasContent = error === undefined && usage === undefined;
  else readChoices(bytes, choices, facts);
  return facts;
}

function readChoices(bytes: Uint8Array, choices: Member, facts: Writable<EventFacts>): void {
  const elements = scanArray(bytes, choices.valueStart, choices.valueEnd);
  if (elements === undefined) {
    if (choices.type !== 'null') facts.hasContent = true;
    return;
  }
  const seen: number[] = [];
  const finished: number[] = [];
  elements.forEach((element, position) => {
    const choice = scanObject(bytes, element.valueStart, element.valueEnd);
    if (choice.kind !== 'object') {
      facts.hasContent = true;
      return;
    }
    const index = readInt(bytes, findMember(choice, 'index')) ?? position;
    seen.push(index);
    const reason = findMember(choice, 'finish_reason');
    if (reason !== undefined && reason.type !== 'null') finished.push(index);
    if (choiceHasContent(bytes, choice)) facts.hasContent = true;
    if (index !== 0) return;
    const promptTokenIds = readInts(bytes, findMember(choice, 'prompt_token_ids'));
    if (promptTokenIds !== undefined) facts.promptTokenIds = promptTokenIds;
    const tokenIds = readInts(bytes, findMember(choice, 'token_ids'));
    if (tokenIds !== undefined) facts.tokenIds = tokenIds;
  });
  facts.seen = seen;
  facts.finished = finished;
}

function choiceHasContent(bytes: Uint8Array, choice: ScannedObject): boolean {
  for (const member of choice.members) {
    switch (member.key) {
      case 'text':
      case 'finish_reason':
      // Token ids mean that the engine has decoded, even where they make no whole character yet.
      case 'token_ids':
        if (!isEmpty(bytes, member)) return true;
        break;
      case 'delta':
      case 'message':
        if (messageHasContent(bytes, member)) return true;
        break;
      case 'logprobs':
        if (logprobsHaveTokens(bytes, member)) return true;
        break;
    }
  }
  return false;
}

function messageHasContent(bytes: Uint8Array, message: Member): boolean {
  if (message.type !== 'object') return !isEmpty(bytes, message);
  const scan = scanObject(bytes, message.valueStart, message.valueEnd);
  // Any filled member but the role, so that a field of a later engine is shown and not held.
  return scan.kind !== 'object' || scan.members.some((m) => m.key !== 'role' && !isEmpty(bytes, m));
}

function logprobsHaveTokens(bytes: Uint8Array, logprobs: Member): boolean {
  if (logprobs.type !== 'object') return !isEmpty(bytes, logprobs);
  const scan = scanObject(bytes, logprobs.valueStart, logprobs.valueEnd);
  return scan.kind !== 'object' || scan.members.some((m) => !isEmpty(bytes, m));
}

/** null, false, "", and arrays and objects without an element. */
function isEmpty(bytes: Uint8Array, value: Element): boolean {
  switch (value.type) {
    case 'null':
    case 'false':
      return true;
    case 'string':
      return value.valueEnd - value.valueStart === 2;
    case 'array':
    case 'object': {
      for (let i = value.valueStart + 1; i < value.valueEnd - 1; i++) {
        const c = bytes[i];
        if (c !== 0x20 && c !== 0x0a && c !== 0x0d && c !== 0x09) return false;
      }
      return true;
    }
    default:
      return false;
  }
}

function readError(bytes: Uint8Array, scan: ScannedObject): ReplyError | undefined {
  const error = findMember(scan, 'error');
  if (error !== undefined && error.type !== 'null') {
    if (error.type === 'object') {
      const inner = scanObject(bytes, error.valueStart, error.valueEnd);
      if (inner.kind === 'object') return readErrorMembers(bytes, inner);
    }
    return { message: textOf(bytes, error), type: null, param: null, code: null };
  }
  const object = findMember(scan, 'object');
  if (object?.type === 'string' && isErrorWord(bytes, object)) return readErrorMembers(bytes, scan);
  return undefined;
}

/** Whether a string is `error`; each event has one that is another word, which is as long as no escapes make it longer. */
function isErrorWord(bytes: Uint8Array, value: Element): boolean {
  const length = value.valueEnd - value.valueStart;
  if (length < ERROR_WORD.length || (length > ERROR_WORD.length && bytes.indexOf(0x5c, value.valueStart) < 0))
    return false;
  return decodeString(bytes, value) === 'error';
}

function readErrorMembers(bytes: Uint8Array, scan: ScannedObject): ReplyError {
  const message = findMember(scan, 'message');
  const code = findMember(scan, 'code');
  return {
    message: message === undefined || message.type === 'null' ? '' : textOf(bytes, message),
    type: stringOrNull(bytes, findMember(scan, 'type')),
    param: stringOrNull(bytes, findMember(scan, 'param')),
    code: code?.type === 'number' ? Number(rawText(bytes, code)) : stringOrNull(bytes, code),
  };
}

function stringOrNull(bytes: Uint8Array, member: Member | undefined): string | null {
  return member?.type === 'string' ? decodeString(bytes, member) : null;
}

/** A string decoded, any other value as its JSON text. */
function textOf(bytes: Uint8Array, value: Element): string {
  return value.type === 'string' ? decodeString(bytes, value) : rawText(bytes, value);
}

function rawText(bytes: Uint8Array, value: Element): string {
  return decoder.decode(bytes.subarray(value.valueStart, value.valueEnd));
}

function readUsage(bytes: Uint8Array, usage: Member | undefined): ReplyUsage | undefined {
  if (usage?.type !== 'object') return undefined;
  const scan = scanObject(bytes, usage.valueStart, usage.valueEnd);
  if (scan.kind !== 'object') return undefined;
  const promptTokens = readInt(bytes, findMember(scan, 'prompt_tokens'));
  if (promptTokens === undefined) return undefined;
  const details = findMember(scan, 'prompt_tokens_details');
  let cachedTokens = 0;
  if (details?.type === 'object') {
    const inner = scanObject(bytes, details.valueStart, details.valueEnd);
    if (inner.kind === 'object') cachedTokens = readInt(bytes, findMember(inner, 'cached_tokens')) ?? 0;
  }
  return { promptTokens, completionTokens: readInt(bytes, findMember(scan, 'completion_tokens')) ?? 0, cachedTokens };
}

/** A non-negative integer below 2^53 written in plain digits. */
function readInt(bytes: Uint8Array, value: Element | undefined): number | undefined {
  if (value?.type !== 'number') return undefined;
  let n = 0;
  for (let i = value.valueStart; i < value.valueEnd; i++) {
    const digit = (bytes[i] ?? 0) - 0x30;
    if (digit < 0 || digit > 9) return undefined;
    n = n * 10 + digit;
  }
  return Number.isSafeInteger(n) ? n : undefined;
}

/** A list of whole numbers; undefined where it is none. */
function readInts(bytes: Uint8Array, list: Member | undefined): readonly number[] | undefined {
  return list?.type === 'array' ? readWholeNumbers(bytes, list) : undefined;
}

/**
 * The event with the named members' values turned into `null`; every other byte is kept, and the same reference comes
 * back where no such value is there or the payload is no JSON object.
 *
 * A value that stretches over several `data` lines becomes null on its first line and nothing on the others.
 */
export function muteEvent(event: Uint8Array, spec: MuteSpec): Uint8Array {
  if (!mayHold(event, spec)) return event;
  const lines = dataLines(event);
  const data = eventData(event);
  if (data === undefined) return event;
  const ranges = rangesToMute(data.text, 0, data.text.length, spec);
  if (ranges.length === 0) return event;
  return replaceRanges(event, lines, ranges);
}

/** As `muteEvent`, for a whole JSON reply body (chat or completions). */
export function muteReply(body: Uint8Array, spec: MuteSpec): Uint8Array {
  if (!mayHold(body, spec)) return body;
  const ranges = rangesToMute(body, 0, body.length, spec);
  return ranges.length === 0 ? body : replaceRanges(body, [{ start: 0, end: body.length }], ranges);
}

/** The values to mute as offsets in the payload, ascending and disjoint. */
function rangesToMute(payload: Uint8Array, start: number, end: number, spec: MuteSpec): readonly DataLine[] {
  const scan = scanObject(payload, start, end);
  if (scan.kind !== 'object') return [];
  const ranges: DataLine[] = [];
  const collect = (member: Member): void => {
    ranges.push({ start: member.valueStart, end: member.valueEnd });
  };
  // Every duplicate: which of them a client reads is its own choice.
  for (const member of scan.members) {
    if (spec.top.includes(member.key)) {
      if (member.type !== 'null') collect(member);
    } else if (member.key === 'choices' && member.type === 'array' && spec.choice.length > 0) {
      for (const element of scanArray(payload, member.valueStart, member.valueEnd) ?? []) {
        const choice = scanObject(payload, element.valueStart, element.valueEnd);
        if (choice.kind !== 'object') continue;
        for (const inner of choice.members) {
          if (inner.type !== 'null' && spec.choice.includes(inner.key)) collect(inner);
        }
      }
    }
  }
  return ranges;
}

/** `lines` are the places in `bytes` of the payload's lines, which are joined by one byte each in payload offsets. */
function replaceRanges(bytes: Uint8Array, lines: readonly DataLine[], ranges: readonly DataLine[]): Uint8Array {
  const parts: Uint8Array[] = [];
  let copied = 0;
  let lineOffset = 0;
  let next = 0;
  for (const line of lines) {
    const lineLimit = lineOffset + line.end - line.start;
    for (let range = ranges[next]; range !== undefined && range.start < lineLimit; range = ranges[next]) {
      const from = Math.max(range.start, lineOffset);
      const to = Math.min(range.end, lineLimit);
      if (from < to) {
        parts.push(bytes.subarray(copied, line.start + from - lineOffset));
        if (from === range.start) parts.push(NULL);
        copied = line.start + to - lineOffset;
      }
      if (range.end > lineLimit) break;
      next++;
    }
    lineOffset = lineLimit + 1;
  }
  parts.push(bytes.subarray(copied));
  return concatBytes(parts);
}

interface Needle {
  readonly text: Uint8Array;
  /** Horspool shifts by the byte under the needle's last place. */
  readonly shift: Uint8Array;
}

// Derived from the spec alone, so that one spec used for a million events is prepared once.
const needlesOf = new WeakMap<MuteSpec, readonly Needle[]>();

function needle(text: string): Needle {
  const bytes = encoder.encode(text);
  const last = Math.min(bytes.length - 1, 255);
  const shift = new Uint8Array(256).fill(last + 1);
  for (let i = bytes.length - 1 - last; i < bytes.length - 1; i++) shift[bytes[i] ?? 0] = bytes.length - 1 - i;
  return { text: bytes, shift };
}

// A key may be written with escapes; those of ASCII characters all begin like this.
const ASCII_ESCAPE = needle('\\u00');

function find(bytes: Uint8Array, { text, shift }: Needle, from: number): number {
  const size = text.length;
  const lastByte = text[size - 1];
  let at = from;
  while (at + size <= bytes.length) {
    const c = bytes[at + size - 1] ?? 0;
    if (c === lastByte) {
      let k = 0;
      while (k < size - 1 && bytes[at + k] === text[k]) k++;
      if (k === size - 1) return at;
    }
    at += shift[c] ?? 1;
  }
  return -1;
}

/** False only where no named member with a value other than null can be there; without parsing anything. */
function mayHold(bytes: Uint8Array, spec: MuteSpec): boolean {
  let needles = needlesOf.get(spec);
  if (needles === undefined) {
    needles = [...new Set([...spec.top, ...spec.choice])].map((name) => needle(`"${name}"`));
    needlesOf.set(spec, needles);
  }
  for (const n of needles) {
    for (let at = find(bytes, n, 0); at >= 0; at = find(bytes, n, at + n.text.length)) {
      const colon = at + n.text.length;
      // ":n" begins a null; any other spelling is left to the scan.
      if (bytes[colon] !== 0x3a || bytes[colon + 1] !== 0x6e) return true;
    }
  }
  return needles.length > 0 && find(bytes, ASCII_ESCAPE, 0) >= 0;
}
