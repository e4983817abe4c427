import { spawnSync } from 'node:child_process';
import { chmodSync, cpSync, mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { expect, onTestFinished, test } from 'vitest';

/** Runs `bin/baton` of an installed package, or of a checkout, where the only Node says it is `version`. */
function runOn(version: string, kind: 'package' | 'checkout' = 'package') {
  const folder = mkdtempSync(join(tmpdir(), 'baton-node-'));
  onTestFinished(() => rmSync(folder, { recursive: true }));
  mkdirSync(join(folder, 'bin'));
  cpSync('bin/baton', join(folder, 'bin/baton'));
  if (kind === 'checkout') {
    for (const name of ['src/bin.ts', 'node_modules/.baton-setup']) {
      mkdirSync(join(folder, dirname(name)));
      writeFileSync(join(folder, name), '');
    }
  }
  const node = join(folder, 'node');
  writeFileSync(node, `#!/bin/sh\n[ "$1" = --version ] && echo ${version} || echo "ran $*"\n`);
  chmodSync(node, 0o755);
  const { status, stdout, stderr } = spawnSync(join(folder, 'bin/baton'), ['help'], {
    encoding: 'utf8',
    env: { PATH: `${folder}:${process.env['PATH']}` },
  });
  return { status, stdout: stdout.replace(`${folder}/`, ''), stderr };
}

test.each(['v20.20.2', 'v22.18.0'])('%s is too old for the package', (version) => {
  expect(runOn(version)).toEqual({
    status: 1,
    stdout: '',
    stderr: `baton: needs Node 22.19 or later, found ${version.slice(1)}\n`,
  });
});

test.each(['v22.19.0', 'v22.23.3', 'v23.0.0', 'v24.0.0', 'v26.10.0', 'v100.1.0'])('%s runs it', (version) => {
  expect(runOn(version)).toEqual({ status: 0, stdout: 'ran dist/src/bin.js help\n', stderr: '' });
});

test('a checkout needs one that runs its sources', () => {
  const stderr = 'baton: needs Node 24 or later, found 22.23.3; run: npm ci\n';
  expect(runOn('v22.23.3', 'checkout')).toEqual({ status: 1, stdout: '', stderr });
  expect(runOn('v24.0.0', 'checkout')).toEqual({ status: 0, stdout: 'ran src/bin.ts help\n', stderr: '' });
});

test('every place names the same oldest Node', () => {
  const read = (file: string) => readFileSync(file, 'utf8');
  const { engines, dependencies } = JSON.parse(read('package.json'));
  expect(engines).toEqual({ node: '>=22.19' });
  expect(read('bin/baton')).toContain('oldest=22.19\n');
  expect(read('README.md')).toContain('(Node 22.19 or newer)');
  // None of the packages that it installs wants a newer one.
  for (const name of Object.keys(dependencies)) {
    const wanted: string = JSON.parse(read(`node_modules/${name}/package.json`)).engines?.node ?? '>=0';
    const [major = 0, minor = 0] = (/\d+(\.\d+)?/.exec(wanted)?.[0] ?? '').split('.').map(Number);
    expect(major < 22 || (major === 22 && minor <= 19), `${name} wants ${wanted}`).toBe(true);
  }
});

test('the sources have an oldest Node of their own', () => {
  expect(readFileSync('scripts/setup.mjs', 'utf8')).toContain('OLDEST_NODE = 24;');
  expect(readFileSync('bin/baton', 'utf8')).toContain('oldest=24.0\n');
});
