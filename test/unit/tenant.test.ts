import { createHash } from 'node:crypto';
import { describe, expect, test } from 'vitest';
import { hashKeyLine } from '../../src/cli/hash-key.ts';
import { decideEngineAuth } from '../../src/core/engine-auth.ts';
import { parseApiKeys, parseRpcTokens } from '../../src/core/tenant.ts';
import { createAuthenticate } from '../../src/http/authenticate.ts';
import { renderRefusal } from '../../src/http/errors.ts';
import { refusalOf } from '../../src/services/leg.ts';

const hash = (key: string) => createHash('sha256').update(key).digest('hex');
const A = hash('key-a');
const B = hash('key-b');

function mistakes(text: string): readonly string[] {
  const parsed = parseApiKeys(text, 'keys.txt');
  return parsed.kind === 'error' ? parsed.problems.map(({ where, message }) => `${where}: ${message}`) : [];
}

describe('the file of tokens', () => {
  test('words after the hash are rights', () => {
    const text = `router sha256:${A} any-tenant  operator\nteam-a\tsha256:${B}\tunverified # comment`;
    expect(parseRpcTokens(text, 'f')).toEqual({
      kind: 'ok',
      keys: new Map([
        [A, { tenant: 'router', anyTenant: true, operator: true, unverified: false }],
        [B, { tenant: 'team-a', anyTenant: false, operator: false, unverified: true }],
      ]),
    });
  });

  test('an unknown right names its line and is not repeated; keys of clients have none', () => {
    const text = `ok sha256:${A}\nteam-a sha256:${B} opertor`;
    const problems = [{ where: 'f:2', message: 'expected only any-tenant, operator, unverified after the hash' }];
    expect(parseRpcTokens(text, 'f')).toEqual({ kind: 'error', problems });
    expect(mistakes(`team-a sha256:${B} operator`)).toHaveLength(1);
  });
});

describe('the file of keys', () => {
  test('comments, blank lines, tabs, CRLF, a byte order mark and upper-case hex are fine', () => {
    const text = `\uFEFF# clients\r\n\r\nteam-a sha256:${A.toUpperCase()}\r\n  team-b\tsha256:${B}   # the nightly job\r\n`;
    expect(parseApiKeys(text, 'f')).toEqual({
      kind: 'ok',
      keys: new Map([
        [A, 'team-a'],
        [B, 'team-b'],
      ]),
    });
  });

  test('a tenant may have several keys', () => {
    const parsed = parseApiKeys(`t sha256:${A}\nt sha256:${B}`, 'f');
    expect(parsed).toMatchObject({ kind: 'ok', keys: { size: 2 } });
  });

  test('each mistake names its line, and no message repeats a key', () => {
    const text = [
      'sk-plain-secret',
      'team-a sk-plain-secret',
      `team-a ${A}`,
      `team-a sha256:${A.slice(1)}`,
      `-secret sha256:${A}`,
      `${'x'.repeat(65)} sha256:${A}`,
      `anonymous sha256:${A}`,
      `cred-1 sha256:${A}`,
      `jwt-1 sha256:${A}`,
      `ok sha256:${A}`,
      `other sha256:${A.toUpperCase()}`,
    ].join('\n');
    const found = mistakes(text);
    expect(found.map((line) => line.split(': ', 1)[0])).toEqual(
      [1, 2, 3, 4, 5, 6, 7, 8, 9, 11].map((line) => `keys.txt:${line}`),
    );
    expect(found[0]).toContain('baton hash-key');
    expect(found.at(-1)).toContain('already in line 10');
    expect(found.join('\n')).not.toMatch(/secret|[0-9a-f]{20}/i);
  });

  test.each(['', '# nothing\n'])('a file without a key would refuse everybody: %j', (text) => {
    expect(mistakes(text)).toEqual(['keys.txt: has no key']);
  });
});

