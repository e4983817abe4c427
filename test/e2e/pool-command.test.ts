import { createHash } from 'node:crypto';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, expect, test } from 'vitest';
import { parseCommand } from '../../src/cli/parse-command.ts';
import { runPool } from '../../src/cli/pool-command.ts';
import { type Sim, startSim } from '../../src/sim/start-sim.ts';
import { configOf, startQuietly } from '../support/harness.ts';
import { waitUntil } from '../support/wait.ts';

const stack = new AsyncDisposableStack();
const DEAD = 'http://127.0.0.1:9';
let url = '';
let token = '';
let sim: Sim;

beforeAll(async () => {
  const folder = mkdtempSync(join(tmpdir(), 'baton-'));
  stack.defer(() => rmSync(folder, { recursive: true }));
  const tokens = join(folder, 'tokens');
  token = join(folder, 'operator.token');
  const hash = (text: string) => createHash('sha256').update(text).digest('hex');
  writeFileSync(tokens, `ops sha256:${hash('top')} operator\nall sha256:${hash('low')}\n`);
  writeFileSync(token, 'top\n');
  sim = await startSim({ role: 'decode' });
  stack.defer(() => sim.close());
  const flags = { roles: 'registry', prefill: [DEAD], 'rpc-tokens-file': tokens };
  const { baton } = await startQuietly(configOf(flags, 'health: { interval: 100ms }'));
  stack.defer(() => baton.stop());
  url = `http://${baton.addresses.rpc}`;
});
afterAll(() => stack.disposeAsync());

interface Ran {
  code: number | undefined;
  out: string;
  err: string;
  readonly stop: () => void;
  readonly done: Promise<void>;
}

/** Runs `baton pool ...` as its command line says. */
function begin(words: readonly string[], env: Readonly<Record<string, string>> = {}): Ran {
  const { promise, resolve } = Promise.withResolvers<void>();
  const command = parseCommand(['pool', ...words], () => 'v');
  const ran: Ran = { code: undefined, out: '', err: '', stop: resolve, done: Promise.resolve() };
  if (command.kind !== 'pool') return { ...ran, code: 2, err: command.kind === 'usage' ? command.message : '' };
  const host = {
    env,
    out: (text: string) => {
      ran.out += text;
    },
    err: (text: string) => {
      ran.err += text;
    },
    stopRequested: () => promise,
  };
  const done = runPool(host, command.request).then((code) => {
    ran.code = code;
  });
  return Object.assign(ran, { done });
}

async function run(...words: readonly string[]): Promise<Ran> {
  const ran = begin([...words, '--registry-url', url, '--token-file', token]);
  await ran.done;
  return ran;
}

test('adds, lists, drains, resumes and removes an engine of a running registry', async () => {
  const watch = begin(['watch', '--json', '--registry-url', url, '--token-file', token]);
  expect(await run('add', sim.url, '--role', 'decode', '--id', 'd1', '--label', 'zone=a')).toMatchObject({
    code: 0,
    out: 'd1: starting\n',
  });
  await waitUntil(async () => (await run('list', '--state', 'ready')).out.includes('d1'));
  const lines = (await run('list')).out.split('\n');
  expect(lines[0]).toMatch(/^ID +ROLE +STATE +REASON +LOAD +KV +PINS +GEN +MODELS +URL$/);
  expect(lines[1]).toMatch(
    /^127\.0\.0\.1:9 +prefill +starting +probe_refused +- +- +- +1 +\? +http:\/\/127\.0\.0\.1:9$/,
  );
  expect(lines[2]).toMatch(/^d1 +decode +ready +probe_ok +0 +0% +(?:-|0%) +1 +sim-model +http:/);
  const wide = (await run('list', '-o', 'wide')).out.split('\n');
  expect(wide[0]).toMatch(/ URL +ENGINE +BLOCK +BLOCKS +GROUPS +HANDLES +BIDI +EXPIRED +TOKENIZE$/);
  expect(wide[1]).toMatch(/ - +- +- +- +- +auto +- +-$/);
  expect(wide[2]).toMatch(/ vllm 0\.33\.0 +16 +\d+ +- +- +auto +0 +add_generation_prompt,.*tools$/);
  expect(JSON.parse((await run('list', '--json', '--role', 'decode')).out)).toMatchObject([
    { id: 'd1', role: 'ROLE_DECODE', state: 'INSTANCE_STATE_READY', labels: { zone: 'a' } },
  ]);
  expect(await run('drain', 'd1', '--reason', 'update')).toMatchObject({ code: 0, out: 'd1: draining\n' });
  expect((await run('list', '--state', 'draining')).out).toMatch(/d1 +decode +draining +update/);
  expect(await run('resume', 'd1')).toMatchObject({ code: 0, out: 'd1: suspect\n' });
  await waitUntil(async () => (await run('list', '--state', 'ready')).out.includes('d1'));
  expect(await run('remove', 'nosuch', 'd1', '--json')).toMatchObject({
    code: 1,
    out: '{"id":"nosuch","result":"was not there"}\n{"id":"d1","result":"removed"}\n',
    err: 'baton: the registry does not know nosuch\n',
  });
  expect((await run('list')).out).not.toContain('d1');
  expect((await run('list', '--all')).out).toMatch(/d1 +decode +gone +operator/);
  expect((await run('list', '--state', 'ready')).out).toBe('no engines\n');
  expect(await run('resume', 'd1')).toMatchObject({
    code: 1,
    err: 'baton: d1 is gone (operator) and is not resumed: add it again, or let its source name it anew\n',
  });

  await waitUntil(() => watch.out.includes('"removed":{"instanceId":"d1","reason":"operator"}'));
  watch.stop();
  await watch.done;
  expect(watch.code).toBe(0);
  const states = [...watch.out.matchAll(/"id":"d1".*?"state":"INSTANCE_STATE_(\w+)"/g)].map(([, state]) => state);
  expect([...new Set(states)]).toEqual(['STARTING', 'READY', 'DRAINING', 'SUSPECT']);
});

