import { createHash } from 'node:crypto';

/** The hash of a key as the file of keys takes it, or why the text is no key; neither holds the key. */
export type HashedKey =
  | { readonly kind: 'ok'; readonly text: string }
  | { readonly kind: 'bad'; readonly message: string };

/** Hashes one line, its line end not included; a key is what can follow `Authorization: Bearer `. */
export function hashKeyLine(line: Uint8Array): HashedKey {
  let end = line.length;
  if (line[end - 1] === 0x0a) end--;
  if (line[end - 1] === 0x0d) end--;
  const key = line.subarray(0, end);
  if (key.length === 0) return { kind: 'bad', message: 'no key on standard input' };
  if (key.some((byte) => byte <= 0x20 || byte === 0x7f)) {
    return { kind: 'bad', message: 'a key cannot hold white space or control characters' };
  }
  return { kind: 'ok', text: `sha256:${createHash('sha256').update(key).digest('hex')}` };
}