describe('with keys', () => {
  const authenticate = createAuthenticate(() => new Map([[A, 'team-a']]));

  test.each(['Bearer key-a', 'bearer key-a', 'BEARER   key-a'])('%s is team-a', (authorization) => {
    expect(authenticate({ authorization })).toEqual({ kind: 'ok', tenant: 'team-a' });
  });

  test.each([
    undefined,
    '',
    'Bearer',
    'Bearer ',
    'key-a',
    'Basic key-a',
    'Bearer key-A',
    'Bearer key-a x',
    `Bearer ${A}`,
  ])('%j is refused', async (authorization) => {
    const result = await authenticate(authorization === undefined ? {} : { authorization });
    if (result.kind === 'ok') throw new Error('was let in');
    const { headers, body } = renderRefusal(refusalOf(result.error));
    expect(result.error.httpStatus).toBe(401);
    expect(headers['www-authenticate']).toBe('Bearer');
    expect(JSON.parse(body)).toEqual({
      error: { message: expect.any(String), type: 'authentication_error', param: null, code: 'invalid_api_key' },
    });
    expect(body).not.toMatch(/key-a|Basic/i);
  });

  test('a key is bytes: what the file says of UTF-8 text holds for the header as Node gives it', () => {
    const keys = new Map([[hash('clé\u00a0à'), 'team-f']]);
    const authorization = `Bearer ${Buffer.from('clé\u00a0à').toString('latin1')}`;
    expect(createAuthenticate(() => keys)({ authorization })).toEqual({ kind: 'ok', tenant: 'team-f' });
  });

  test('other keys hold from the next request on', async () => {
    let keys = new Map([[A, 'team-a']]);
    const later = createAuthenticate(() => keys);
    keys = new Map([[B, 'team-b']]);
    expect((await later({ authorization: 'Bearer key-a' })).kind).toBe('refused');
    expect(later({ authorization: 'Bearer key-b' })).toEqual({ kind: 'ok', tenant: 'team-b' });
  });

  test('the credential of a client does not reach engines unless that is asked for', () => {
    const input = { engineKey: undefined, clientAuthorization: 'Bearer key-a', batonAuthenticates: true } as const;
    expect(decideEngineAuth({ ...input, mode: 'auto' })).toEqual({ authorization: undefined, auth: 'none' });
    expect(decideEngineAuth({ ...input, mode: 'forward' }).auth).toBe('client');
  });
});

describe('without keys', () => {
  const authenticate = createAuthenticate(() => undefined);
  const tenant = async (authorization?: string) => {
    const result = await authenticate(authorization === undefined ? {} : { authorization });
    return result.kind === 'ok' ? result.tenant : result.error.reason;
  };

  test('the tenant is a hash of the credential, whose spelling of "Bearer" does not count', async () => {
    expect(await tenant('Bearer key-a')).toBe(`cred-${A.slice(0, 32)}`);
    expect(await tenant('bearer  key-a')).toBe(await tenant('Bearer key-a'));
    expect(await tenant('Bearer key-b')).not.toBe(await tenant('Bearer key-a'));
    expect(await tenant('Basic key-a')).not.toBe(await tenant('Bearer key-a'));
    expect(await tenant('Basic a b')).not.toBe(await tenant('Basic a c'));
  });

  test('nobody is refused, and no credential is nobody', async () => {
    expect([await tenant(), await tenant('')]).toEqual(['anonymous', 'anonymous']);
  });
});

describe('hash-key', () => {
  const hashed = (text: string) => hashKeyLine(Buffer.from(text));

  test.each(['key-a', 'key-a\n', 'key-a\r\n'])('prints what the file takes: %j', (text) => {
    const result = hashed(text);
    expect(result).toEqual({ kind: 'ok', text: `sha256:${A}` });
    expect(mistakes(`t ${result.kind === 'ok' ? result.text : ''}`)).toEqual([]);
  });

  test.each(['', '\n', ' key-a', 'key a\n', 'key\u007f'])('refuses %j without showing it', (text) => {
    const result = hashed(text);
    expect(result.kind).toBe('bad');
    expect(JSON.stringify(result)).not.toMatch(/key-a|key a/);
  });
});
