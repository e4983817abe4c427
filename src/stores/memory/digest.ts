import { hash } from 'node:crypto';

/** Numbers that a digest is cut to: 128 bits. */
export const DIGEST_WORDS = 4;

/** Numbers that are equal for equal texts alone. */
export function digestOf(text: string): readonly number[] {
  // As text: a buffer of its own costs more than the digest.
  return wordsOf(Buffer.from(hash('sha256', text, 'latin1'), 'latin1'));
}

/** A digest that was made elsewhere, as numbers. */
export function wordsOf(digest: Uint8Array): readonly number[] {
  const view = new DataView(digest.buffer, digest.byteOffset, digest.byteLength);
  return Array.from({ length: DIGEST_WORDS }, (_, index) => view.getInt32(4 * index));
}
