import { execFile } from 'node:child_process';
import { promisify } from 'node:util';
import { afterEach, describe, expect, test } from 'vitest';
import { startBaton } from '../../src/roles.ts';
import { configOf, contentOf, post, startQuietly } from '../support/harness.ts';
import { type LmcacheHarness, startLmcache } from '../support/lmcache.ts';

let harness: LmcacheHarness;
afterEach(() => harness?.[Symbol.asyncDispose]());

const CHAT = { model: 'sim-model', messages: [{ role: 'user', content: 'Who picked the baton up?' }], max_tokens: 12 };
const ask = (body: unknown, path = '/v1/chat/completions') =>
  post(harness.url + path, body, { headers: { 'x-baton-debug': '1' } });
const planOf = (headers: Headers) => headers.get('x-baton-plan') ?? '';

async function expectRight(body: object): Promise<string> {
  const [got, want] = await Promise.all([ask(body), post(`${harness.plain.url}/v1/chat/completions`, body)]);
  expect(got.status, got.text).toBe(200);
  const { texts, finish, done } = contentOf(want.text);
  expect(contentOf(got.text)).toMatchObject({ texts, finish, done, errors: [] });
  return planOf(got.headers);
}

describe('requests that cannot be handed over', () => {
  test('are refused, with the member', async () => {
    harness = await startLmcache();
    const reply = await ask({ ...CHAT, n: 2 });
    expect(reply.status).toBe(400);
    expect(JSON.parse(reply.text)).toEqual({
      error: {
        message: '`n` cannot be served here with this value: one prompt and one choice are handed over.',
        type: 'invalid_request_error',
        param: 'n',
        code: 'invalid_argument',
      },
    });
    expect((await ask({ ...CHAT, response_format: { type: 'json_object' } })).status).toBe(400);
    expect([...harness.prefill, ...harness.decode].map((sim) => sim.state().requests)).toEqual([0, 0, 0, 0]);
  });

  test('or answered by the decode engine alone', async () => {
    harness = await startLmcache({ lmcache: 'uncarried: decode' });
    expect(await expectRight({ ...CHAT, n: 2, temperature: 1 })).toContain('mode=decode_local; reason=n');
    const forced = { ...CHAT, tools: [{ type: 'function', function: { name: 'f' } }], tool_choice: 'required' };
    const reply = await ask(forced);
    expect(planOf(reply.headers)).toContain('mode=decode_local; reason=not_carried');
    expect(reply.text).toContain('"tool_calls":[{');
    expect(harness.prefill.map((sim) => sim.state().requests)).toEqual([0, 0]);
  });

  test('what only an engine can judge goes to the decode engine as it is', async () => {
    harness = await startLmcache();
    const reply = await ask({ ...CHAT, max_tokens: 0 });
    expect(reply.status).toBe(400);
    expect(reply.text).toContain('max_tokens must be at least 1');
    // No token is shown before the engine has refused.
    const odd = { ...CHAT, stream: 'true' };
    const [got, want] = await Promise.all([ask(odd), post(`${harness.plain.url}/v1/chat/completions`, odd)]);
    expect([got.status, want.status]).toEqual([400, 400]);
    expect(JSON.parse(got.text)).toEqual(JSON.parse(want.text));
    expect(harness.prefill.map((sim) => sim.state().requests)).toEqual([0, 0]);
    expect(await expectRight({ ...CHAT, some_new_thing: 1 })).toContain('reason=unproven_member');
  });
});

test('without a limit a chat goes on until the window is full', async () => {
  const engine = { maxModelLen: 100, defaultMaxTokens: 100, eosEvery: 0 };
  harness = await startLmcache({ engine });
  const { max_tokens: _max, ...open } = CHAT;
  expect(await expectRight({ ...open, stream: true })).toContain('mode=prefill_decode;');
});

test('prefill engines see nothing but legs with a transfer: anything else ends them', async () => {
  harness = await startLmcache();
  for (let i = 0; i < 6; i++) await expectRight({ ...CHAT, stream: i % 2 === 0 });
  for (const sim of harness.prefill) {
    expect(sim.state().deathReason).toBeNull();
    const generated = sim.requests.filter(({ path }) => path.includes('completions'));
    expect(generated.length).toBeGreaterThan(0);
    for (const { path, body } of generated)
      expect([path, body.includes('disagg_spec')]).toEqual(['/v1/completions', true]);
  }
  expect(harness.decode.map((sim) => sim.state().buffered)).toEqual([0, 0]);
  expect(harness.decode.every((sim) => sim.state().externalHits > 0)).toBe(true);
});

