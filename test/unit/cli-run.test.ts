import { once } from 'node:events';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { type AddressInfo, createServer } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { describe, expect, onTestFinished, test } from 'vitest';
import { type CliHost, runCli } from '../../src/cli/run.ts';
import { simHint } from '../../src/cli/sim-hint.ts';
import type { Config } from '../../src/config/config.ts';
import { cliHost } from '../support/cli-host.ts';

function fixture(name: string): string {
  return fileURLToPath(new URL(`../fixtures/config/${name}`, import.meta.url));
}

/** A command line in a process that is not there; everything it does is recorded. */
function fakeHost(line: string, parts: Partial<CliHost> = {}) {
  const told = { events: [] as string[], configs: [] as Config[] };
  const { host, seen } = cliHost(line.split(' '), {
    start: async (config) => {
      told.configs.push(config);
      told.events.push('start');
      return {
        addresses: { facade: '0.0.0.0:4321' },
        stop: async ({ settle = false } = {}) => {
          told.events.push(settle ? 'settle and stop' : 'stop');
        },
        reload: (cause) => told.events.push(cause),
      };
    },
    stopRequested: async () => {
      told.events.push('asked to stop');
      return 'SIGINT';
    },
    ...parts,
  });
  return { host, seen: Object.assign(seen, told) };
}

describe('serve', () => {
  test('starts, waits for the request to stop, stops', async () => {
    const { host, seen } = fakeHost('serve --port 4321');
    expect(await runCli(host)).toBe(0);
    expect(seen.events).toEqual(['start', 'asked to stop', 'stop']);
    expect(seen.configs[0]?.facade.port).toBe(4321);
    expect(seen.out).toBe('');
  });

  test('a supervisor that stops it has load balancers before it', async () => {
    const { host, seen } = fakeHost('serve --port 4321', { stopRequested: async () => 'SIGTERM' });
    expect(await runCli(host)).toBe(0);
    expect(seen.events).toEqual(['start', 'settle and stop']);
  });

  test('a mistake is 2, names the flag in one line, and nothing starts', async () => {
    const { host, seen } = fakeHost('serve --prefiller-host a b --prefiller-port 1');
    expect(await runCli(host)).toBe(2);
    expect(seen.err).toBe(
      '--prefiller-host and --prefiller-port: give as many ports as hosts, got 2 hosts and 1 port\n',
    );
    expect(seen.events).toEqual([]);
  });

  test('a word that is not understood is 2', async () => {
    const { host, seen } = fakeHost('serve --prot 1');
    expect(await runCli(host)).toBe(2);
    expect(seen.err).toBe("baton: unknown option '--prot'; did you mean --port?\n");
  });

  test('only policies and connectors of this build are known', async () => {
    for (const line of ['serve --policy nope', 'serve --kv-connector nope']) {
      const { host, seen } = fakeHost(line);
      expect(await runCli(host)).toBe(2);
      expect(seen.err).toMatch(/^--(policy|kv-connector): expected one of .*(round_robin|nixl)/);
    }
  });

  test('a failed start is 1', async () => {
    const { host, seen } = fakeHost('serve', {
      start: () => Promise.reject(new Error('port 8000 is in use (--port)')),
    });
    expect(await runCli(host)).toBe(1);
    expect(seen.err).toBe('baton: port 8000 is in use (--port)\n');
  });

  test('warnings are log lines', async () => {
    const { host, seen } = fakeHost('serve --decode http://d:1 --log-format json');
    expect(await runCli(host)).toBe(0);
    expect(JSON.parse(seen.err)).toMatchObject({ level: 'warn', msg: expect.stringContaining('no prefill engine') });
  });

  test('the file is read from --config or BATON_CONFIG', async () => {
    const file = fixture('full.yaml');
    const byFlag = fakeHost(`serve --config ${file}`);
    const byVariable = fakeHost('serve', { env: { BATON_CONFIG: file } });
    for (const { host, seen } of [byFlag, byVariable]) {
      expect(await runCli(host)).toBe(0);
      expect(seen.configs[0]?.facade.port).toBe(9000);
    }
    const { host, seen } = fakeHost('serve --config /nowhere/baton.yaml');
    expect(await runCli(host)).toBe(2);
    expect(seen.err).toBe('--config: /nowhere/baton.yaml does not exist\n');
  });

  test('simulated engines come with a request to paste', async () => {
    const { host, seen } = fakeHost('serve --sim');
    expect(await runCli(host)).toBe(0);
    expect(seen.out).toContain('curl http://127.0.0.1:4321/v1/chat/completions');
    const off = fakeHost('serve --sim', {
      start: async () => ({ addresses: { facade: 'off' }, stop: async () => {}, reload: () => {} }),
    });
    expect(await runCli(off.host)).toBe(0);
    expect(off.seen.out).toBe('');
    const lonely = fakeHost('serve --sim --sim-prefill 0');
    expect(await runCli(lonely.host)).toBe(0);
    expect(lonely.seen.out).toBe('');
    expect(lonely.seen.err).toContain('--sim-prefill 0: no prefill engine is simulated');
  });
});

