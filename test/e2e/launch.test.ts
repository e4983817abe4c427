import { execFile } from 'node:child_process';
import { readdirSync, readFileSync } from 'node:fs';
import { createServer } from 'node:net';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { expect, test, vi } from 'vitest';
import { contentOf } from '../support/harness.ts';
import { groupLives, startLaunch } from '../support/launch-process.ts';

const SMALL = ['--sim', '--prefill', '1', '--decode', '1'];

async function post(url: string, path: string, body: Record<string, unknown>): Promise<Record<string, unknown>> {
  const reply = await fetch(`${url}${path}`, {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify({ model: 'sim-model', max_tokens: 8, ...body }),
  });
  expect(reply.status).toBe(200);
  return JSON.parse(await reply.text());
}

const chat = (url: string) => post(url, '/v1/chat/completions', { messages: [{ role: 'user', content: 'Hello' }] });

test('2P2D serves, survives the death of an engine, and leaves nothing behind on Ctrl-C', async () => {
  await using launch = await startLaunch(['--sim']);
  await launch.seen(/up: /);
  const groups = launch.groups();
  expect([...groups.keys()]).toEqual(['prefiller1', 'prefiller2', 'decoder1', 'decoder2', 'proxy']);
  expect(readdirSync(launch.folder).toSorted()).toEqual([...groups.keys()].map((name) => `${name}.log`).toSorted());

  expect(await chat(launch.url)).toMatchObject({ object: 'chat.completion', usage: { completion_tokens: 8 } });
  expect(await post(launch.url, '/v1/completions', { prompt: 'Hello' })).toMatchObject({ object: 'text_completion' });

  process.kill(groups.get('decoder1') ?? 0, 'SIGKILL');
  await launch.seen(/decoder1 was ended by SIGKILL; the end of .*decoder1\.log:\n {2}\| .*simulated decode engine/);
  await launch.seen(/going on with 2 prefill and 1 decode/);
  for (let i = 0; i < 4; i++) await chat(launch.url);

  launch.kill('SIGINT');
  expect(await launch.ended).toBe(0);
  for (const [name, group] of groups) expect(groupLives(group), name).toBe(false);
  expect(launch.text()).toMatch(/stopping\nstopped\n$/);
});

/** What a shell's curl prints; fails with curl when the transfer was not whole. */
async function curl(url: string, body: Record<string, unknown>): Promise<string> {
  const json = ['-H', 'Content-Type: application/json', '-d', JSON.stringify(body)];
  return (await promisify(execFile)('curl', ['-sSN', '--fail-with-body', '-X', 'POST', url, ...json])).stdout;
}

test("lmcache 2P2D with the example's model answers curl, and leaves nothing behind on Ctrl-C", async () => {
  const model = 'meta-llama/Llama-3.1-8B-Instruct';
  await using launch = await startLaunch(['--sim', '--connector', 'lmcache', '--model', model]);
  await launch.seen(/up: /);
  const groups = launch.groups();
  expect([...groups.keys()]).toEqual(['prefiller1', 'prefiller2', 'decoder1', 'decoder2', 'proxy']);
  const asked = { model, max_tokens: 10, temperature: 0 };
  const prompt = 'Explain the origin of Llama model';
  const messages = [{ role: 'user', content: prompt }];
  const engine = `http://${/decoder1 started: (\S+),/.exec(launch.text())?.[1]}`;
  for (const [path, body, part] of [
    ['/v1/completions', { ...asked, prompt }, { object: 'text_completion', model }],
    ['/v1/chat/completions', { ...asked, messages }, { object: 'chat.completion', model }],
  ] as const) {
    // The decode engine alone says what is right.
    const right = await curl(engine + path, body);
    // Each pair of the pools has its turn.
    for (let i = 0; i < 2; i += 1) {
      const whole = await curl(launch.url + path, body);
      expect(JSON.parse(whole)).toMatchObject({ ...part, usage: { completion_tokens: 10 } });
      expect(contentOf(whole)).toMatchObject({ texts: contentOf(right).texts, finish: contentOf(right).finish });
      const stream = await curl(launch.url + path, { ...body, stream: true });
      expect(contentOf(stream)).toMatchObject({ texts: contentOf(right).texts, done: true, errors: [] });
    }
  }
  const log = () => readFileSync(join(launch.folder, 'proxy.log'), 'utf8');
  await vi.waitFor(() => expect(log().match(/"mode":"prefill_decode".*"ending":"ok"/g)).toHaveLength(8));
  expect(log()).not.toContain('no_handle');

  launch.kill('SIGINT');
  expect(await launch.ended).toBe(0);
  for (const [name, group] of groups) expect(groupLives(group), name).toBe(false);
  expect(launch.text()).toMatch(/stopping\nstopped\n$/);
});

