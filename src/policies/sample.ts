/** Up to `count` different items in random order, every order as likely as every other; the work does not grow with their number. */
export function sample<T>(items: readonly T[], count: number, random: () => number): readonly T[] {
  const wanted = Math.min(count, items.length);
  const drawn: T[] = [];
  /** Smallest first. */
  const taken: number[] = [];
  for (let i = 0; i < wanted; i += 1) {
    let index = Math.floor(random() * (items.length - i));
    let place = 0;
    // The index counts only those that are left.
    while (place < taken.length && index >= (taken[place] ?? 0)) {
      index += 1;
      place += 1;
    }
    taken.splice(place, 0, index);
    const item = items[index];
    if (item !== undefined) drawn.push(item);
  }
  return drawn;
}
