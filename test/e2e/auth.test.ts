import { createHash } from 'node:crypto';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import OpenAI, { AuthenticationError } from 'openai';
import { afterAll, beforeAll, beforeEach, describe, expect, test } from 'vitest';
import { post } from '../support/harness.ts';
import { STUB_MODEL, type Stubbed, startStubbed } from '../support/stub-engine.ts';

const KEY = 'sk-test-6c1f';
const OTHER = 'sk-test-other';
const messages = [{ role: 'user' as const, content: 'hi' }];
const turn = { model: STUB_MODEL, messages: [...messages, { role: 'assistant', content: 'x' }, ...messages] };

let folder: string;
let keyed: Stubbed;
let open: Stubbed;

beforeAll(async () => {
  folder = mkdtempSync(join(tmpdir(), 'baton-auth-'));
  const file = join(folder, 'keys.txt');
  writeFileSync(file, `# clients\nteam-a sha256:${createHash('sha256').update(KEY).digest('hex')}\n`);
  [keyed, open] = await Promise.all([
    startStubbed({ flags: { 'api-keys-file': file } }),
    startStubbed({ yaml: 'reuse: {autolink: false}\n' }),
  ]);
});
beforeEach(() => {
  keyed.reset();
  open.reset();
});
afterAll(async () => {
  await Promise.all([keyed?.[Symbol.asyncDispose](), open?.[Symbol.asyncDispose]()]);
  rmSync(folder, { recursive: true });
});

const bearer = (key: string) => ({ headers: { authorization: `Bearer ${key}` } });
const legs = (baton: Stubbed) => [...baton.p.requests, ...baton.d.requests];

describe('with a file of keys', () => {
  test.each(['/v1/chat/completions', '/v1/completions'])('POST %s needs a key', async (path) => {
    for (const init of [{}, bearer(OTHER), { headers: { authorization: `Basic ${KEY}` } }]) {
      const reply = await post(`${keyed.url}${path}`, { model: STUB_MODEL, messages, prompt: 'hi' }, init);
      expect(reply.status).toBe(401);
      expect(reply.headers.get('www-authenticate')).toBe('Bearer');
      expect(JSON.parse(reply.text)).toEqual({
        error: { message: expect.any(String), type: 'authentication_error', param: null, code: 'invalid_api_key' },
      });
    }
    expect(legs(keyed)).toEqual([]);
    const reply = await post(`${keyed.url}${path}`, { model: STUB_MODEL, messages, prompt: 'hi' }, bearer(KEY));
    expect(reply.status).toBe(200);
    expect(legs(keyed)).toHaveLength(2);
  });

  test('a request is refused before its body is looked at, and for browsers too', async () => {
    const headers = { origin: 'http://app', 'x-request-id': 'r-1' };
    const reply = await post(`${keyed.url}/v1/chat/completions`, '{', { headers });
    expect(reply.status).toBe(401);
    expect(reply.headers.get('access-control-allow-origin')).toBe('*');
    expect(reply.headers.get('x-request-id')).toBe('r-1');
    const preflight = await fetch(`${keyed.url}/v1/chat/completions`, { method: 'OPTIONS', headers });
    expect(preflight.status).toBe(204);
  });

  test('a refused request has an id, one line in the access log, and is counted', async () => {
    const reply = await post(`${keyed.url}/v1/chat/completions`, turn, bearer(OTHER));
    const id = reply.headers.get('x-request-id');
    const lines = keyed.log.filter(({ msg, request_id }) => msg === 'request' && request_id === id);
    expect(lines).toEqual([
      expect.objectContaining({ status: 401, error: 'credential_required', ending: 'refused', model: 'none' }),
    ]);
    expect(lines[0]).not.toHaveProperty('tenant');
    const metrics = await (await fetch(`${keyed.adminUrl}/metrics`)).text();
    expect(metrics).toMatch(
      /baton_requests_total\{api="chat.completions",model="none",mode="none",status_class="4xx"\} [1-9]/,
    );
    expect(metrics).toContain('baton_requests_in_flight{api="chat.completions"} 0');
  });

  test('the list of models needs a key, what probes read does not', async () => {
    expect((await fetch(`${keyed.url}/v1/models`)).status).toBe(401);
    expect((await fetch(`${keyed.url}/v1/models/`, { method: 'HEAD' })).status).toBe(401);
    expect((await fetch(`${keyed.url}/v1/models`, bearer(KEY))).status).toBe(200);
    for (const path of ['/health', '/liveness', '/readiness', '/version', '/health/']) {
      expect((await fetch(`${keyed.url}${path}`)).status, path).toBe(200);
    }
    expect((await fetch(`${keyed.url}/nowhere`)).status).toBe(404);
  });

  test("the client's key does not reach an engine", async () => {
    await post(`${keyed.url}/v1/chat/completions`, { model: STUB_MODEL, messages }, bearer(KEY));
    expect(legs(keyed)).toHaveLength(2);
    for (const { headers } of legs(keyed)) expect(headers).not.toHaveProperty('authorization');
  });

  test('the official client knows the error', async () => {
    const create = (apiKey: string) =>
      new OpenAI({ baseURL: `${keyed.url}/v1`, apiKey, maxRetries: 0 }).chat.completions.create({
        model: STUB_MODEL,
        messages,
      });
    await expect(create(OTHER)).rejects.toBeInstanceOf(AuthenticationError);
    await expect(create(OTHER)).rejects.toMatchObject({ status: 401, code: 'invalid_api_key' });
    expect((await create(KEY)).choices).toHaveLength(1);
  });

  test('refusals are counted, and keys are nowhere in log and metrics', async () => {
    await post(`${keyed.url}/v1/chat/completions`, turn, bearer(OTHER));
    await post(`${keyed.url}/v1/chat/completions`, turn, bearer(KEY));
    const metrics = await (await fetch(`${keyed.adminUrl}/metrics`)).text();
    expect(metrics).toMatch(/baton_errors_total\{reason="credential_required"\} [1-9]/);
    expect(`${metrics}${JSON.stringify(keyed.log)}`).not.toMatch(/sk-test/);
  });

  test('a key that is added to the file counts; one that is taken out ends with the reply that it has', async () => {
    const line = (tenant: string, key: string) =>
      `${tenant} sha256:${createHash('sha256').update(key).digest('hex')}\n`;
    const status = async (key: string) => (await fetch(`${keyed.url}/v1/models`, bearer(key))).status;
    const held = Promise.withResolvers<void>();
    const event = (text: string) => `data: {"choices":[{"index":0,"delta":{"content":"${text}"}}]}\n\n`;
    keyed.d.answer = (response) => {
      response.writeHead(200, { 'content-type': 'text/event-stream' }).write(event('one'));
      void held.promise.then(() => response.end(`${event('two')}data: [DONE]\n\n`));
    };
    const body = JSON.stringify({ model: STUB_MODEL, messages, stream: true });
    const running = await fetch(`${keyed.url}/v1/chat/completions`, { method: 'POST', body, ...bearer(KEY) });
    writeFileSync(join(folder, 'keys.txt'), line('team-b', OTHER));
    await expect.poll(() => status(OTHER), { timeout: 5000 }).toBe(200);
    expect(await status(KEY)).toBe(401);
    held.resolve();
    expect(await running.text()).toBe(`${event('one')}${event('two')}data: [DONE]\n\n`);
    writeFileSync(join(folder, 'keys.txt'), line('team-a', KEY));
    await expect.poll(() => status(KEY), { timeout: 5000 }).toBe(200);
  });
});

