const encoder = new TextEncoder();

/** Ids of the special tokens; 0..255 are bytes. */
export const special = {
  bos: 256,
  eos: 257,
  end: 258,
  system: 259,
  user: 260,
  assistant: 261,
  tool: 262,
  tools: 263,
  call: 264,
  media: 265,
  documents: 266,
  effort: 267,
  think: 268,
  thinkEnd: 269,
} as const;

const specialText = new Map<number, string>([
  [special.bos, '<s>'],
  [special.eos, '</s>'],
  [special.end, '<|end|>'],
  [special.system, '<|system|>'],
  [special.user, '<|user|>'],
  [special.assistant, '<|assistant|>'],
  [special.tool, '<|tool|>'],
  [special.tools, '<|tools|>'],
  [special.call, '<|call|>'],
  [special.media, '<|media|>'],
  [special.documents, '<|documents|>'],
  [special.effort, '<|effort|>'],
  [special.think, '<think>'],
  [special.thinkEnd, '</think>'],
]);

const pairBase = 300;
const letters = 26;
const lowerA = 97;

/** Number of token ids; an id at or above it is out of vocabulary. */
export const vocabularySize = pairBase + letters * letters;

/**
 * `bytes`: one token per UTF-8 byte, so text and tokens always round-trip. `pairs`: two neighbouring lower-case letters
 * merge into one token when a text is encoded, but a model may emit them apart: re-encoding an answer then gives other
 * tokens, as real BPE vocabularies do.
 */
export type TokenizerKind = 'bytes' | 'pairs';

function isLower(byte: number): boolean {
  return byte >= lowerA && byte < lowerA + letters;
}

/** The token of two lower-case letters given as bytes. */
export function pairToken(first: number, second: number): number {
  return pairBase + (first - lowerA) * letters + (second - lowerA);
}

/** Appends the token ids of a text to `into`; special tokens are never produced from text. */
export function encodeInto(into: number[], text: string, kind: TokenizerKind): void {
  const bytes = encoder.encode(text);
  for (let i = 0; i < bytes.length; i += 1) {
    const first = bytes[i] ?? 0;
    const second = bytes[i + 1] ?? 0;
    if (kind === 'pairs' && isLower(first) && isLower(second)) {
      into.push(pairToken(first, second));
      i += 1;
    } else {
      into.push(first);
    }
  }
}

/** Token ids of a text. */
export function encodeText(text: string, kind: TokenizerKind): number[] {
  const ids: number[] = [];
  encodeInto(ids, text, kind);
  return ids;
}

/** Bytes that a token stands for in visible text; empty for special tokens. */
export function tokenBytes(id: number): number[] {
  if (id < 256) return [id];
  if (id >= pairBase && id < vocabularySize) {
    const offset = id - pairBase;
    return [lowerA + Math.floor(offset / letters), lowerA + (offset % letters)];
  }
  return [];
}

/** Text of token ids; special tokens are left out unless `showSpecial`. */
export function decodeTokens(ids: readonly number[], showSpecial = false): string {
  const decoder = new TextDecoder();
  let text = '';
  let bytes: number[] = [];
  const flush = (): void => {
    text += decoder.decode(Uint8Array.from(bytes));
    bytes = [];
  };
  for (const id of ids) {
    const name = specialText.get(id);
    if (name === undefined) {
      bytes.push(...tokenBytes(id));
    } else if (showSpecial) {
      flush();
      text += name;
    }
  }
  flush();
  return text;
}

/** One token as text, special tokens by name. */
export function tokenText(id: number): string {
  return decodeTokens([id], true);
}
