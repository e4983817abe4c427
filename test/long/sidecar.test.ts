import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { afterEach, expect, test } from 'vitest';
import { stateWord } from '../../src/core/instance-words.ts';
import { connectRemote } from '../../src/rpc/clients.ts';
import { startSim } from '../../src/sim/start-sim.ts';
import { startBatonProcess } from '../support/baton-process.ts';
import { hasTool, skipWithout } from '../support/tools.ts';
import { waitUntil } from '../support/wait.ts';

let stack = new AsyncDisposableStack();
afterEach(async () => {
  await stack.disposeAsync();
  stack = new AsyncDisposableStack();
});

interface Sidecar {
  readonly child: ChildProcess;
  readonly told: () => string;
  readonly end: (signal: 'SIGTERM' | 'SIGKILL') => Promise<number | null>;
}

function startSidecar(registry: string, engine: string): Sidecar {
  const child = spawn('examples/sidecar/register.py', [engine, 'decode'], {
    env: { ...process.env, BATON_REGISTRY_URL: `http://${registry}`, LEASE_SECONDS: '3' },
    stdio: ['ignore', 'pipe', 'pipe'],
  });
  let told = '';
  for (const stream of [child.stdout, child.stderr]) stream.on('data', (chunk) => (told += String(chunk)));
  const exited = once(child, 'exit');
  const end = async (signal: 'SIGTERM' | 'SIGKILL') => {
    child.kill(signal);
    await exited;
    return child.exitCode;
  };
  stack.defer(async () => void (await end('SIGKILL')));
  return { child, told: () => told, end };
}

test('the sidecar registers its engine, again with a registry that forgot it, and takes it out; without it the lease ends', async (context) => {
  if (!(await hasTool('python3', ['--version']))) skipWithout(context, 'python3');
  const sim = await startSim({ role: 'decode' });
  stack.defer(() => sim.close());
  const args = ['--roles', 'registry', '--decode', 'http://127.0.0.1:9'];
  let baton = await startBatonProcess(args);
  stack.defer(async () => void (await baton.end('SIGKILL')));
  const { poolRegistry } = stack.use(connectRemote({ url: `http://${baton.rpc}` }));
  const instanceId = new URL(sim.url).host;
  const state = async () => {
    const found = await poolRegistry.getInstance({ instanceId }).catch(() => undefined);
    return found?.instance === undefined
      ? 'unknown'
      : `${stateWord(found.instance.state)} ${found.instance.stateReason}`;
  };

  const first = startSidecar(baton.rpc, sim.url);
  await waitUntil(async () => (await state()) === 'ready probe_ok');
  await baton.end('SIGKILL');
  await waitUntil(() => first.told().includes('no registry:'));
  baton = await startBatonProcess([...args, '--rpc-port', baton.rpc.split(':')[1] ?? '']);
  await waitUntil(async () => (await state()) === 'ready probe_ok');
  expect(first.told()).toContain('refused: not_found: ');
  expect(first.told().match(/^registered \S+, generation 1$/gm)).toHaveLength(2);
  expect(await first.end('SIGTERM')).toBe(0);
  expect(await state()).toBe('gone shutdown');

  const second = startSidecar(baton.rpc, sim.url);
  await waitUntil(async () => (await state()) === 'ready probe_ok');
  expect(second.told()).toContain('generation 2');
  await second.end('SIGKILL');
  await waitUntil(async () => (await state()) === 'gone lease_expired');
}, 60_000);

test('the sidecar says what is wrong with its words and ends', async (context) => {
  if (!(await hasTool('python3', ['--version']))) skipWithout(context, 'python3');
  const run = async (args: readonly string[], env: Readonly<Record<string, string>> = {}) => {
    const child = spawn('examples/sidecar/register.py', args, {
      env: { ...process.env, LEASE_SECONDS: '3', ...env },
      stdio: ['ignore', 'ignore', 'pipe'],
    });
    let told = '';
    child.stderr.on('data', (chunk) => (told += String(chunk)));
    await once(child, 'close');
    return { code: child.exitCode, told };
  };
  const usage = { code: 1, told: 'usage: register.py ENGINE_URL prefill|decode|both\n' };
  expect(await run([])).toEqual(usage);
  expect(await run(['http://127.0.0.1:9', 'nothing'])).toEqual(usage);
  const baton = await startBatonProcess(['--roles', 'registry', '--decode', 'http://127.0.0.1:9']);
  stack.defer(async () => void (await baton.end('SIGKILL')));
  const registry = { BATON_REGISTRY_URL: `http://${baton.rpc}` };
  const wrong = await run(['127.0.0.1:9', 'decode'], registry);
  expect(wrong.code).toBe(1);
  expect(wrong.told).toMatch(/^http:\S+ does not take 127\.0\.0\.1:9: instance\.url .*\n$/);
  expect((await run(['http://127.0.0.1:8', 'decode'], { ...registry, CONNECTOR: 'carrier-pigeon' })).told).toMatch(
    /does not take .*: instance\.connector /,
  );
}, 60_000);
