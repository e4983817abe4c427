import OpenAI, { AuthenticationError } from 'openai';
import { afterAll, beforeAll, expect, test } from 'vitest';
import { STUB_MODEL, type Stubbed, startStubbed } from '../support/stub-engine.ts';
import { forged, ISSUER, TokenIssuer } from '../support/token-issuer.ts';

let issuer: TokenIssuer;
let baton: Stubbed;

beforeAll(async () => {
  issuer = await TokenIssuer.start();
  const flags = { 'jwks-url': issuer.url, 'jwt-issuer': ISSUER.issuer, 'jwt-audience': ISSUER.audience };
  const yaml = 'tenant: {own_limits: [{name: team-j, requests_per_minute: 1}]}\n';
  baton = await startStubbed({ flags, yaml });
});
afterAll(async () => {
  await baton?.[Symbol.asyncDispose]();
  await issuer?.[Symbol.asyncDispose]();
});

const ask = (apiKey: string) =>
  new OpenAI({ baseURL: `${baton.url}/v1`, apiKey, maxRetries: 0 }).chat.completions.create({
    model: STUB_MODEL,
    messages: [{ role: 'user', content: 'hi' }],
  });

test('a client comes with a token of the issuer: its tenant is that of the token, and engines do not see it', async () => {
  const token = await issuer.sign();
  expect((await ask(token)).choices).toHaveLength(1);
  for (const { headers } of [...baton.p.requests, ...baton.d.requests]) {
    expect(headers).not.toHaveProperty('authorization');
  }
  await expect(ask(token)).rejects.toMatchObject({ status: 429, code: 'rate_limit_exceeded' });
  expect((await ask(await issuer.sign({ sub: 'team-k' }))).choices).toHaveLength(1);
});

test('forged and expired ones, and keys, are 401; nothing of them is in the log', async () => {
  baton.reset();
  const past = Math.floor(Date.now() / 1000) - 100;
  for (const bad of [
    forged({ alg: 'none' }, { iss: ISSUER.issuer, aud: ISSUER.audience, sub: 'team-k', exp: past + 1000 }),
    await issuer.sign({ exp: past }),
    await issuer.sign({ aud: 'shop' }),
    'sk-plain',
  ]) {
    await expect(ask(bad)).rejects.toBeInstanceOf(AuthenticationError);
    await expect(ask(bad)).rejects.toMatchObject({ status: 401, code: 'invalid_api_key' });
    expect(JSON.stringify(baton.log)).not.toContain(bad.slice(0, 30));
  }
  expect(baton.p.requests).toEqual([]);
  expect((await fetch(`${baton.url}/v1/models`)).status).toBe(401);
});
