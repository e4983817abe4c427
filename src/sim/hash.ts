/** A running 64-bit digest in two 32-bit lanes; mutable on purpose, one per sequence, so that a decode step costs O(1). */
export interface HashState {
  a: number;
  b: number;
}

/** Folds one 32-bit integer into the state in place. */
export function foldInto(state: HashState, value: number): void {
  let a = Math.imul(state.a ^ value, 0x9e3779b1);
  a ^= a >>> 15;
  let b = Math.imul(state.b ^ a ^ (value >>> 7), 0x85ebca6b);
  b ^= b >>> 13;
  state.a = a;
  state.b = b;
}

/** Digest of a text, used to seed a sequence with what selects the weights and the cache partition. */
export function hashText(text: string): HashState {
  const state = { a: 0x243f6a88, b: 0x13198a2e };
  for (let i = 0; i < text.length; i += 1) foldInto(state, text.charCodeAt(i));
  foldInto(state, text.length);
  return state;
}

/** One unsigned 32-bit draw from the state and a salt; does not change the state. */
export function drawFrom(state: HashState, salt: number): number {
  let x = Math.imul(state.a ^ Math.imul(salt, 0x27d4eb2f), 0x165667b1) ^ state.b;
  x ^= x >>> 16;
  x = Math.imul(x, 0x7feb352d);
  x ^= x >>> 15;
  x = Math.imul(x, 0x846ca68b);
  x ^= x >>> 16;
  return x >>> 0;
}

/** The state as one exact integer below 2^53, fit for a Map key. */
export function toKey(state: HashState): number {
  return (state.a >>> 0) * 0x200000 + (state.b >>> 11);
}

/** The state as 16 hex digits. */
export function toHex(state: HashState): string {
  return (state.a >>> 0).toString(16).padStart(8, '0') + (state.b >>> 0).toString(16).padStart(8, '0');
}
