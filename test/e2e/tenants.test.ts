import { createHash } from 'node:crypto';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { request } from 'node:http';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import OpenAI, { RateLimitError } from 'openai';
import { afterAll, beforeAll, beforeEach, expect, test } from 'vitest';
import { post } from '../support/harness.ts';
import { STUB_MODEL, type Stubbed, sayJson, sayStream, startStubbed } from '../support/stub-engine.ts';

const messages = [{ role: 'user' as const, content: 'hi' }];
const BODY = { model: STUB_MODEL, messages };
const NAMES = ['busy', 'calm', 'wordy', 'streams', 'single', 'named'];

let folder: string;
let baton: Stubbed;

beforeAll(async () => {
  folder = mkdtempSync(join(tmpdir(), 'baton-tenants-'));
  const line = (tenant: string) => `${tenant} sha256:${createHash('sha256').update(`sk-${tenant}`).digest('hex')}`;
  writeFileSync(join(folder, 'keys.txt'), NAMES.map(line).join('\n'));
  const yaml = `
tenant:
  header: x-tenant
  trusted_proxies: [127.0.0.2]
  own_limits:
    - {name: busy, requests_per_minute: 2}
    - {name: wordy, tokens_per_minute: 500}
    - {name: streams, tokens_per_minute: 10}
    - {name: single, concurrency: 1}
    - {name: named, requests_per_minute: 1}
`;
  baton = await startStubbed({ yaml, flags: { 'api-keys-file': join(folder, 'keys.txt') } });
});
beforeEach(() => baton.reset());
afterAll(async () => {
  await baton?.[Symbol.asyncDispose]();
  rmSync(folder, { recursive: true });
});

const ask = (tenant: string, more: object = {}) =>
  post(`${baton.url}/v1/chat/completions`, { ...BODY, ...more }, { headers: { authorization: `Bearer sk-${tenant}` } });

test('requests over the limit of a tenant are 429 with a Retry-After, and no other tenant notices', async () => {
  expect([(await ask('busy')).status, (await ask('busy')).status]).toEqual([200, 200]);
  const refused = await ask('busy');
  expect(refused.status).toBe(429);
  const wait = Number(refused.headers.get('retry-after'));
  expect(wait).toBeGreaterThanOrEqual(1);
  expect(wait).toBeLessThanOrEqual(30);
  expect(JSON.parse(refused.text)).toEqual({
    error: {
      message: expect.stringContaining('2 requests a minute'),
      type: 'rate_limit_error',
      param: null,
      code: 'rate_limit_exceeded',
    },
  });
  const lines = baton.log.filter(({ msg, tenant }) => msg === 'request' && tenant === 'busy');
  expect(lines.map(({ status }) => status)).toEqual([200, 200, 429]);
  expect(lines.at(-1)).toMatchObject({ error: 'rate_limit_exceeded', request_id: refused.headers.get('x-request-id') });
  expect((await ask('calm')).status).toBe(200);
  const models = await fetch(`${baton.url}/v1/models`, { headers: { authorization: 'Bearer sk-busy' } });
  expect(models.status).toBe(200);
  const client = new OpenAI({ baseURL: `${baton.url}/v1`, apiKey: 'sk-busy', maxRetries: 0 });
  await expect(client.chat.completions.create(BODY)).rejects.toBeInstanceOf(RateLimitError);
  const metrics = await (await fetch(`${baton.adminUrl}/metrics`)).text();
  expect(metrics).toMatch(/baton_errors_total\{reason="rate_limit_exceeded"\} [1-9]/);
});

test('tokens of prompts and replies count, as the engine has counted them', async () => {
  baton.d.answer = sayJson(
    '{"choices":[{"index":0,"text":"x","finish_reason":"stop"}],"usage":{"prompt_tokens":400,"completion_tokens":600}}',
  );
  expect((await ask('wordy')).status).toBe(200);
  const refused = await ask('wordy');
  expect(refused.status).toBe(429);
  expect(JSON.parse(refused.text)).toMatchObject({
    error: { message: expect.stringContaining('500 tokens a minute') },
  });
  expect(Number(refused.headers.get('retry-after'))).toBeGreaterThan(55);
});

test('a stream that tells no usage has a token for each event; what the engine refuses has none', async () => {
  const prompt = { messages: [{ role: 'user', content: '' }] };
  baton.d.answer = sayJson('{"error":{"message":"no","code":400}}', 400);
  for (let i = 0; i < 5; i++) expect((await ask('streams', prompt)).status).toBe(400);
  const event = 'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n';
  baton.d.answer = sayStream([event.repeat(20), 'data: [DONE]\n\n']);
  expect((await ask('streams', { ...prompt, stream: true })).status).toBe(200);
  expect((await ask('streams', prompt)).status).toBe(429);
});

test('a tenant has so many requests at a time, however they end', async () => {
  const held = Promise.withResolvers<void>();
  baton.d.answer = (response, got) => void held.promise.then(() => sayJson('{"choices":[]}')(response, got));
  const leaves = new AbortController();
  const first = fetch(`${baton.url}/v1/chat/completions`, {
    method: 'POST',
    body: JSON.stringify(BODY),
    headers: { authorization: 'Bearer sk-single' },
    signal: leaves.signal,
  }).catch(() => undefined);
  await expect.poll(() => baton.d.requests.length).toBe(1);
  const refused = await ask('single');
  expect([refused.status, refused.headers.get('retry-after')]).toEqual([429, '1']);
  leaves.abort();
  await first;
  held.resolve();
  await expect.poll(async () => (await ask('single')).status).toBe(200);
  expect((await ask('single', { messages: undefined, n: 'junk' })).status).toBe(200);
});

/** Sends a request from an address of this machine. */
function askFrom(localAddress: string, headers: Readonly<Record<string, string>>): Promise<number | undefined> {
  const { promise, resolve, reject } = Promise.withResolvers<number | undefined>();
  const path = '/v1/chat/completions';
  const asked = request(
    { port: baton.port, host: '127.0.0.1', localAddress, method: 'POST', path, headers },
    (reply) => {
      reply.resume().once('end', () => resolve(reply.statusCode));
    },
  );
  asked.once('error', reject).end(JSON.stringify(BODY));
  return promise;
}

test('a trusted proxy names the tenant, with a key of its own; from others the header and X-Forwarded-* count nothing', async () => {
  const said = { authorization: 'Bearer sk-calm', 'x-tenant': 'named', 'x-forwarded-for': '127.0.0.2' };
  for (let i = 0; i < 3; i++) expect(await askFrom('127.0.0.1', said)).toBe(200);
  expect(baton.d.requests).toHaveLength(3);
  for (const { headers } of [...baton.p.requests, ...baton.d.requests]) {
    expect(headers).not.toHaveProperty('x-tenant');
    expect(headers).not.toHaveProperty('x-forwarded-for');
  }
  baton.reset();
  expect(await askFrom('127.0.0.2', said)).toBe(200);
  expect(baton.d.requests[0]?.headers).toMatchObject({ 'x-forwarded-for': '127.0.0.2' });
  expect(baton.d.requests[0]?.headers).not.toHaveProperty('x-tenant');
  expect(await askFrom('127.0.0.2', said)).toBe(429);
  expect(await askFrom('127.0.0.2', { 'x-tenant': 'named' })).toBe(401);
  expect(await askFrom('127.0.0.2', { ...said, 'x-tenant': 'a, b' })).toBe(400);
});