test('waits for the end of a drain, and stops to wait when it is interrupted', async () => {
  await run('add', `${sim.url}/two`, '--role', 'decode', '--id', 'd2');
  const waiting = begin(['drain', 'd2', '--wait', '--registry-url', url, '--token-file', token]);
  await waitUntil(() => waiting.out.includes('d2: draining'));
  await run('remove', 'd2');
  await waiting.done;
  expect(waiting).toMatchObject({ code: 0, out: 'd2: draining\nd2: gone\n' });
  const endless = begin(['drain', '127.0.0.1:9', '--wait', '--registry-url', url, '--token-file', token]);
  await waitUntil(() => endless.out !== '');
  endless.stop();
  await endless.done;
  expect(endless).toMatchObject({ code: 1, err: 'baton: interrupted\n' });
});

test.each<readonly [string, readonly string[], number, RegExp]>([
  ['an id that is not known', ['drain', 'nobody'], 1, /^baton: the registry does not know nobody\n$/],
  ['a URL of nothing', ['add', 'nonsense', '--role', 'both'], 1, /^baton: instance\.url is no base URL of an engine/],
  ['a reason of two words', ['remove', 'x', '--reason', 'Two words'], 1, /^baton: reason is not a snake_case word/],
  [
    'a connector of nobody',
    ['add', DEAD, '--role', 'both', '--connector', 'x'],
    1,
    /^baton: instance\.connector is not/,
  ],
  ['no role', ['add', DEAD], 2, /required option '--role <role>' not specified/],
  ['a role of nobody', ['list', '--role', 'cook'], 2, /Allowed choices are prefill, decode, both/],
  ['a label without a value', ['add', DEAD, '--role', 'both', '--label', 'x'], 2, /expected name=value/],
  ['no id', ['drain'], 2, /missing required argument 'id'/],
])('says what is wrong with %s', async (_, words, code, message) => {
  const ran = await run(...words);
  expect(ran.code, ran.err).toBe(code);
  expect(ran.err).toMatch(message);
});

test('says how a registry is reached, and what it wants', async () => {
  const alone = async (words: readonly string[], env: Readonly<Record<string, string>> = {}) => {
    const ran = begin(words, env);
    await ran.done;
    return `${ran.code} ${ran.err}`;
  };
  const at = ['--registry-url', url];
  expect(await alone(['list', '--registry-url', DEAD])).toMatch(
    /^1 baton: no registry answers at http:\/\/127\.0\.0\.1:9 .*: nothing listens there$/m,
  );
  expect(await alone(['list', '--registry-url', 'nonsense:1:2'])).toMatch(/^2 baton: --registry-url: /);
  expect(await alone(['list', '--token-file', '/nowhere', ...at])).toMatch(/^2 baton: --token-file: .* does not exist/);
  expect(await alone(['list', '--ca', import.meta.filename, ...at])).toMatch(/^2 baton: --ca: .* holds no certificate/);
  expect(await alone(['list', '--registry-url', url.replace('http:', 'https:')])).toMatch(
    /^1 baton: no registry answers at https:.*: it does not speak TLS/,
  );
  expect(await alone(['list', ...at])).toMatch(/^1 baton: a token is needed.*--token-file/);
  expect(await alone(['list', ...at], { BATON_RPC_TOKEN: 'low' })).toBe('0 ');
  expect(await alone(['list'], { BATON_RPC_TOKEN: 'low', BATON_REGISTRY_URL: url })).toBe('0 ');
  expect(await alone(['remove', 'x', ...at], { BATON_RPC_TOKEN: 'low' })).toMatch(
    /^1 baton: the method needs an operator/,
  );
});

test('an engine under a mistyped path is never ready, and the listing says why', async () => {
  for (const [id, path] of [
    ['typo', '/foo'],
    ['v1', '/v1'],
  ] as const) {
    expect((await run('add', `${sim.url}${path}`, '--role', 'decode', '--id', id)).code).toBe(0);
    await waitUntil(async () =>
      new RegExp(`^${id} +decode +starting +probe_no_engine `, 'm').test((await run('list')).out),
    );
    expect((await run('remove', id)).code).toBe(0);
  }
});
