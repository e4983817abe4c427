// Makes a release: npm run release -- <version> [--dry-run]
// Moves what is unreleased in CHANGELOG.md under the version, sets it in package.json and in deploy, refreshes the image
// that contracts are compared with, commits and tags, and puts into dist/release: the npm package, the contracts, the executable, an SBOM
// (CycloneDX) and SHA256SUMS. It pushes and publishes nothing. --dry-run does all of it in a clone that it throws away.
import { execFileSync } from 'node:child_process';
import { createHash } from 'node:crypto';
import {
  copyFileSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  symlinkSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { checkVersion, moveUnreleased } from './changelog.ts';
import { setDeployedVersion } from './deployed-version.ts';

class Refused extends Error {}

function main([version, ...rest]) {
  const dryRun = rest.includes('--dry-run');
  if (version === undefined || rest.some((word) => word !== '--dry-run'))
    throw new Refused('usage: npm run release -- <version> [--dry-run]');
  const root = join(import.meta.dirname, '..');
  if (!dryRun) return release(root, version);
  const scratch = mkdtempSync(join(tmpdir(), 'baton-release-'));
  try {
    const clone = join(scratch, 'baton');
    run(root, 'git', 'clone', '--quiet', root, clone);
    // Nobody has to be named for a commit that is thrown away.
    run(clone, 'git', 'config', 'user.name', 'dry run');
    run(clone, 'git', 'config', 'user.email', 'dry-run@localhost');
    symlinkSync(join(root, 'node_modules'), join(clone, 'node_modules'));
    if (run(root, 'git', 'status', '--porcelain') !== '') say('not committed, so not in this dry run: see git status');
    return release(clone, version);
  } finally {
    rmSync(scratch, { recursive: true, force: true });
  }
}

function release(root, version) {
  const manifest = read(root, 'package.json');
  const changelog = read(root, 'CHANGELOG.md');
  const tags = run(root, 'git', 'tag', '--list', 'v*').split('\n').filter(Boolean);
  // node_modules is a link in the clone of a dry run, which .gitignore does not name.
  const changed = run(root, 'git', 'status', '--porcelain', '--', '.', ':!node_modules');
  if (changed !== '') throw new Refused(`the work tree is not clean; commit or stash:\n${changed}`);
  const bad = checkVersion(version, tags);
  if (bad !== undefined) throw new Refused(bad);
  const moved = moveUnreleased(changelog, version, new Date().toISOString().slice(0, 10));
  if (moved === undefined) throw new Refused('CHANGELOG.md has nothing under [Unreleased]: say there what is new');

  write(root, 'CHANGELOG.md', moved.changelog);
  write(root, 'package.json', manifest.replace(/^( {2}"version": ")[^"]*/m, `$1${version}`));
  const lock = JSON.parse(read(root, 'package-lock.json'));
  lock.version = version;
  lock.packages[''].version = version;
  write(root, 'package-lock.json', `${JSON.stringify(lock, null, 2)}\n`);
  const manifests = readdirSync(join(root, 'deploy', 'kubernetes')).map((name) => join('deploy', 'kubernetes', name));
  for (const name of [join('deploy', 'helm', 'baton', 'Chart.yaml'), ...manifests])
    write(root, name, setDeployedVersion(read(root, name), version));
  run(root, 'npm', 'run', '--silent', 'proto:image');
  run(root, 'git', 'add', 'CHANGELOG.md', 'package.json', 'package-lock.json', 'proto', 'deploy');
  run(root, 'git', 'commit', '--quiet', '--message', `Release ${version}`);

  run(root, 'npm', 'run', '--silent', 'build');
  const folder = join(root, 'dist', 'release');
  mkdirSync(folder, { recursive: true });
  run(root, 'npm', 'pack', '--silent', '--ignore-scripts', '--pack-destination', folder);
  copyFileSync(join(root, 'dist', `baton-proto-${version}.tgz`), join(folder, `baton-proto-${version}.tgz`));
  const executable = `baton-${version}-${process.platform}-${process.arch}`;
  copyFileSync(join(root, 'dist', 'baton'), join(folder, executable));
  copyFileSync(join(root, 'dist', 'THIRD_PARTY_LICENSES'), join(folder, 'THIRD_PARTY_LICENSES'));
  const sbom = [
    'sbom',
    '--sbom-format',
    'cyclonedx',
    '--sbom-type',
    'application',
    '--package-lock-only',
    '--omit',
    'dev',
  ];
  writeFileSync(join(folder, `baton-${version}.cdx.json`), `${run(root, 'npm', ...sbom)}\n`);
  const names = readdirSync(folder).sort();
  const sums = names.map(
    (name) =>
      `${createHash('sha256')
        .update(readFileSync(join(folder, name)))
        .digest('hex')}  ${name}\n`,
  );
  writeFileSync(join(folder, 'SHA256SUMS'), sums.join(''));
  run(folder, 'sha256sum', '--check', '--quiet', 'SHA256SUMS');

  // Last, so that a release that could not be made has no tag.
  run(root, 'git', 'tag', '--annotate', `v${version}`, '--message', `baton ${version}\n\n${moved.notes}`);
  const head = run(root, 'git', 'show', '--stat', '--format=%h %s (%D)');
  say(`${head}\n${[...names, 'SHA256SUMS'].map((name) => `  ${name}`).join('\n')}\n${sums.join('')}`);
}

const read = (root, name) => readFileSync(join(root, name), 'utf8');
const write = (root, name, text) => writeFileSync(join(root, name), text);
const say = (text) => process.stdout.write(`${text}\n`);

function run(cwd, command, ...args) {
  // Variables of the npm that runs this name another folder.
  const env = Object.fromEntries(
    Object.entries(process.env).filter(([name]) => !/^npm_(config_local|package)/.test(name)),
  );
  try {
    return execFileSync(command, args, {
      cwd,
      env,
      encoding: 'utf8',
      stdio: ['ignore', 'pipe', 'pipe'],
      maxBuffer: 2 ** 26,
    }).trim();
  } catch (error) {
    throw new Refused(`${command} ${args[0]} failed: ${error.stderr || error.stdout || error.message}`);
  }
}

try {
  main(process.argv.slice(2));
} catch (error) {
  if (!(error instanceof Refused)) throw error;
  process.stderr.write(`release: ${error.message}\n`);
  process.exitCode = 1;
}
