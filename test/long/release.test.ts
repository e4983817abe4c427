import { execFile } from 'node:child_process';
import { appendFileSync, mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join, resolve } from 'node:path';
import { promisify } from 'node:util';
import { afterAll, expect, test } from 'vitest';

const run = promisify(execFile);
const scratch = mkdtempSync(join(tmpdir(), 'baton-release-test-'));
afterAll(() => rmSync(scratch, { recursive: true, force: true }));

const git = async (folder: string, ...args: readonly string[]) => (await run('git', ['-C', folder, ...args])).stdout;

function release(folder: string, ...args: readonly string[]) {
  return run(process.execPath, [join(folder, 'scripts', 'release.mjs'), ...args]).then(
    ({ stdout }) => ({ said: stdout, code: 0 }),
    (error: { stderr: string; code: number }) => ({ said: error.stderr, code: error.code }),
  );
}

test('a dry run makes everything of a release, and leaves the repository as it was', async () => {
  const state = async () => [
    await git('.', 'rev-parse', 'HEAD'),
    await git('.', 'tag', '--list'),
    await git('.', 'status', '--porcelain'),
  ];
  const before = await state();
  const { said, code } = await release(resolve('.'), '99.1.0', '--dry-run');
  expect(code, said).toBe(0);
  expect(said).toMatch(/^[0-9a-f]+ Release 99\.1\.0 \(.*tag: v99\.1\.0/m);
  // Lines taken out and put in: the version stands once in package.json, twice in the lock file and in the chart.
  for (const [name, lines] of [
    ['package.json', 2],
    ['package-lock.json', 4],
    ['deploy/helm/baton/Chart.yaml', 4],
  ])
    expect(said).toMatch(new RegExp(`^ ${name} +\\| +${lines} `, 'm'));
  const made = [
    'THIRD_PARTY_LICENSES',
    `baton-99.1.0-${process.platform}-${process.arch}`,
    'baton-99.1.0.cdx.json',
    'baton-99.1.0.tgz',
    'baton-proto-99.1.0.tgz',
  ];
  for (const name of made) expect(said).toMatch(new RegExp(`^[0-9a-f]{64} {2}${name.replaceAll('.', '\\.')}$`, 'm'));
  expect(await state()).toEqual(before);
});

test('what cannot be released is refused in one sentence, and nothing is changed', async () => {
  const clone = join(scratch, 'clone');
  await run('git', ['clone', '--quiet', '.', clone]);
  expect(await release(clone)).toEqual({ code: 1, said: 'release: usage: npm run release -- <version> [--dry-run]\n' });
  expect(await release(clone, 'one')).toMatchObject({ code: 1, said: expect.stringContaining('one is no version') });
  await git(clone, '-c', 'user.name=t', '-c', 'user.email=t@t', 'tag', '--annotate', 'v98.0.0', '--message', 'it');
  expect(await release(clone, '97.0.0')).toEqual({
    code: 1,
    said: 'release: 98.0.0 is released already, and 97.0.0 is before it\n',
  });
  const log = readFileSync(join(clone, 'CHANGELOG.md'), 'utf8');
  appendFileSync(join(clone, 'CHANGELOG.md'), '\n');
  expect(await release(clone, '99.0.0')).toMatchObject({
    code: 1,
    said: expect.stringMatching(/^release: the work tree is not clean; commit or stash:\n.*CHANGELOG\.md\n$/),
  });
  expect(readFileSync(join(clone, 'CHANGELOG.md'), 'utf8')).toBe(`${log}\n`);
});
