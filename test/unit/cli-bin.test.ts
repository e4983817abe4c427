import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { type AddressInfo, connect, createServer } from 'node:net';
import { fileURLToPath } from 'node:url';
import { test } from 'vitest';

const BIN = fileURLToPath(new URL('../../src/bin.ts', import.meta.url));
const ANY_PORTS = [
  '--host',
  '127.0.0.1',
  '--port',
  '0',
  '--rpc-port',
  '0',
  '--admin-port',
  '0',
  '--log-format',
  'json',
];

// Each test waits for one or two processes, which takes long on a busy machine.
const LONG = { timeout: 60_000 };

/** Starts `baton` as its users do, without the variables of this test run. */
function start(atEnd: (end: () => void) => void, ...args: string[]) {
  const child = spawn(process.execPath, [BIN, ...args], {
    env: { PATH: process.env['PATH'], BATON_DRAIN_SETTLE: '0' },
  });
  atEnd(() => void child.kill('SIGKILL'));
  const output = { out: '', err: '' };
  child.stdout.on('data', (chunk: Buffer) => {
    output.out += chunk.toString();
  });
  child.stderr.on('data', (chunk: Buffer) => {
    output.err += chunk.toString();
  });
  const ended = once(child, 'close').then(([code, signal]: unknown[]) => ({ code, signal, ...output }));
  /** Resolves with the first log line that has the message. */
  const logged = async (message: string): Promise<Record<string, unknown>> => {
    for (;;) {
      const line = output.err.split('\n').find((each) => each.includes(`"msg":"${message}"`));
      if (line !== undefined) return JSON.parse(line) as Record<string, unknown>;
      if (child.exitCode !== null || child.signalCode !== null)
        throw new Error(`baton ended before "${message}":\n${output.err}`);
      await Promise.race([once(child.stderr, 'data'), ended]);
    }
  };
  return { child, ended, logged };
}

test.concurrent('--version: version and Node', LONG, async ({ expect, onTestFinished }) => {
  expect(await start(onTestFinished, '--version').ended).toEqual({
    code: 0,
    signal: null,
    out: expect.stringMatching(
      /^baton \d+\.\d+\.\d+ \(commit ([0-9a-f]{12}(-dirty)?|unknown), node v\d+\.\d+\.\d+\)\n$/,
    ),
    err: '',
  });
});

test.concurrent(
  'bad usage: exit code 2 and one sentence that names the flag',
  LONG,
  async ({ expect, onTestFinished }) => {
    expect(await start(onTestFinished, 'serve', '--rpc-port', '70000').ended).toMatchObject({
      code: 2,
      out: '',
      err: expect.stringMatching(/^--rpc-port: expected a port from 0 to 65535 [^\n]*\n$/),
    });
  },
);

test.concurrent('a port in use: exit code 1 and the flag', LONG, async ({ expect, onTestFinished }) => {
  const blocker = createServer().listen(0, '127.0.0.1');
  await once(blocker, 'listening');
  const { port } = blocker.address() as AddressInfo;
  const result = await start(onTestFinished, 'serve', ...ANY_PORTS, '--port', String(port)).ended;
  blocker.close();
  expect(result).toMatchObject({ code: 1, err: expect.stringContaining(`port ${port} is in use (--port)`) });
});

test.concurrent('sim: the engine answers until SIGTERM', LONG, async ({ expect, onTestFinished }) => {
  const { child, ended } = start(onTestFinished, 'sim', '--role', 'prefill', '--port', '0');
  const [line] = (await once(child.stdout, 'data')) as [Buffer];
  const url = /http:\/\/127\.0\.0\.1:\d+/.exec(line.toString())?.[0] ?? '';
  expect((await fetch(`${url}/v1/models`)).status).toBe(200);
  child.kill('SIGTERM');
  expect(await ended).toMatchObject({ code: 0, signal: null, err: '' });
});

test.concurrent('SIGTERM: exit code 0', LONG, async ({ expect, onTestFinished }) => {
  const { child, ended, logged } = start(onTestFinished, 'serve', ...ANY_PORTS);
  expect(await logged('baton is up')).toMatchObject({ facade: expect.stringMatching(/^127\.0\.0\.1:\d+$/) });
  child.kill('SIGTERM');
  expect(await ended).toMatchObject({ code: 0, signal: null });
});

test.concurrent(
  'a second signal ends it although a request is still running',
  LONG,
  async ({ expect, onTestFinished }) => {
    const { child, ended, logged } = start(onTestFinished, 'serve', ...ANY_PORTS);
    const { facade } = await logged('baton is up');
    const [host = '', port] = String(facade).split(':');
    const client = connect(Number(port), host);
    client.on('error', () => {});
    // The reply to "Expect" tells that the server has the request and waits for its body.
    client.write(
      'POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 9\r\nexpect: 100-continue\r\n\r\n',
    );
    await once(client, 'data');
    child.kill('SIGINT');
    await logged('stopping');
    child.kill('SIGINT');
    expect(await ended).toMatchObject({ code: 130 });
    client.destroy();
  },
);
