const LF = 0x0a;
const CR = 0x0d;
const SPACE = 0x20;
const TAB = 0x09;
const QUOTE = 0x22;
const COLON = 0x3a;
const BACKSLASH = 0x5c;
const OPEN_BRACE = 0x7b;
const ZERO = 0x30;
const NINE = 0x39;

/** What a member may be worth in an event of which nothing is to be noted, by its first byte and the one behind. */
type IsPlain = (first: number, second: number) => boolean;

const isNull: IsPlain = (first) => first === 0x6e;

/** Members that tell something beyond text, wherever they stand, and those that a client may have to be shown as null. */
const TELLING: Readonly<Record<string, IsPlain>> = {
  error: isNull,
  usage: isNull,
  finish_reason: isNull,
  kv_transfer_params: isNull,
  ec_transfer_params: isNull,
  prompt_token_ids: isNull,
  token_ids: isNull,
  // Of another choice than the first.
  index: (first, second) => first === ZERO && (second < ZERO || second > NINE) && second !== 0x2e && second !== 0x65,
  // "error", and what could be it in escapes.
  object: (first, second) => first === QUOTE && second !== 0x65 && second !== BACKSLASH,
};

interface Name {
  readonly bytes: Uint8Array;
  readonly isPlain: IsPlain;
}

const encoder = new TextEncoder();
const NAMES: readonly (readonly Name[])[] = (() => {
  const all = Object.entries(TELLING).map(([name, isPlain]) => ({ bytes: encoder.encode(name), isPlain }));
  const longest = Math.max(...all.map(({ bytes }) => bytes.length));
  return Array.from({ length: longest + 1 }, (_, length) => all.filter(({ bytes }) => bytes.length === length));
})();

/**
 * Whether nothing is to be noted of an event behind the first one of a reply with one choice, nor to be changed in it: then
 * it goes to the client unread. False for whatever takes more than a look to tell; `readEvent` and `muteEvent` then do.
 *
 * Each colon that has a quote before it stands behind a key, or is the first character of a text: in a text quotes have
 * backslashes.
 */
export function isPlainEvent(event: Uint8Array): boolean {
  const lineEnd = event.indexOf(LF);
  if (lineEnd < 0 || lineEnd !== event.length - 2 || event[lineEnd + 1] !== LF) return false;
  if (event.indexOf(CR) >= 0 || !hasData(event)) return false;
  const start = event[5] === SPACE ? 6 : 5;
  if (event[start] !== OPEN_BRACE) return false;
  for (let colon = event.indexOf(COLON, start); colon >= 0; colon = event.indexOf(COLON, colon + 1)) {
    let quote = colon - 1;
    while (isSpace(event[quote])) quote--;
    if (event[quote] !== QUOTE) continue;
    let open = quote - 1;
    while (open > start && event[open] !== QUOTE) {
      if (event[open] === BACKSLASH) return false;
      open--;
    }
    if (open <= start || event[open - 1] === BACKSLASH) return false;
    if (!isPlainMember(event, open + 1, quote, colon + 1)) return false;
  }
  return true;
}

/** Whether an event begins with `data:`. */
function hasData(event: Uint8Array): boolean {
  return event[0] === 0x64 && event[1] === 0x61 && event[2] === 0x74 && event[3] === 0x61 && event[4] === COLON;
}

function isPlainMember(event: Uint8Array, from: number, to: number, behind: number): boolean {
  for (const { bytes, isPlain } of NAMES[to - from] ?? []) {
    let same = 0;
    while (same < bytes.length && bytes[same] === event[from + same]) same++;
    if (same < bytes.length) continue;
    let value = behind;
    while (isSpace(event[value])) value++;
    return isPlain(event[value] ?? 0, event[value + 1] ?? 0);
  }
  return true;
}

function isSpace(byte: number | undefined): boolean {
  return byte === SPACE || byte === TAB;
}
