import type { Api } from './facts.ts';
import type { IncrementalHash } from './history.ts';
import { findMember, type ScannedObject } from './json-scan.ts';
import { elementsOf, type ValueRange } from './json-walk.ts';
import type { PrefixMark } from './policy.ts';

/** Limit of the contract. */
const MAX_MARKS = 64;
/** Of more places the first ones are kept, which other conversations may share, and the last ones, which the next turn has. */
const FIRST_MARKS = 16;
/** A long text is marked every so many bytes, so that one that differs at its end still matches at its beginning. */
const PIECE_BYTES = 2048;

/** Members before the conversation that shape the prompt, or keep caches apart. */
const SHAPING = ['model', 'cache_salt', 'tools', 'documents', 'chat_template', 'chat_template_kwargs'];

/**
 * Marks the beginnings of a prompt: after each message, and within long ones every 2 KiB. Equal marks mean equal bytes of
 * the body up to there, with a likelihood of one in 2^64 for others; they tell nothing of the text. Empty where the body
 * has no messages and no prompt.
 */
export function prefixMarks(
  api: Api,
  body: Uint8Array,
  scan: ScannedObject,
  createHash: () => IncrementalHash,
): readonly PrefixMark[] {
  const member = findMember(scan, api === 'completions' ? 'prompt' : 'messages');
  if (member === undefined || member.type === 'null') return [];
  const hash = createHash();
  hash.update(ENCODER.encode(`${api}\n`));
  for (const key of SHAPING) {
    const value = findMember(scan, key);
    hash.update(ENCODER.encode(`${key}\n`));
    if (value !== undefined) hash.update(body.subarray(value.valueStart, value.valueEnd));
  }
  const texts = api === 'completions' ? [member] : elementsOf(body, member);
  const pieces = texts.flatMap(piecesOf);
  const marks: PrefixMark[] = [];
  let bytes = 0;
  for (const [i, { valueStart, valueEnd }] of pieces.entries()) {
    hash.update(body.subarray(valueStart, valueEnd));
    bytes += valueEnd - valueStart;
    const isKept = i < FIRST_MARKS || i >= pieces.length - (MAX_MARKS - FIRST_MARKS);
    if (isKept) marks.push({ hash: BigInt(`0x${hash.copy().digest('hex').slice(0, 16)}`), bytes });
  }
  return marks;
}

function piecesOf({ valueStart, valueEnd }: ValueRange): readonly ValueRange[] {
  const count = Math.max(1, Math.ceil((valueEnd - valueStart) / PIECE_BYTES));
  return Array.from({ length: count }, (_, i) => ({
    valueStart: valueStart + i * PIECE_BYTES,
    valueEnd: Math.min(valueEnd, valueStart + (i + 1) * PIECE_BYTES),
  }));
}

const ENCODER = new TextEncoder();