// The executable loads no modules from outside.
test.skipIf(process.env['BATON_BIN'] !== undefined)(
  'on Ctrl-C before the first engine it says so and starts nothing',
  async () => {
    // The signal comes as soon as baton listens for it, long before it has read its flags.
    const early = `process.on('newListener', (name) => name === 'SIGINT' && process.nextTick(() => process.kill(process.pid, name)))`;
    await using launch = await startLaunch(SMALL, {
      NODE_OPTIONS: `--import=data:text/javascript,${encodeURIComponent(early)}`,
    });
    expect(await launch.ended).toBe(0);
    expect(launch.text()).toBe('stopping; nothing was started\n');
    expect(readdirSync(launch.folder)).toEqual([]);
  },
);

test('killed itself, it leaves nothing behind either', async () => {
  await using launch = await startLaunch(SMALL);
  await launch.seen(/decoder1 started/);
  const groups = [...launch.groups().values()];
  expect(groups.filter(groupLives).length).toBeGreaterThanOrEqual(2);
  launch.kill('SIGKILL');
  expect(await launch.ended).toBe(null);
  await vi.waitFor(() => expect(groups.filter(groupLives)).toEqual([]), { timeout: 10_000 });
});

test('lmcache: the benchmark prints its figures and ends everything', async () => {
  const bench = [
    '--bench',
    '--bench-rate',
    '0',
    '--bench-prompts',
    '4',
    '--bench-input-len',
    '200',
    '--bench-output-len',
    '64',
  ];
  await using launch = await startLaunch([...SMALL, '--connector', 'lmcache', '--tensor-parallel-size', '2', ...bench]);
  expect(await launch.ended).toBe(0);
  expect(launch.text()).toMatch(/^Successful requests: +4 *$/m);
  expect(launch.text()).toMatch(/^Total generated tokens: +256 *$/m);
  for (const figure of ['Mean', 'Median', 'P99'])
    expect(launch.text()).toMatch(new RegExp(`^${figure} TTFT .*\\d *$`, 'm'));
  for (const [name, group] of launch.groups()) expect(groupLives(group), name).toBe(false);
});

test('an engine that cannot start is reported with its own words, and nothing is left', async () => {
  await using launch = await startLaunch([...SMALL, '--engine-arg=--host=192.0.2.1']);
  expect(await launch.ended).toBe(1);
  expect(launch.text()).toMatch(
    /(prefiller1|decoder1) ended with exit code 1; the end of .*\n {2}\| baton: .*EADDRNOTAVAIL.*192\.0\.2\.1/,
  );
  expect(launch.text()).toMatch(/the rest cannot serve/);
  for (const [name, group] of launch.groups()) expect(groupLives(group), name).toBe(false);
});

test('a port that is taken is a mistake in the settings, and nothing starts', async () => {
  const blocker = createServer().listen(0, '127.0.0.1');
  await new Promise((resolve) => blocker.once('listening', resolve));
  const address = blocker.address();
  const port = typeof address === 'object' ? address?.port : undefined;
  await using launch = await startLaunch([...SMALL, '--decode-port', String(port)]);
  expect(await launch.ended).toBe(2);
  expect(launch.text()).toBe(
    `--decode-port: port ${port} (decoder1's HTTP port) is in use; end what listens there or choose another\n`,
  );
  blocker.close();
});
