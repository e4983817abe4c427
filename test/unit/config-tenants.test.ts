import { describe, expect, test } from 'vitest';
import { loadConfig } from '../../src/config/load-config.ts';
import { KNOWN } from '../../src/known.ts';

const load = (fileText: string, flags: Readonly<Record<string, string | readonly string[]>> = {}) =>
  loadConfig({ flags, env: {}, fileText, known: KNOWN, terminal: false });

const problems = (text: string) => {
  const loaded = load(text);
  return loaded.kind === 'error' ? loaded.problems.map(({ where, message }) => `${where}: ${message}`) : [];
};

describe('tenants in the settings', () => {
  test('own limits stand in place of those of all', () => {
    const loaded = load(
      'tenant: {limits: {requests_per_minute: 10, concurrency: 2}, own_limits: [{name: a, concurrency: 0}, {name: b}]}',
    );
    expect(loaded).toMatchObject({
      kind: 'ok',
      config: {
        tenant: {
          limits: { requestsPerMinute: 10, tokensPerMinute: 0, concurrency: 2 },
          ownLimits: {
            a: { requestsPerMinute: 10, tokensPerMinute: 0, concurrency: 0 },
            b: { requestsPerMinute: 10, tokensPerMinute: 0, concurrency: 2 },
          },
        },
      },
    });
  });

  test('flags name the header and the proxies', () => {
    const loaded = load('', { 'tenant-header': 'X-Tenant', 'trusted-proxy': ['10.0.0.0/8', '::1'] });
    expect(loaded).toMatchObject({
      kind: 'ok',
      config: { tenant: { header: 'x-tenant', trustedProxies: [{ bits: 8 }, { address: '::1' }] } },
    });
  });

  test('mistakes name their line', () => {
    expect(problems('tenant:\n  trusted_proxies: [10.0.0.0/40]\n')).toEqual([
      expect.stringMatching(/^baton\.yaml:2:\d+: .*expected an address or a network/),
    ]);
    expect(problems('tenant:\n  own_limits:\n    - name: a\n    - name: a\n')).toEqual([
      expect.stringMatching(/^baton\.yaml:4:\d+: "a" is there twice/),
    ]);
    expect(problems('tenant: {own_limits: [{name: anonymous}]}')).toEqual([
      expect.stringContaining('expected the name of a tenant'),
    ]);
  });

  test('a header that nobody may send is warned about', () => {
    expect(load('tenant:\n  header: x-tenant\n')).toMatchObject({
      kind: 'ok',
      warnings: [
        { where: 'baton.yaml:2:3', message: expect.stringContaining('no effect without tenant.trusted_proxies') },
      ],
    });
  });

  test('limits that a client escapes with another credential are warned about', () => {
    const limits = 'tenant: {limits: {concurrency: 1}}\n';
    const warnings = (text: string) => {
      const loaded = load(text);
      return loaded.kind === 'ok' ? loaded.warnings.filter(({ message }) => message.includes('credential')) : undefined;
    };
    expect(warnings(limits)).toHaveLength(1);
    expect(warnings(`${limits}auth: {api_keys_file: keys.txt}\n`)).toEqual([]);
    expect(warnings('')).toEqual([]);
  });
});
