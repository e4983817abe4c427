import { drawFrom, type HashState } from './hash.ts';
import { pairToken, special, type TokenizerKind } from './tokenizer.ts';

const alphabet = [...`eeee  taoinshrdlucmfwypvbgkqjxz ETAOINSHRDLU 0123456789.,:;!?'"()-_/\\{}[]<>|&%$#@+=*~`].map(
  (char) => char.charCodeAt(0),
);

/** How tokens are drawn from the state of a sequence. */
export interface SamplerSettings {
  readonly tokenizer: TokenizerKind;
  readonly eosEvery: number;
  /** Mixed into each draw; 0 for greedy decoding. */
  readonly salt: number;
}

/** The next token of a sequence whose KV content has digest `state`: printable ASCII, or EOS unless masked. */
export function sampleToken(state: HashState, settings: SamplerSettings, maskEos: boolean): number {
  const draw = drawFrom(state, settings.salt);
  if (!maskEos && settings.eosEvery > 0 && draw % settings.eosEvery === 0) return special.eos;
  if (settings.tokenizer === 'pairs' && (draw >>> 28) % 4 === 0) {
    return pairToken(97 + ((draw >>> 4) % 26), 97 + ((draw >>> 12) % 26));
  }
  return alphabet[(draw >>> 8) % alphabet.length] ?? 32;
}

/** How many tokens a reply begins to think with, drawn from the state. */
export function sampleThought(state: HashState, salt: number): number {
  return 2 + (drawFrom(state, salt ^ 0x7468696e) % 18);
}

/** A lower-case letter drawn from the state. */
export function sampleLetter(state: HashState, salt: number): number {
  return 97 + (drawFrom(state, salt ^ 0x5bd1e995) % 26);
}

/** One token with its log probability. */
export interface TokenLogprob {
  readonly id: number;
  readonly logprob: number;
}

/** The chosen token with `top` plausible alternatives, most likely first; the same state gives the same numbers. */
export function rankTokens(state: HashState, salt: number, chosen: number, top: number): readonly TokenLogprob[] {
  const first = -((drawFrom(state, salt ^ 0x1b873593) & 0xffff) + 1) / 65_537;
  const ranked: TokenLogprob[] = [{ id: chosen, logprob: first }];
  for (let rank = 1; ranked.length < top; rank += 1) {
    const id = alphabet[(drawFrom(state, salt + rank * 7919) >>> 3) % alphabet.length] ?? 32;
    if (ranked.some((entry) => entry.id === id)) continue;
    ranked.push({ id, logprob: first - ranked.length * 0.75 });
  }
  return ranked;
}
