import { execFileSync, spawnSync } from 'node:child_process';
import {
  chmodSync,
  copyFileSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, expect, onTestFinished, test } from 'vitest';
import { startBatonProcess } from '../support/baton-process.ts';
import { BATON } from '../support/executable.ts';
import { contentOf, post } from '../support/harness.ts';
import { startLaunch } from '../support/launch-process.ts';

const scratch = mkdtempSync(join(tmpdir(), 'baton-executable-'));
afterAll(() => rmSync(scratch, { recursive: true, force: true }));

/** A folder that holds nothing but the executable. */
function alone(): string {
  const folder = mkdtempSync(join(scratch, 'alone-'));
  copyFileSync(BATON, join(folder, 'baton'));
  onTestFinished(() => rmSync(folder, { recursive: true, force: true }));
  return folder;
}

function baton(args: readonly string[], env: Readonly<Record<string, string>> = {}, command = BATON) {
  const { status, stdout, stderr } = spawnSync(command, [...args], { encoding: 'utf8', env, cwd: scratch });
  return { status, out: stdout, err: stderr };
}

test('alone in a folder, without Node and PATH: two turns of a conversation, the second with reuse', async () => {
  const folder = alone();
  await using process = await startBatonProcess(['--sim'], { PATH: folder, HOME: folder }, join(folder, 'baton'));
  const messages = [{ role: 'user', content: 'Name ten rivers of the world and the countries they flow through.' }];
  const ask = async () => {
    const body = { model: 'sim-model', max_tokens: 40, messages };
    const headers = { 'x-session-id': 'rivers', 'x-baton-debug': '1' };
    const reply = await post(`${process.url}/v1/chat/completions`, body, { headers });
    expect(reply.status).toBe(200);
    return { text: contentOf(reply.text).texts[0] ?? '', plan: reply.headers.get('x-baton-plan') ?? '' };
  };
  const first = await ask();
  expect(first.plan).not.toContain('outcome=hit');
  await expect.poll(async () => (await fetch(`${process.url}/health`)).text()).toContain('"cached_conversations":1');
  messages.push({ role: 'assistant', content: first.text }, { role: 'user', content: 'More.' });
  expect((await ask()).plan).toContain('outcome=hit');
  expect(readdirSync(folder)).toEqual(['baton']);
});

test('--version: version, commit and Node', () => {
  const { version } = JSON.parse(readFileSync('package.json', 'utf8'));
  const commit = execFileSync('git', ['rev-parse', '--short=12', 'HEAD'], { encoding: 'utf8' }).trim();
  const said = baton(['--version']);
  expect(said).toMatchObject({ status: 0, err: '' });
  expect(said.out.replace('-dirty', '')).toBe(`baton ${version} (commit ${commit}, node ${process.version})\n`);
});

test('licenses: of baton, of Node and of every package inside', async () => {
  const { status, out } = baton(['licenses']);
  expect(status).toBe(0);
  const { build } = await import('esbuild');
  const { metafile } = await build({
    entryPoints: ['src/bin.ts'],
    bundle: true,
    write: false,
    metafile: true,
    platform: 'node',
    format: 'esm',
    loader: { '.node': 'empty' },
  });
  const inside = new Set(
    Object.keys(metafile.inputs).map((file) => /.*node_modules\/((?:@[^/]+\/)?[^/]+)\//.exec(file)?.[1]),
  );
  // It only looks for zeromq's library, which the executable finds by itself.
  inside.delete('cmake-ts');
  inside.delete(undefined);
  expect(inside.size).toBeGreaterThan(50);
  const titles = out.slice(0, out.indexOf('====')).split('\n');
  for (const name of inside)
    expect(
      titles.filter((title) => title.startsWith(`  ${name} `)),
      name,
    ).not.toEqual([]);
  expect(titles).toContain(`  Node ${process.versions.node}`);
  const { version: libzmq } = await import('zeromq');
  expect(titles).toContain(`  libzmq ${libzmq} (MPL-2.0)`);
  expect(out).toContain('Mozilla Public License Version 2.0');
  expect(baton(['licenses'], { ...process.env, PATH: process.env['PATH'] ?? '' }, 'bin/baton').status === 0).toBe(
    false,
  );
});

test('launch starts engines and baton from the one file', async () => {
  await using launch = await startLaunch(['--sim', '--prefill', '1', '--decode', '1', '--connector', 'lmcache']);
  await launch.seen(/up: /);
  const body = { model: 'sim-model', max_tokens: 4, messages: [{ role: 'user', content: 'Hello' }] };
  expect((await post(`${launch.url}/v1/chat/completions`, body)).status).toBe(200);
});

const LMCACHE = ['serve', '--sim', '--kv-connector', 'lmcache', '--proxy-host', '127.0.0.1'].concat(
  ['--port', '--rpc-port', '--admin-port', '--proxy-port'].flatMap((flag) => [flag, '0']),
);

test('temporary files: what cannot be written is told in one sentence, and nothing is left', async () => {
  expect(baton(LMCACHE, { TMPDIR: join(scratch, 'none') })).toMatchObject({
    status: 1,
    err: expect.stringMatching(
      /(^|\n)baton: cannot write the ZMQ library to \S+none \(ENOENT[^\n]*\): set TMPDIR to a folder that can be written and may hold programs\n$/,
    ),
  });
  const own = join(scratch, 'temporary');
  mkdirSync(own);
  await using _process = await startBatonProcess(LMCACHE.slice(1), { TMPDIR: own }, BATON);
  expect(readdirSync(own)).toEqual([]);
});

/** The executable with one byte of a part turned, found by what it alone holds: compiled code has texts without quotes. */
function damaged(near: string): string {
  const file = join(alone(), 'baton');
  const bytes = readFileSync(file);
  const at = bytes.lastIndexOf(near);
  expect(at).toBeGreaterThan(0);
  bytes.writeUInt8(bytes.readUInt8(at) ^ 1, at);
  writeFileSync(file, bytes);
  chmodSync(file, 0o755);
  return file;
}

const DAMAGED = (part: string) =>
  `baton: this executable is damaged: its part ${part} is not what was built; copy or download it again\n`;

const EXPLAIN = ['explain', 'none.json'];
const SERVE = ['serve', '--sim', ...['--port', '--rpc-port', '--admin-port'].flatMap((flag) => [flag, '0'])];

test('a changed part is told in one sentence', () => {
  expect(
    baton(['--version'], {}, damaged('.description("Control plane for disaggregated LLM serving: one OpenAI')),
  ).toEqual({
    status: 1,
    out: '',
    err: DAMAGED('program'),
  });
  expect(baton(EXPLAIN, {}, damaged('`reuse: the handle of an earlier turn, if'))).toEqual({
    status: 1,
    out: '',
    err: DAMAGED('sometimes'),
  });
  expect(baton(SERVE, {}, damaged('{guard},"reuse is not guarded'))).toMatchObject({
    status: 1,
    err: expect.stringMatching(new RegExp(`(^|\n)${DAMAGED('roles')}$`)),
  });
  expect(baton(['licenses'], {}, damaged('This executable contains:'))).toEqual({
    status: 1,
    out: '',
    err: DAMAGED('licenses'),
  });
});