describe('check-config', () => {
  test('a good file is counted', async () => {
    const file = fixture('full.yaml');
    const { host, seen } = fakeHost(`check-config ${file}`, { env: { BATON_PORT: 'nonsense' } });
    expect(await runCli(host)).toBe(0);
    expect(seen.out).toBe(`${file}: ok (1 prefill, 1 decode, 0 both)\n`);
    expect(seen.err).toMatch(/^warning: .*full\.yaml:\d+:\d+: "history" is unsafe/);
  });

  test('a bad file is 2, one line a mistake', async () => {
    const file = fixture('broken.yaml');
    const { host, seen } = fakeHost(`check-config ${file}`);
    expect(await runCli(host)).toBe(2);
    expect(seen.err.trim().split('\n')).toHaveLength(9);
    for (const line of seen.err.trim().split('\n')) expect(line.startsWith(`${file}:`)).toBe(true);
  });

  test('a file that is not there is 2', async () => {
    const { host, seen } = fakeHost('check-config /nowhere.yaml');
    expect(await runCli(host)).toBe(2);
    expect(seen.err).toBe('baton: /nowhere.yaml does not exist\n');
  });
});

describe('keys of clients', () => {
  const keysFile = (text: string): string => {
    const folder = mkdtempSync(join(tmpdir(), 'baton-keys-'));
    onTestFinished(() => rmSync(folder, { recursive: true }));
    const file = join(folder, 'keys.txt');
    writeFileSync(file, text);
    return file;
  };

  test('hash-key makes a line that serve takes', async () => {
    const { host, seen } = fakeHost('hash-key', { readLine: async () => Buffer.from('key-a\n') });
    expect(await runCli(host)).toBe(0);
    const started = fakeHost(`serve --api-keys-file ${keysFile(`# clients\nteam-a ${seen.out}`)}`);
    expect(await runCli(started.host)).toBe(0);
    expect(started.seen.events).toContain('start');
  });

  test('hash-key without a key is 2', async () => {
    const { host, seen } = fakeHost('hash-key');
    expect(await runCli(host)).toBe(2);
    expect(seen).toMatchObject({ out: '', err: 'baton: no key on standard input\n' });
  });

  test('a mistake in their file is 2 and names the line, and nothing starts', async () => {
    const file = keysFile('\nteam-a key-a\n');
    const { host, seen } = fakeHost(`serve --api-keys-file ${file}`);
    expect(await runCli(host)).toBe(2);
    expect(seen.err).toMatch(/^[^\n]*keys\.txt:2: expected a tenant and a hash[^\n]*\n$/);
    expect(seen.err).not.toContain('key-a');
    expect(seen.events).toEqual([]);
    const missing = fakeHost('serve --api-keys-file /nowhere/keys.txt');
    expect(await runCli(missing.host)).toBe(2);
    expect(missing.seen.err).toBe('auth.api_keys_file (--api-keys-file): /nowhere/keys.txt does not exist\n');
  });

  test('their file is for the facade: elsewhere it is not read', async () => {
    const { host, seen } = fakeHost('serve --roles kvstore --log-level error --api-keys-file /nowhere/keys.txt');
    expect(await runCli(host)).toBe(0);
    expect(seen.err).toBe('');
  });
});

test('sim: a port in use is 1 and names the flag', async () => {
  const blocker = createServer().listen(0, '127.0.0.1');
  await once(blocker, 'listening');
  const { port } = blocker.address() as AddressInfo;
  for (const flag of ['--port', '--side-port']) {
    const { host, seen } = fakeHost(`sim --port 0 ${flag} ${port}`);
    expect(await runCli(host)).toBe(1);
    expect(seen.err).toBe(`baton: port ${port} is in use (${flag})\n`);
  }
  blocker.close();
});

test('version goes to standard output', async () => {
  const { host, seen } = fakeHost('--version');
  expect(await runCli(host)).toBe(0);
  expect(seen).toMatchObject({ out: 'baton 1.2.3 (commit c0ffee, node v0)\n', err: '' });
});

test('the request to paste goes to an address that a shell here can reach', () => {
  expect(simHint('0.0.0.0:8000')).toContain('curl http://127.0.0.1:8000/v1/');
  expect(simHint('[::]:8000')).toContain('curl http://[::1]:8000/v1/');
  expect(simHint('http://10.0.0.1:8000/')).toContain('curl http://10.0.0.1:8000/v1/');
  expect(simHint('0.0.0.0:8000', true)).toContain('curl -k https://127.0.0.1:8000/v1/');
});
