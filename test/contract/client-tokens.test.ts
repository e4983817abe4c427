import { createHmac } from 'node:crypto';
import { afterAll, beforeAll, beforeEach, describe, expect, test } from 'vitest';
import { fetchKeySet, KeyCache, parseKeySet, type TokenKeys } from '../../src/auth/key-cache.ts';
import { createCheckToken, looksLikeToken } from '../../src/auth/tokens.ts';
import { BatonError } from '../../src/core/errors.ts';
import { createLogger } from '../../src/obs/log.ts';
import { freePort } from '../support/free-port.ts';
import { forged, ISSUER, TokenIssuer } from '../support/token-issuer.ts';

let issuer: TokenIssuer;
let log: Readonly<Record<string, unknown>>[];

beforeAll(async () => {
  issuer = await TokenIssuer.start();
});
beforeEach(() => {
  log = [];
  issuer.answer = undefined;
  issuer.asked = 0;
});
afterAll(() => issuer[Symbol.asyncDispose]());

function cacheOf(times: { readonly refreshMs?: number; readonly cooldownMs?: number } = {}): KeyCache {
  const destination = { write: (line: string) => log.push(JSON.parse(line)) };
  return new KeyCache({
    read: () => fetchKeySet(issuer.url, 2_000),
    refreshMs: 0,
    retryMs: 20,
    cooldownMs: 60_000,
    log: createLogger({ level: 'debug', format: 'json', destination }),
    ...times,
  });
}

const RULES = {
  issuer: ISSUER.issuer,
  audience: [ISSUER.audience, 'other'],
  algorithms: ['ES256', 'RS256'],
  tenantClaim: 'sub',
  clockToleranceMs: 5_000,
};

/** The tenant of a token, or the reason and the message of its refusal. */
async function checked(token: string, cache: TokenKeys, rules: Partial<typeof RULES> = {}): Promise<string> {
  const result = await createCheckToken({ ...RULES, ...rules }, cache)(token);
  return result instanceof BatonError ? `${result.reason}: ${result.message}` : result;
}

describe('a token', () => {
  test('that is right has the tenant of its claim, or a hash of what can be none', async () => {
    using cache = cacheOf();
    expect(await checked(await issuer.sign(), cache)).toBe('team-j');
    expect(await checked(await issuer.sign({ team: 'b' }), cache, { tenantClaim: 'team' })).toBe('b');
    const strange = await checked(await issuer.sign({ sub: 'auth0|5f7c' }), cache);
    expect(strange).toMatch(/^jwt-[0-9a-f]{32}$/);
    for (const sub of ['anonymous', 'cred-1', strange]) {
      expect(await checked(await issuer.sign({ sub }), cache)).toMatch(/^jwt-[0-9a-f]{32}$/);
    }
    expect(issuer.asked).toBe(1);
  });

  const now = Math.floor(Date.now() / 1000);
  const claims = { iss: ISSUER.issuer, aud: ISSUER.audience, sub: 'team-j', exp: now + 600 };
  test.each<[string, string, () => Promise<string> | string]>([
    ['has expired', 'it has expired', () => issuer.sign({ exp: now - 60 })],
    ['never expires', 'it has no time at which it expires', () => issuer.sign({ exp: undefined })],
    ['is of the future', 'its time has not come yet', () => issuer.sign({ nbf: now + 600 })],
    ['is of another issuer', 'it is of another issuer', () => issuer.sign({ iss: 'https://evil.test' })],
    ['is for another audience', 'it is for another audience', () => issuer.sign({ aud: 'shop' })],
    ['has no tenant', 'it has no tenant (claim sub)', () => issuer.sign({ sub: undefined })],
    ['has a tenant that is no text', 'it has no tenant (claim sub)', () => issuer.sign({ sub: '' })],
    ['is not signed', 'it is not signed, or not in a way that is accepted', () => forged({ alg: 'none' }, claims)],
    [
      'is signed with the public key as a shared secret',
      'it is not signed, or not in a way that is accepted',
      () => {
        const token = forged({ alg: 'HS256', kid: 'k1' }, claims, 'x').slice(0, -2);
        const secret = JSON.stringify(issuer.published[0]);
        return `${token}.${createHmac('sha256', secret).update(token).digest('base64url')}`;
      },
    ],
    [
      'is signed with a key that is not published',
      'it is signed with a key that the issuer does not have',
      () => forged({ alg: 'ES256', kid: 'k9' }, claims, 'AAAA'),
    ],
    [
      'brings its own key',
      'its signature is not that of the issuer',
      () => forged({ alg: 'ES256', jwk: issuer.published[0], jku: 'http://evil.test' }, claims, 'A'.repeat(86)),
    ],
    [
      'was changed',
      'its signature is not that of the issuer',
      async () => {
        const [head, , signature] = (await issuer.sign()).split('.');
        const other = Buffer.from(JSON.stringify({ ...claims, sub: 'team-x' })).toString('base64url');
        return `${head}.${other}.${signature}`;
      },
    ],
    ['is none', 'it cannot be read', () => 'a.b.c'],
    [
      'has an unknown critical header',
      'it cannot be read',
      () => forged({ alg: 'ES256', crit: ['x'], x: 1 }, claims, 'A'),
    ],
  ])('that %s is refused: %s', async (_what, why, token) => {
    using cache = cacheOf({ cooldownMs: 0 });
    expect(await checked(await token(), cache)).toBe(`CREDENTIAL_REQUIRED: The token is not valid: ${why}.`);
  });
});

