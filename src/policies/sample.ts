/** Up to `count` different items, drawn at random; the work does not grow with their number. */
export function sample<T>(items: readonly T[], count: number, random: () => number): readonly T[] {
  const wanted = Math.min(count, items.length);
  const drawn: T[] = [];
  const indices: number[] = [];
  // Floyd's way: every set is as likely as every other, and no index is tried twice.
  for (let limit = items.length - wanted; limit < items.length; limit += 1) {
    const tried = Math.floor(random() * (limit + 1));
    const index = indices.includes(tried) ? limit : tried;
    indices.push(index);
    const item = items[index];
    if (item !== undefined) drawn.push(item);
  }
  return drawn;
}
