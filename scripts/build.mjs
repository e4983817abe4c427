// Emits dist/ and proves that it starts: JavaScript, declarations, source maps and the other files of src/ for the npm
// package, the contracts, the manual page, and, without --package, the executable.
import { execFileSync, spawnSync } from 'node:child_process';
import { cpSync, rmSync, writeFileSync } from 'node:fs';
import { extname, join } from 'node:path';
import { readOrigin } from './origin.mjs';

const root = join(import.meta.dirname, '..');

function run(command, args) {
  const { status } = spawnSync(command, args, { cwd: root, stdio: 'inherit' });
  if (status !== 0) process.exit(status ?? 1);
}

const origin = readOrigin();
rmSync(join(root, 'dist'), { recursive: true, force: true });
run(join(root, 'node_modules', '.bin', 'tsc'), ['-p', 'tsconfig.build.json']);
// Pages and other data that the sources read beside themselves.
cpSync(join(root, 'src'), join(root, 'dist', 'src'), { recursive: true, filter: (path) => extname(path) !== '.ts' });
// The contracts with all that they import, for clients in other languages: one folder to point buf or protoc at.
const contracts = [
  '-C',
  join(root, 'proto'),
  'baton',
  '-C',
  join(root, 'third_party', 'proto'),
  'google',
  'grpc',
  'LICENSE',
];
run('tar', ['-czf', join('dist', `baton-proto-${origin.version}.tgz`), ...contracts]);
writeFileSync(join(root, 'dist', 'origin.json'), `${JSON.stringify(origin)}\n`);
writeFileSync(
  join(root, 'dist', 'baton.1'),
  execFileSync(process.execPath, [join(root, 'dist', 'src', 'bin.js'), 'man']),
);
run(process.execPath, [join('dist', 'src', 'bin.js'), '--version']);
if (!process.argv.includes('--package')) run(process.execPath, [join('scripts', 'executable.mjs')]);
