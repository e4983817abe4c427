/** Whether these are the same token ids in the same order; false where the first are not known. */
export function isSameIds(used: readonly number[] | undefined, wanted: readonly number[]): boolean {
  return used?.length === wanted.length && wanted.every((id, i) => used[i] === id);
}

/** Whether a prompt of these token ids begins with so many of the wanted ones; false where it is not known. */
export function beginsWithIds(used: readonly number[] | undefined, wanted: readonly number[], count: number): boolean {
  if (used === undefined || count > wanted.length) return false;
  return isSameIds(used.slice(0, count), wanted.slice(0, count));
}

const encoder = new TextEncoder();
/** The text of a list is made once: both legs of a request carry it, and at 32k tokens it is 200 kB. */
const texts = new WeakMap<readonly number[], Uint8Array>();

/** Token ids as the bytes of a JSON array. */
export function tokenIdsJson(ids: readonly number[]): Uint8Array {
  const text = texts.get(ids) ?? encoder.encode(JSON.stringify(ids));
  texts.set(ids, text);
  return text;
}
