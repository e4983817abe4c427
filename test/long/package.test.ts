import { execFile } from 'node:child_process';
import { mkdirSync, mkdtempSync, readdirSync, rmSync, symlinkSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join, resolve } from 'node:path';
import { promisify } from 'node:util';
import { afterAll, beforeAll, expect, test } from 'vitest';
import { startBatonProcess } from '../support/baton-process.ts';
import { hasTool, skipWithout } from '../support/tools.ts';

const run = promisify(execFile);
const scratch = mkdtempSync(join(tmpdir(), 'baton-package-'));
const installed = join(scratch, 'node_modules', 'baton');
const contracts = join(scratch, 'contracts');
afterAll(() => rmSync(scratch, { recursive: true, force: true }));

beforeAll(async () => {
  await run('npm', ['pack', '--pack-destination', scratch]);
  const [tarball = ''] = readdirSync(scratch).filter((name) => name.endsWith('.tgz'));
  mkdirSync(installed, { recursive: true });
  await run('tar', ['-xzf', join(scratch, tarball), '-C', installed, '--strip-components', '1']);
  // What npm would install beside it.
  for (const name of readdirSync('node_modules')) {
    if (!name.startsWith('.') && name !== 'baton')
      symlinkSync(resolve('node_modules', name), join(scratch, 'node_modules', name));
  }
  mkdirSync(contracts);
  const [proto = ''] = readdirSync('dist').filter((name) => /^baton-proto-.*\.tgz$/.test(name));
  await run('tar', ['-xzf', join('dist', proto), '-C', contracts]);
});

const CLIENT = `
import { connectKvStore } from 'baton/client';
const store = connectKvStore({ url: process.argv[2] ?? '', budgetMs: 5000 });
const key = { model: 'm', conversationId: 'c' };
const tokenIds = Array.from({ length: 70 }, (_, id) => id);
const handle = '{"remote_engine_id":"e","remote_num_tokens":70,"remote_block_ids":[[1,2,3,4,5]]}';
const owner = { instanceId: 'd', engineId: 'e', incarnation: { engineId: 'e' } };
console.log((await store.put({ key, owner, handle, tokenIds, blockSize: 16 })).kind);
await using claim = await store.take({ key, promptTokenIds: tokenIds }) as Extract<Awaited<ReturnType<typeof store.take>>, AsyncDisposable>;
console.log(claim.matchedTokens, claim.handle);
console.log(await store.take({ key, promptTokenIds: tokenIds }));
setImmediate(() => store[Symbol.dispose]());
`;

test('a strict TypeScript client of baton/client compiles and runs', async () => {
  writeFileSync(join(scratch, 'client.ts'), CLIENT);
  writeFileSync(join(scratch, 'package.json'), '{"type": "module"}');
  const options = { strict: true, module: 'nodenext', target: 'es2024', lib: ['es2024', 'esnext.disposable', 'dom'] };
  const types = { types: ['node'], skipLibCheck: false, outDir: 'out', rootDir: '.' };
  writeFileSync(
    join(scratch, 'tsconfig.json'),
    JSON.stringify({ compilerOptions: { ...options, ...types }, files: ['client.ts'] }),
  );
  const tsc = await run(resolve('node_modules/.bin/tsc'), ['-p', scratch]).catch((error: { stdout: string }) => error);
  expect(tsc.stdout).toBe('');
  await using store = await startBatonProcess(['--roles', 'kvstore', '--admin-port', 'off']);
  const { stdout } = await run(process.execPath, [join(scratch, 'out', 'client.js'), `http://${store.rpc}`]);
  expect(stdout).toContain('stored\n70 {"remote_engine_id":"e"');
  expect(stdout).toContain("reason: 'taken'");
});

test('the contracts build with buf and protoc from what is shipped, without a network', async (context) => {
  for (const folder of [contracts, join(installed, 'proto')]) {
    await run(resolve('node_modules/.bin/buf'), ['build', folder, '-o', join(scratch, 'image.binpb')]);
  }
  if (!(await hasTool('python3', ['-c', 'import venv, ensurepip']))) skipWithout(context, 'python3 with venv');
  const python = join(scratch, 'venv', 'bin', 'python');
  await run('python3', ['-m', 'venv', join(scratch, 'venv')]);
  await run(python, ['-m', 'pip', 'install', '--quiet', '-r', 'examples/python-router/requirements.txt'], {
    timeout: 200_000,
  });
  const files = readdirSync(join(contracts, 'baton', 'v1')).map((name) => join('baton', 'v1', name));
  const others = [
    'google/rpc/error_details.proto',
    'grpc/health/v1/health.proto',
    'grpc/reflection/v1/reflection.proto',
  ];
  const set = join(scratch, 'set.binpb');
  await run(python, ['-m', 'grpc_tools.protoc', '-I', contracts, '-o', set, ...files, ...others]);
});
