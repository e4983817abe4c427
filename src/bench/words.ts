import { type Chance, drawBetween } from './chance.ts';

const WORDS =
  'river stone garden winter music letter window bridge question answer paper engine server memory valley summer'.split(
    ' ',
  );

/** How many tokens an endpoint counts for words: so many each, and so many besides. */
export interface WordTokens {
  readonly each: number;
  readonly besides: number;
}

/** For an endpoint that does not tell. */
export const ONE_EACH: WordTokens = { each: 1, besides: 0 };

/** Numbers of words whose tokens tell how words count; every word is as often in one of these texts as any other. */
export const PROBES = [WORDS.length, WORDS.length * 3] as const;

/** A text of known words. */
export function probeText(words: number): string {
  return Array.from({ length: words }, (_, i) => WORDS[i % WORDS.length]).join(' ');
}

/** How words count, from the tokens of the texts of {@link PROBES}. */
export function fitWords([few, many]: readonly [number, number]): WordTokens {
  const each = (many - few) / (PROBES[1] - PROBES[0]);
  return each > 0 ? { each, besides: few - each * PROBES[0] } : ONE_EACH;
}

/** Drawn words that come to about `tokens` tokens, with what an endpoint adds besides; at least one word. */
export function drawWords(chance: Chance, tokens: number, { each, besides }: WordTokens): readonly string[] {
  const count = Math.max(1, Math.round((tokens - besides) / each));
  return Array.from({ length: count }, () => WORDS[drawBetween(chance, 0, WORDS.length - 1)] ?? '');
}