describe('the keys', () => {
  test('a new key counts with the first token that has it, and one that is taken out does not any more', async () => {
    using cache = cacheOf({ cooldownMs: 0 });
    const old = await issuer.sign();
    expect(await checked(old, cache)).toBe('team-j');
    await issuer.addKey('k2');
    expect(await checked(await issuer.sign({}, { kid: 'k2' }), cache)).toBe('team-j');
    issuer.published = issuer.published.filter(({ kid }) => kid !== 'k1');
    await cache.lookAgain();
    expect(await checked(old, cache)).toContain('a key that the issuer does not have');
    issuer.published = [];
    await issuer.addKey('k1');
  });

  test('forged tokens do not make many looks', async () => {
    using cache = cacheOf();
    const token = forged({ alg: 'ES256', kid: 'k9' }, {}, 'AAAA');
    const answers = await Promise.all(Array.from({ length: 50 }, () => checked(token, cache)));
    expect(new Set(answers).size).toBe(1);
    expect(issuer.asked).toBe(1);
  });

  test('while they cannot be read, those read last stay in use, and the log says so once', async () => {
    using cache = cacheOf({ refreshMs: 20 });
    expect(await checked(await issuer.sign(), cache)).toBe('team-j');
    for (const answer of [
      { status: 500 },
      { status: 302, headers: { location: 'http://127.0.0.1:9/' } },
      { status: 200, body: '<html>' },
      { status: 200, body: '{"keys":[]}' },
      { status: 200, body: '{"keys":"x"}' },
      { status: 200, body: ' '.repeat(1_100_000) },
    ]) {
      issuer.answer = answer;
      issuer.asked = 0;
      await expect.poll(() => issuer.asked).toBeGreaterThan(3);
      expect(await checked(await issuer.sign(), cache)).toBe('team-j');
    }
    expect(log.filter(({ level }) => level === 'error').map(({ cause, msg }) => [cause, msg])).toEqual(
      [
        'the answer has the status 500',
        expect.stringContaining('redirect'),
        'the key set is no JSON',
        'the key set has no key',
        'the key set has no list "keys" of keys',
        'the answer is larger than 1048576 bytes',
      ].map((cause) => [cause, 'the keys of tokens cannot be read; those read last stay in use']),
    );
    issuer.answer = undefined;
    await expect.poll(() => log.at(-1)?.['msg']).toBe('the keys of tokens can be read again');
  });

  test('without any, no token can be checked until there are some', async () => {
    issuer.answer = { status: 503 };
    using cache = cacheOf();
    expect(await checked(await issuer.sign(), cache)).toBe('AUTH_UNAVAILABLE: Tokens cannot be checked at the moment.');
    issuer.answer = undefined;
    const token = await issuer.sign();
    await expect.poll(() => checked(token, cache)).toBe('team-j');
  });

  test('an address that nobody has is named by what failed', async () => {
    await expect(fetchKeySet(`http://127.0.0.1:${await freePort()}/`, 2_000)).rejects.toThrow(
      'the address cannot be reached',
    );
    expect(() => parseKeySet('[]')).toThrow('the key set has no list "keys" of keys');
  });
});

test('keys of clients are not taken for tokens', () => {
  expect(['sk-abc', 'a.b', 'a.b.c.d', 'a..c', 'a b.c.d'].filter(looksLikeToken)).toEqual([]);
  expect(['a.b.c', 'a.b.'].filter(looksLikeToken)).toEqual(['a.b.c', 'a.b.']);
});