describe('without one', () => {
  test('nobody is refused, and the credential is passed on', async () => {
    expect((await post(`${open.url}/v1/chat/completions`, { model: STUB_MODEL, messages })).status).toBe(200);
    await post(`${open.url}/v1/chat/completions`, { model: STUB_MODEL, messages }, bearer(OTHER));
    expect(legs(open).map(({ headers }) => headers.authorization)).toEqual([
      undefined,
      `Bearer ${OTHER}`,
      undefined,
      `Bearer ${OTHER}`,
    ]);
  });
});

describe('the conversation', () => {
  test('conversation_id is taken out, other names are passed on', async () => {
    const names = { session_id: 's', vllm_xargs: { session_id: 'x' }, prompt_cache_key: 'p' };
    const body = { ...turn, conversation_id: 'c', ...names };
    const reply = await post(`${open.url}/v1/chat/completions`, body, { headers: { 'x-session-id': 'h' } });
    expect(reply.status).toBe(200);
    expect(legs(open)).toHaveLength(2);
    for (const { body: sent, headers } of legs(open)) {
      expect(JSON.parse(sent.toString())).not.toHaveProperty('conversation_id');
      expect(JSON.parse(sent.toString())).toMatchObject(names);
      expect(headers['x-session-id']).toBe('h');
    }
  });

  test.each([7, 'x'.repeat(513)])('a conversation_id that is none is 400: %j', async (conversation_id) => {
    const reply = await post(`${open.url}/v1/chat/completions`, { ...turn, conversation_id });
    expect(reply.status).toBe(400);
    expect(JSON.parse(reply.text)).toMatchObject({
      error: { type: 'invalid_request_error', param: 'conversation_id', code: 'invalid_argument' },
    });
    expect(legs(open)).toEqual([]);
  });

  test('where histories are not looked at, turns that name none are warned about once', async () => {
    const warnings = () => open.log.filter(({ field }) => field === 'conversation_id');
    await post(`${open.url}/v1/chat/completions`, { model: STUB_MODEL, messages });
    await post(`${open.url}/v1/chat/completions`, { ...turn, prompt_cache_key: 'p' });
    expect(warnings()).toEqual([]);
    await post(`${open.url}/v1/chat/completions`, turn);
    await post(`${open.url}/v1/chat/completions`, turn);
    expect(warnings()).toEqual([
      expect.objectContaining({
        level: 'warn',
        headers: ['x-session-id', 'session-id'],
        msg: expect.stringContaining('--send-conversation-id'),
      }),
    ]);
  });
});
