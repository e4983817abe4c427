import type { Candidate } from '../core/policy.ts';

/**
 * The `count` candidates with the smallest scores, smallest first; among equal ones the one whose last turn is longest
 * ago. Goes through the candidates once and keeps no more than `count`. One whose score is not finite is left out.
 */
export function least<C extends Candidate>(
  candidates: readonly C[],
  count: number,
  scoreOf: (candidate: C) => number,
): readonly C[] {
  const best: { readonly candidate: C; readonly score: number }[] = [];
  for (const candidate of candidates) {
    const score = scoreOf(candidate);
    if (!Number.isFinite(score)) continue;
    const worst = best.length < count ? undefined : best[best.length - 1];
    if (worst !== undefined && !isBetter(score, candidate, worst)) continue;
    let at = best.length < count ? best.length : count - 1;
    for (let before = best[at - 1]; before !== undefined; before = best[at - 1]) {
      if (!isBetter(score, candidate, before)) break;
      best[at] = before;
      at -= 1;
    }
    best[at] = { candidate, score };
  }
  return best.map(({ candidate }) => candidate);
}

function isBetter(
  score: number,
  { lastPick }: Candidate,
  than: { readonly candidate: Candidate; readonly score: number },
) {
  return score === than.score ? lastPick < than.candidate.lastPick : score < than.score;
}
