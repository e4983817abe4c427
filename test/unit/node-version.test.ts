import { spawnSync } from 'node:child_process';
import { chmodSync, cpSync, mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { expect, onTestFinished, test } from 'vitest';

/** Runs `bin/baton` of an installed package where the only Node says it is `version`. */
function runOn(version: string) {
  const folder = mkdtempSync(join(tmpdir(), 'baton-node-'));
  onTestFinished(() => rmSync(folder, { recursive: true }));
  mkdirSync(join(folder, 'bin'));
  cpSync('bin/baton', join(folder, 'bin/baton'));
  const node = join(folder, 'node');
  writeFileSync(node, `#!/bin/sh\n[ "$1" = --version ] && echo ${version} || echo "ran $*"\n`);
  chmodSync(node, 0o755);
  const { status, stdout, stderr } = spawnSync(join(folder, 'bin/baton'), ['help'], {
    encoding: 'utf8',
    env: { PATH: `${folder}:${process.env['PATH']}` },
  });
  return { status, stdout: stdout.replaceAll(/\S+\/dist\//g, 'dist/'), stderr };
}

test.each(['v20.20.2', 'v22.23.3', 'v23.11.0'])('%s is too old for the package', (version) => {
  expect(runOn(version)).toEqual({
    status: 1,
    stdout: '',
    stderr: `baton: needs Node 24 or later, found ${version.slice(1)}; in a checkout, run: npm ci\n`,
  });
});

test.each(['v24.0.0', 'v26.10.0', 'v100.1.0'])('%s runs it', (version) => {
  expect(runOn(version)).toEqual({ status: 0, stdout: 'ran dist/src/bin.js help\n', stderr: '' });
});

test('every place names the same oldest Node', () => {
  const read = (file: string) => readFileSync(file, 'utf8');
  expect(JSON.parse(read('package.json')).engines).toEqual({ node: '>=24' });
  expect(read('scripts/setup.mjs')).toContain('OLDEST_NODE = 24;');
  expect(read('README.md')).toContain('(Node 24 or newer)');
});
