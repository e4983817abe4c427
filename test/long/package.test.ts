import { execFile } from 'node:child_process';
import { mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join, resolve } from 'node:path';
import { promisify } from 'node:util';
import { afterAll, beforeAll, describe, expect, type TestContext, test } from 'vitest';
import { startBatonProcess } from '../support/baton-process.ts';
import { hasTool, skipWithout } from '../support/tools.ts';

const run = promisify(execFile);
const scratch = mkdtempSync(join(tmpdir(), 'baton-package-'));
const tool = (name: string) => resolve('node_modules', '.bin', name);
let tarball = '';
afterAll(() => rmSync(scratch, { recursive: true, force: true }));

beforeAll(async () => {
  await run('npm', ['pack', '--pack-destination', scratch]);
  tarball = join(scratch, readdirSync(scratch).find((name) => name.endsWith('.tgz')) ?? '');
});

const NO_NETWORK = /\b(ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ENETUNREACH|EHOSTUNREACH|ETIMEDOUT|ENOTCACHED|E403)\b/;

/** Installs packages into a folder as somebody would who has that Node first in PATH. */
async function npmInstall(context: TestContext, folder: string, packages: readonly string[], path: string) {
  mkdirSync(folder, { recursive: true });
  writeFileSync(join(folder, 'package.json'), '{"private": true, "type": "module"}');
  const quiet = ['--no-audit', '--no-fund', '--loglevel=error', '--prefer-offline', '--ignore-scripts=false'];
  // Not the folder of this repository, which the npm that runs the tests has told in variables.
  const env = Object.fromEntries(Object.entries(process.env).filter(([name]) => !name.startsWith('npm_')));
  const options = { cwd: folder, env: { ...env, PATH: path }, timeout: 60_000 };
  const install = () => run('npm', ['install', ...quiet, ...packages], options);
  try {
    // Once more where a registry let the first call hang.
    await install().catch((error: { killed?: boolean }) => (error.killed === true ? install() : Promise.reject(error)));
  } catch (error) {
    if (error instanceof Error && 'stderr' in error && NO_NETWORK.test(String(error.stderr)))
      skipWithout(context, 'the package registry');
    throw error;
  }
}

/** The folder of a Node's binary: the one of this repository, or the oldest that the package says it runs on. */
async function nodeFolder(context: TestContext, version: string): Promise<string> {
  if (version === '26') return resolve('node_modules', 'node', 'bin');
  const folder = join(scratch, `node-${version}`);
  const name = `node-${process.platform}-${process.arch}`;
  await npmInstall(context, folder, [`${name}@${version}`], process.env['PATH'] ?? '');
  return join(folder, 'node_modules', name, 'bin');
}

const CLIENT = `
import { connectKvStore } from 'baton/client';
const store = connectKvStore({ url: process.argv[2] ?? '', budgetMs: 5000 });
const key = { model: 'm', conversationId: 'c' };
const tokenIds = Array.from({ length: 70 }, (_, id) => id);
const handle = '{"remote_engine_id":"e","remote_num_tokens":70,"remote_block_ids":[[1,2,3,4,5]]}';
const owner = { instanceId: 'd', engineId: 'e', incarnation: { engineId: 'e' } };
console.log((await store.put({ key, owner, handle, tokenIds, blockSize: 16 })).kind);
const claim = await store.take({ key, promptTokenIds: tokenIds });
if (claim.kind === 'taken') await claim.commit().then(() => console.log(claim.matchedTokens, claim.handle));
console.log(await store.take({ key, promptTokenIds: tokenIds }));
setImmediate(() => store[Symbol.dispose]());
`;

const SERVE = `
import { type Baton, serve } from 'baton';
const settings = { facade: { host: '127.0.0.1', port: 0 }, rpc: { port: 0 }, admin: { port: 'off' } };
await using baton: Baton = await serve({ settings, flags: { sim: 'true' }, log: { write: () => {} } });
const messages = [{ role: 'user', content: 'Name ten rivers of the world and the countries they flow through, please. '.repeat(4) }];
const ask = async (): Promise<void> => {
  const body = JSON.stringify({ model: 'sim-model', max_tokens: 8, conversation_id: 'c', messages });
  const headers = { 'content-type': 'application/json', 'x-baton-debug': '1' };
  const reply = await fetch('http://' + baton.addresses.facade + '/v1/chat/completions', { method: 'POST', headers, body });
  const { choices: [choice] } = await reply.json() as { choices: [{ message: { content: string } }] };
  console.log(reply.status, reply.headers.get('x-baton-plan'));
  messages.push({ role: 'assistant', content: choice.message.content }, { role: 'user', content: 'More.' });
};
await ask();
await ask();
await serve({ settings: { timeout: 3 } }).catch((error: Error) => console.log(error.message));
`;

