// Emits dist/ (JavaScript, declarations, source maps, and the other files of src/) and proves that it starts.
import { spawnSync } from 'node:child_process';
import { cpSync, readFileSync, rmSync } from 'node:fs';
import { extname, join } from 'node:path';

const root = join(import.meta.dirname, '..');

function run(command, args) {
  const { status } = spawnSync(command, args, { cwd: root, stdio: 'inherit' });
  if (status !== 0) process.exit(status ?? 1);
}

rmSync(join(root, 'dist'), { recursive: true, force: true });
run(join(root, 'node_modules', '.bin', 'tsc'), ['-p', 'tsconfig.build.json']);
// Pages and other data that the sources read beside themselves.
cpSync(join(root, 'src'), join(root, 'dist', 'src'), { recursive: true, filter: (path) => extname(path) !== '.ts' });
// The contracts with all that they import, for clients in other languages: one folder to point buf or protoc at.
const { version } = JSON.parse(readFileSync(join(root, 'package.json'), 'utf8'));
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
run('tar', ['-czf', join('dist', `baton-proto-${version}.tgz`), ...contracts]);
run(process.execPath, [join('dist', 'src', 'bin.js'), '--version']);
