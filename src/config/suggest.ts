/** Finds the known word nearest to a mistyped one; undefined when more than `limit` letters (a third by default) differ. */
export function suggest(
  word: string,
  known: readonly string[],
  limit: number = Math.floor(Math.max(word.length, 3) / 3),
): string | undefined {
  const wanted = fold(word);
  let best: string | undefined;
  let bestDistance = limit + 1;
  for (const candidate of known) {
    const distance = editDistance(wanted, fold(candidate));
    if (distance < bestDistance) {
      best = candidate;
      bestDistance = distance;
    }
  }
  return best;
}

/** Formats a suggestion as the tail of a sentence, or an empty string when there is none. */
export function didYouMean(word: string, known: readonly string[], prefix = ''): string {
  const match = suggest(word, known);
  return match === undefined ? '' : `; did you mean ${prefix}${match}?`;
}

// Case and the choice of - or _ are the commonest slips, so they count for nothing.
function fold(word: string): string {
  return word.toLowerCase().replaceAll('-', '_');
}

// Insertions, deletions, replacements and swaps of neighbours, each counted once.
function editDistance(a: string, b: string): number {
  let before: readonly number[] = [];
  let row: readonly number[] = Array.from({ length: b.length + 1 }, (_, i) => i);
  for (let i = 1; i <= a.length; i += 1) {
    const next = [i];
    for (let j = 1; j <= b.length; j += 1) {
      const replaced = (row[j - 1] ?? 0) + (a[i - 1] === b[j - 1] ? 0 : 1);
      const swapped =
        i > 1 && j > 1 && a[i - 1] === b[j - 2] && a[i - 2] === b[j - 1]
          ? (before[j - 2] ?? 0) + 1
          : Number.POSITIVE_INFINITY;
      next.push(Math.min(replaced, swapped, (row[j] ?? 0) + 1, (next[j - 1] ?? 0) + 1));
    }
    before = row;
    row = next;
  }
  return row[b.length] ?? 0;
}
