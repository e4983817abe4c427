// Brings node_modules in line with package-lock.json. Runs before `npm start`, `npm test` and the other scripts, on the
// caller's own Node (20 or later) and with nothing installed: plain JavaScript, built-in modules only.
import { spawnSync } from 'node:child_process';
import { createHash } from 'node:crypto';
import { existsSync, readFileSync, rmSync, unlinkSync, writeFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';

const root = join(dirname(fileURLToPath(import.meta.url)), '..');
const node = join(root, 'node_modules', '.bin', process.platform === 'win32' ? 'node.cmd' : 'node');
/** Holds the digest of the lock file that the last successful installation was made from. */
const stamp = join(root, 'node_modules', '.baton-setup');
const lock = join(root, '.baton-setup.lock');
/** Oldest Node that runs the sources: it strips types without a flag and knows `await using`. */
const OLDEST_NODE = 24;

function lockDigest() {
  return createHash('sha256')
    .update(readFileSync(join(root, 'package-lock.json')))
    .digest('hex');
}

function readPackages(file) {
  try {
    return JSON.parse(readFileSync(join(root, file), 'utf8')).packages;
  } catch {
    return undefined;
  }
}

/** Compares contents, not file times: a clone, a copy or a branch switch gives both files arbitrary times. */
function installedMatchesLock() {
  if (existsSync(stamp) && readFileSync(stamp, 'utf8') === lockDigest()) return true;
  // No stamp of this lock file: someone ran npm by hand. npm's own record tells whether that left the same packages.
  const wanted = readPackages('package-lock.json');
  const installed = readPackages('node_modules/.package-lock.json');
  if (wanted === undefined || installed === undefined || !existsSync(node)) return false;
  for (const [path, entry] of Object.entries(wanted)) {
    if (path === '') continue;
    const found = installed[path];
    // Optional packages are those of other platforms.
    if (found === undefined ? !entry.optional && !entry.devOptional : found.integrity !== entry.integrity) return false;
  }
  return Object.keys(installed).every((path) => path in wanted);
}

function npmCi() {
  // --include: NODE_ENV=production must not leave out the Node that runs the sources.
  // --ignore-scripts=false: the package `node` places its binary in an install script.
  const args = ['ci', '--include=dev', '--ignore-scripts=false', '--loglevel=error', '--no-audit', '--no-fund'];
  const env = { ...process.env };
  delete env.npm_config_local_prefix;
  const options = { cwd: root, env, encoding: 'utf8', stdio: ['ignore', 'pipe', 'pipe'] };
  const npm = process.env.npm_execpath;
  if (npm !== undefined && /npm-cli\.c?js$/.test(npm)) {
    // The client's own Node, because process.execPath may be inside the folder that npm is about to empty.
    return spawnSync(process.env.npm_node_execpath ?? process.execPath, [npm, ...args], options);
  }
  return spawnSync('npm', args, { ...options, shell: process.platform === 'win32' });
}

/** The packed Node is built for glibc; where it does not start, a recent enough system Node takes its place on PATH. */
function installedNodeRuns() {
  if (existsSync(node) && spawnSync(node, ['--version'], { shell: process.platform === 'win32' }).status === 0)
    return true;
  if (Number.parseInt(process.versions.node, 10) < OLDEST_NODE) return false;
  try {
    unlinkSync(node);
  } catch {
    // Not there: nothing shadows the system's Node.
  }
  return true;
}

/** One installation at a time: two of them tear out each other's folders. The file holds the process that installs. */
function lockInstallation() {
  for (let told = false; ; ) {
    try {
      writeFileSync(lock, String(process.pid), { flag: 'wx' });
      return;
    } catch (error) {
      if (error.code !== 'EEXIST') throw error;
    }
    if (!isInstalling()) {
      rmSync(lock, { force: true });
      continue;
    }
    if (!told) process.stderr.write('baton setup: waiting for another setup of this checkout\n');
    told = true;
    Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 500);
  }
}

function isInstalling() {
  try {
    return process.kill(Number(readFileSync(lock, 'utf8')), 0);
  } catch {
    return false;
  }
}

function main() {
  if (installedMatchesLock()) return stampInstallation();
  lockInstallation();
  try {
    return installedMatchesLock() ? stampInstallation() : install();
  } finally {
    rmSync(lock, { force: true });
  }
}

function stampInstallation() {
  if (!existsSync(stamp)) writeFileSync(stamp, lockDigest());
  return 0;
}

function install() {
  const started = Date.now();
  process.stderr.write('baton setup: installing the dependencies; this takes about half a minute\n');
  const result = npmCi();
  if (result.status !== 0) {
    process.stderr.write(`${result.stdout ?? ''}${result.stderr ?? ''}`);
    process.stderr.write(`baton setup: npm ci failed${result.error ? `: ${result.error.message}` : ''}\n`);
    return 1;
  }
  if (!installedNodeRuns()) {
    process.stderr.write(
      `baton setup: the Node that npm installed does not start and ${process.version} is older than ${OLDEST_NODE}: install a newer Node\n`,
    );
    return 1;
  }
  writeFileSync(stamp, lockDigest());
  process.stderr.write(`baton setup: installed the dependencies in ${Math.round((Date.now() - started) / 1000)} s\n`);
  return 0;
}

process.exitCode = main();