describe('the buffer of a decoder', () => {
  // Room for one prompt; a second one keeps its prefill engine waiting until that gives up.
  const engine = { pdBufferTokens: 40, allocTimeoutMs: 50, decodeMsPerToken: 8 };
  const failed = () => harness.prefill.reduce((sum, sim) => sum + sim.state().transfersFailed, 0);
  const crowd = () =>
    Promise.all(
      Array.from({ length: 8 }, (_, i) => {
        const messages = [{ role: 'user', content: `${i} Who picked the baton up?` }];
        return expectRight({ ...CHAT, messages, stream: true });
      }),
    );

  test('takes no more prompts than it holds', async () => {
    harness = await startLmcache({
      decode: 1,
      engine,
      lmcache: 'pd_buffer_size: 1KiB, kv_bytes_per_token: 16, chunk_size: 64',
    });
    for (const plan of await crowd()) expect(plan).toContain('mode=prefill_decode;');
    expect(failed()).toBe(0);
    const long = { ...CHAT, messages: [{ role: 'user', content: 'x'.repeat(80) }] };
    expect(await expectRight(long)).toContain('reason=buffer_too_large');
  });

  test('without that limit transfers fail, and D computes those prompts', async () => {
    harness = await startLmcache({ decode: 1, engine, lmcache: 'kv_bytes_per_token: 0, notice_timeout: 200ms' });
    await harness.decode[0]?.setFault({ kind: 'stall', ms: 150, path: '/v1/completions', count: 1 });
    await crowd();
    expect(failed()).toBeGreaterThan(0);
  });
});

test('a prefill engine that fails is replaced, with a transfer of its own', async () => {
  harness = await startLmcache();
  await harness.prefill[0]?.setFault({ kind: 'status', status: 500, path: '/v1/completions' });
  expect(await expectRight(CHAT)).toContain('mode=prefill_decode;');
  const ids = harness.prefill.flatMap((sim) =>
    sim.requests.flatMap(({ body }) => /"req_id":"([^"]+)"/.exec(body.toString())?.[1] ?? []),
  );
  expect(new Set(ids).size).toBe(2);
});

test('a prefill engine without a first token: the decode engine answers alone', async () => {
  harness = await startLmcache();
  for (const sim of harness.prefill) await sim.setFault({ kind: 'no_handle', path: '/v1/completions' });
  expect(await expectRight(CHAT)).toContain('reason=no_first_token');
});

test('after a restart the notices of transfers before it release nothing', async () => {
  harness = await startLmcache({ prefill: 1, decode: 1 });
  const [prefill, decode] = harness.prefill.concat(harness.decode);
  // The notice of this one is sent while baton is down, and waits in the engine's socket.
  await prefill?.setFault({ kind: 'notice_late', ms: 300, path: '/v1/completions' });
  const client = new AbortController();
  const init = { method: 'POST', body: JSON.stringify({ ...CHAT, stream: true }) };
  const reply = await fetch(`${harness.url}/v1/chat/completions`, { ...init, signal: client.signal });
  await reply.body?.getReader().read();
  client.abort();
  const url = await harness.restart(() => new Promise((resolve) => setTimeout(resolve, 400)));
  await prefill?.setFault({ kind: 'notice_late', ms: 200, path: '/v1/completions' });
  const before = decode?.state().requests;
  const again = await fetch(`${url}/v1/chat/completions`, init);
  await again.body?.getReader().read();
  expect(decode?.state().requests).toBe(before);
});

describe('the notice socket', () => {
  test('a port in use ends the start with a sentence', async () => {
    harness = await startLmcache();
    await expect(startBaton(harness.config)).rejects.toThrow(/^port \d+ is in use \(--proxy-port\)$/);
  });

  test('simulated engines of the process use it', async () => {
    const flags = { sim: 'true', 'kv-connector': 'lmcache', 'proxy-host': '127.0.0.1', 'proxy-port': '0' };
    const { baton } = await startQuietly(configOf(flags));
    try {
      const url = `http://${baton.addresses.facade}/v1/chat/completions`;
      const reply = await post(url, CHAT, { headers: { 'x-baton-debug': '1' } });
      expect(planOf(reply.headers)).toContain('mode=prefill_decode;');
      expect(planOf(reply.headers)).not.toContain('no_handle');
      expect(baton.addresses.notices).toMatch(/^127\.0\.0\.1:\d+$/);
    } finally {
      await baton.stop();
    }
  });

  test('ZMQ is loaded only with this connector', async () => {
    const script = `
      const { startBaton } = await import('./src/roles.ts');
      const { configOf } = await import('./test/support/harness.ts');
      const { createLogger } = await import('./src/obs/log.ts');
      const log = createLogger({ level: 'silent', format: 'json' });
      const baton = await startBaton(configOf({ sim: 'true', 'kv-connector': process.argv[1], 'proxy-host': '127.0.0.1', 'proxy-port': '0' }), { log });
      console.log(process.report.getReport().sharedObjects.some((file) => file.includes('zeromq')));
      await baton.stop();
    `;
    const loads = async (connector: string) => {
      const args = ['--input-type=module', '-e', script, connector];
      return (
        await promisify(execFile)(process.execPath, args, { cwd: new URL('../..', import.meta.url) })
      ).stdout.trim();
    };
    expect(await Promise.all([loads('nixl'), loads('lmcache')])).toEqual(['false', 'true']);
  });
});
