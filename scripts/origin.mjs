// What a build is made from: the version of package.json and the commit.
import { execFileSync } from 'node:child_process';
import { join } from 'node:path';

const root = join(import.meta.dirname, '..');

/** `{ version, commit }`, as `baton --version` of this checkout says it. */
export function readOrigin() {
  const said = execFileSync(process.execPath, [join(root, 'src', 'bin.ts'), '--version'], { encoding: 'utf8' });
  const [, version, commit] = /^baton (\S+) \(commit (\S+),/.exec(said) ?? [];
  if (commit === undefined) throw new Error(`cannot read version and commit from ${said}`);
  return { version, commit };
}