const PROTO = `
import { createClient } from '@connectrpc/connect';
import { createConnectTransport } from '@connectrpc/connect-node';
import { KVCacheStore, MissReason, type TakeEntryResponse } from 'baton/proto';
const store = createClient(KVCacheStore, createConnectTransport({ baseUrl: process.argv[2] ?? '', httpVersion: '1.1' }));
const prompt = { case: 'tokenIds' as const, value: { tokenIds: [1, 2, 3] } };
const answer: TakeEntryResponse = await store.takeEntry({ idempotencyKey: 'k', key: { model: 'm', conversationId: 'x' }, prompt });
console.log(answer.result.case === 'miss' && answer.result.value.reason === MissReason.NEVER_STORED);
`;

describe.each(['22.19.0', '26'])('installed in a fresh folder on Node %s', (version) => {
  test('npx baton, and strict TypeScript on its entries', async (context) => {
    const node = await nodeFolder(context, version);
    const path = `${node}:${process.env['PATH']}`;
    const folder = join(scratch, `app-${version}`);
    await npmInstall(context, folder, [tarball], path);
    const env = { ...process.env, PATH: path };

    const { stdout } = await run('npx', ['baton', '--version'], { cwd: folder, env });
    const { version: packed } = JSON.parse(readFileSync('package.json', 'utf8'));
    expect(stdout).toContain(`baton ${packed} (`);
    expect(stdout).toContain(`node v${version}.`.replace(/\.0\.$/, '.0'));

    for (const [name, text] of Object.entries({ client: CLIENT, serve: SERVE, proto: PROTO }))
      writeFileSync(join(folder, `${name}.ts`), text);
    const options = {
      strict: true,
      skipLibCheck: false,
      module: 'nodenext',
      target: 'es2022',
      // What @connectrpc/connect names of the browser's types is not in those of Node.
      lib: ['es2022', 'esnext.disposable', 'dom'],
      typeRoots: [resolve('node_modules', '@types')],
      types: ['node'],
    };
    writeFileSync(join(folder, 'tsconfig.json'), JSON.stringify({ compilerOptions: options }));
    const tsc = await run(tool('tsc'), ['-p', folder]).catch((error: { stdout: string }) => error);
    expect(tsc.stdout).toBe('');

    await using store = await startBatonProcess(
      ['--roles', 'kvstore', '--admin-port', 'off'],
      { PATH: path },
      join(folder, 'node_modules', '.bin', 'baton'),
    );
    const out = async (file: string) =>
      (await run(join(node, 'node'), [join(folder, file), `http://${store.rpc}`])).stdout;
    expect(await out('client.js')).toMatch(
      /^stored\n70 \{"remote_engine_id":"e".*\n\{ kind: 'miss', reason: 'taken' \}\n$/,
    );
    expect(await out('proto.js')).toBe('true\n');
    expect(await out('serve.js')).toMatch(
      /^200 mode=prefill_decode;.*\n200 mode=prefill_decode_reuse;.*outcome=hit.*\nsettings:2:3: timeout: unknown key; did you mean timeouts\?\n$/,
    );
  });
});

test('publint and attw find nothing', async () => {
  const publint = await run(tool('publint'), ['run', tarball, '--strict', '--pack', 'false']).catch(
    (error: { stdout: string }) => error,
  );
  expect(publint.stdout).toContain('All good!');
  // Its exit code tells of problems; CommonJS is none of them.
  const attw = await run(tool('attw'), [tarball, '--profile', 'esm-only', '--no-color', '--no-emoji']);
  expect(attw.stdout.match(/"baton(\/client|\/proto)?" +│ OK \(ESM\)/g)).toHaveLength(3);
});

test('the contracts build with buf and protoc from what is shipped, without a network', async (context) => {
  const contracts = join(scratch, 'contracts');
  const [proto = ''] = readdirSync('dist').filter((name) => /^baton-proto-.*\.tgz$/.test(name));
  mkdirSync(contracts);
  await run('tar', ['-xzf', join('dist', proto), '-C', contracts]);
  await run('tar', ['-xzf', tarball, '-C', scratch]);
  for (const folder of [contracts, join(scratch, 'package', 'proto')]) {
    await run(tool('buf'), ['build', folder, '-o', join(scratch, 'image.binpb')]);
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
