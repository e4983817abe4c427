import { readFileSync } from 'node:fs';
import { expect, test } from 'vitest';
import { checkVersion, moveUnreleased } from '../../scripts/changelog.ts';

const BEFORE = `# Changelog

## [Unreleased]

### Added

- a thing

## [0.1.0] - 2026-01-02

- the start
`;

test('what is unreleased goes under the version, and the heading stays for what comes', () => {
  expect(moveUnreleased(BEFORE, '0.2.0', '2026-03-04')).toEqual({
    changelog: BEFORE.replace('## [Unreleased]\n', '## [Unreleased]\n\n## [0.2.0] - 2026-03-04\n'),
    notes: '### Added\n\n- a thing',
  });
  const only = '## [Unreleased]\n\n- a thing\n';
  expect(moveUnreleased(only, '1.0.0', '2026-03-04')?.changelog).toBe(
    '## [Unreleased]\n\n## [1.0.0] - 2026-03-04\n\n- a thing\n',
  );
});

test('nothing to release: no entry, or no such heading', () => {
  expect(moveUnreleased(BEFORE.replace('- a thing\n', ''), '0.2.0', '2026-03-04')).toBeUndefined();
  expect(moveUnreleased('# Changelog\n', '0.2.0', '2026-03-04')).toBeUndefined();
});

test('the changelog of this repository has its heading', () => {
  expect(readFileSync('CHANGELOG.md', 'utf8')).toMatch(/^## \[Unreleased\]$/m);
});

const TAGS = ['v0.9.0', 'v0.10.0', 'v1.0.0-rc.2', 'vnext'];

test.each([
  ['1.0.0', TAGS, undefined],
  ['1.0.0-rc.10', TAGS, undefined],
  ['0.1.0', [], undefined],
  ['1.0', [], /^1\.0 is no version: expected MAJOR\.MINOR\.PATCH/],
  ['v1.0.0', [], /is no version/],
  ['01.0.0', [], /is no version/],
  ['0.10.0', TAGS, /^there is a tag v0\.10\.0 already$/],
  ['0.9.5', TAGS, /^0\.10\.0 is released already, and 0\.9\.5 is before it$/],
  ['1.0.0-rc.1', TAGS, /^1\.0\.0-rc\.2 is released already/],
  ['1.0.0-rc.3', [...TAGS, 'v1.0.0'], /^1\.0\.0 is released already/],
])('%s after %j', (version, tags, sentence) => {
  const found = checkVersion(version, tags);
  if (sentence === undefined) expect(found).toBeUndefined();
  else expect(found).toMatch(sentence);
});
