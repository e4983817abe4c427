import { describe, expect, test } from 'vitest';
import { decideEngineAuth, type EngineAuthMode } from '../../src/core/engine-auth.ts';
import { classifyStatus } from '../../src/services/leg.ts';
import { probeKeyOf } from '../../src/services/probe-key.ts';
import { utf8 } from './json-text.ts';

const KEY = 'own';
const CLIENT = 'Bearer client';
const NONE = { authorization: undefined, auth: 'none' };
const OWN = { authorization: 'Bearer own', auth: 'own' };
const FORWARDED = { authorization: CLIENT, auth: 'client' };

describe('decideEngineAuth', () => {
  test.each<[EngineAuthMode, string | undefined, string | undefined, boolean, object]>([
    // mode, baton's key, the client's header, baton authenticates
    ['auto', KEY, CLIENT, false, OWN],
    ['auto', KEY, undefined, false, OWN],
    ['auto', KEY, CLIENT, true, OWN],
    ['auto', undefined, CLIENT, false, FORWARDED],
    ['auto', '', CLIENT, false, FORWARDED],
    ['auto', undefined, undefined, false, NONE],
    ['auto', undefined, CLIENT, true, NONE],
    ['replace', KEY, CLIENT, false, OWN],
    ['replace', KEY, undefined, true, OWN],
    ['replace', undefined, CLIENT, false, NONE],
    ['replace', '', CLIENT, false, NONE],
    ['forward', KEY, CLIENT, false, FORWARDED],
    ['forward', KEY, CLIENT, true, FORWARDED],
    ['forward', KEY, undefined, false, NONE],
    ['forward', undefined, 'Basic eA==', false, { authorization: 'Basic eA==', auth: 'client' }],
    ['strip', KEY, CLIENT, false, NONE],
    ['strip', undefined, CLIENT, false, NONE],
  ])(
    '%s, key %s, client %s, baton checks keys: %s',
    (mode, engineKey, clientAuthorization, batonAuthenticates, expected) => {
      expect(decideEngineAuth({ mode, engineKey, clientAuthorization, batonAuthenticates })).toEqual(expected);
    },
  );
});

describe('an engine that refuses a credential', () => {
  const refuse = (status: number, auth: 'own' | 'client' | 'none') =>
    classifyStatus(status, {}, utf8('{"error":"Unauthorized"}'), auth);

  test.each([401, 403])("%i is the client's to know when the credential was the client's", (status) => {
    for (const auth of ['client', 'none'] as const) {
      expect(refuse(status, auth)).toMatchObject({
        kind: 'refused',
        refusal: { status, error: { message: 'Unauthorized' } },
      });
    }
  });

  test.each([401, 403])(
    "%i on baton's own key is baton's fault, and nothing that another engine would mend",
    (status) => {
      const refusal = refuse(status, 'own');
      expect(refusal).toMatchObject({
        kind: 'refused',
        refusal: { status: 502, error: { code: 'engine_auth', type: 'upstream_error' } },
      });
      expect(JSON.stringify(refusal)).not.toContain('Unauthorized');
    },
  );

  test('other statuses do not depend on the credential', () => {
    expect(refuse(404, 'own')).toMatchObject({ kind: 'refused', refusal: { status: 404 } });
    expect(refuse(500, 'own')).toMatchObject({ kind: 'failed', cause: 'status', refusal: { status: 500 } });
  });
});

describe('classifyStatus', () => {
  test.each([200, 201, 204, 299])('%i is a success', (status) => {
    expect(classifyStatus(status, {}, utf8('{}'), 'none')).toBeUndefined();
  });

  test.each([400, 404, 413, 422])("%i that says why is the request's own fault", (status) => {
    const body = utf8('{"error":{"message":"no such thing as the request asks for","type":"NotFoundError"}}');
    expect(classifyStatus(status, {}, body, 'none')).toMatchObject({ kind: 'refused', refusal: { status } });
  });

  test.each([
    [404, '{}'],
    [404, '{"detail":"Not Found"}'],
    [405, '{"detail":"Method Not Allowed"}'],
  ])('%i with %s is an engine without the route: another one may have it', (status, body) => {
    expect(classifyStatus(status, {}, utf8(body), 'none')).toMatchObject({
      kind: 'failed',
      cause: 'route_missing',
      refusal: { status: 502 },
    });
  });

  test.each([
    [429, { 'retry-after': '7' }, 7],
    [503, {}, 1],
    [503, { 'retry-after': 'Wed, 21 Oct 2026 07:28:00 GMT' }, 1],
    [503, { 'retry-after': '-5' }, 1],
  ])('%i with %o is worth another try after %i s', (status, headers, retryAfterSeconds) => {
    expect(classifyStatus(status, headers, utf8(''), 'none')).toMatchObject({
      kind: 'failed',
      refusal: { status, retryAfterSeconds },
    });
  });

  test.each([100, 301, 307])('%i is no answer to a leg', (status) => {
    expect(classifyStatus(status, {}, utf8(''), 'none')).toMatchObject({ kind: 'failed', refusal: { status: 502 } });
  });
});

describe('probes', () => {
  test.each<[EngineAuthMode, string | undefined, string | undefined, string | undefined]>([
    ['auto', 'pool', 'env', 'pool'],
    ['auto', undefined, 'env', 'env'],
    ['replace', 'pool', undefined, 'pool'],
    ['forward', 'pool', 'env', 'pool'],
    ['forward', undefined, 'env', undefined],
    ['strip', 'pool', 'env', undefined],
  ])('%s with the pool key %s and the environment key %s send %s', (engineAuth, apiKey, openaiApiKey, expected) => {
    const instance = apiKey === undefined ? {} : { apiKey };
    expect(probeKeyOf(instance, { engineAuth, ...(openaiApiKey === undefined ? {} : { openaiApiKey }) })).toBe(
      expected,
    );
  });
});
