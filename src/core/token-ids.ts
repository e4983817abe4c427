/** Whether these are the same token ids in the same order; false where the first are not known. */
export function isSameIds(used: readonly number[] | undefined, wanted: readonly number[]): boolean {
  return used?.length === wanted.length && wanted.every((id, i) => used[i] === id);
}
