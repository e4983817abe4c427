// What a release does to CHANGELOG.md, and which versions may follow.

const FORM = /^(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(?:-([0-9a-z.-]+))?$/i;

/** Why a version cannot be released after those of `tags` (v1.2.3), as a sentence; undefined where it can. */
export function checkVersion(version: string, tags: readonly string[]): string | undefined {
  if (!FORM.test(version)) return `${version} is no version: expected MAJOR.MINOR.PATCH, as in 1.2.3 or 1.3.0-rc.1`;
  if (tags.includes(`v${version}`)) return `there is a tag v${version} already`;
  const later = tags.map((tag) => tag.slice(1)).find((tag) => FORM.test(tag) && compare(tag, version) > 0);
  return later === undefined ? undefined : `${later} is released already, and ${version} is before it`;
}

/** Below 0 where `a` comes before `b`; a version with a suffix comes before the one without. */
function compare(a: string, b: string): number {
  const [, ...left] = FORM.exec(a) ?? [];
  const [, ...right] = FORM.exec(b) ?? [];
  for (let i = 0; i < 3; i += 1) if (left[i] !== right[i]) return Number(left[i]) - Number(right[i]);
  const [, , , leftSuffix] = left;
  const [, , , rightSuffix] = right;
  if (leftSuffix === rightSuffix) return 0;
  if (leftSuffix === undefined) return 1;
  if (rightSuffix === undefined) return -1;
  return leftSuffix.localeCompare(rightSuffix, 'en', { numeric: true });
}

/** A changelog in which what was unreleased has its version. */
interface Moved {
  readonly changelog: string;
  /** What was unreleased. */
  readonly notes: string;
}

const UNRELEASED = /^([\s\S]*?^## \[Unreleased\]\n)([\s\S]*?)(?=^## |$(?![\s\S]))([\s\S]*)$/m;

/** Moves what is unreleased under the version; undefined where nothing is. */
export function moveUnreleased(changelog: string, version: string, date: string): Moved | undefined {
  const [, head, notes, rest] = UNRELEASED.exec(changelog) ?? [];
  if (notes === undefined || !/^- /m.test(notes)) return undefined;
  return { changelog: `${head}\n## [${version}] - ${date}\n${notes}${rest}`, notes: notes.trim() };
}
