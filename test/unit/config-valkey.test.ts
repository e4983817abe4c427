import { describe, expect, test } from 'vitest';
import { loadConfig } from '../../src/config/load-config.ts';
import { parseHostPort, parsePrefix, parseValkeyUrl } from '../../src/config/valkey.ts';

const known = { policies: ['round_robin'], connectors: ['nixl'], stores: ['memory', 'valkey'] };
const load = (flags: Record<string, string>, fileText?: string, env: Record<string, string> = {}) =>
  loadConfig({ flags, env, known, terminal: false, ...(fileText === undefined ? {} : { fileText }) });

describe('the valkey store', () => {
  test('is told by flags, by a variable or by the file', () => {
    const url = 'valkey://10.0.0.1:6379';
    const valkey = { url, cluster: false, sentinels: [], sentinelName: 'mymaster', prefix: 'baton' };
    const config = { store: { backend: 'valkey', valkey } };
    expect(load({ store: 'valkey', 'valkey-url': url })).toMatchObject({ kind: 'ok', config });
    expect(load({ store: 'valkey' }, undefined, { BATON_VALKEY_URL: url })).toMatchObject({ kind: 'ok', config });
    const file = `
store:
  backend: valkey
  valkey: { sentinels: ["10.0.0.1:26379", "[::1]:26379"], sentinel_name: kv, prefix: a.b, password_file: p, ca: c }
`;
    expect(load({}, file)).toMatchObject({
      kind: 'ok',
      config: {
        store: {
          valkey: {
            sentinels: ['10.0.0.1:26379', '[::1]:26379'],
            sentinelName: 'kv',
            prefix: 'a.b',
            passwordFile: 'p',
            caFile: 'c',
          },
        },
      },
    });
    const memory = load({ 'valkey-url': url });
    expect(memory.kind === 'ok' && memory.config.store.valkey).toBe(undefined);
  });

  test('warns of what the chosen backend has no use for', () => {
    const url = 'valkey://u:sesame@10.0.0.1';
    const unused = load({ 'valkey-url': url });
    expect(unused).toMatchObject({
      kind: 'ok',
      warnings: [{ where: '--valkey-url', message: expect.stringContaining('choose it with --store valkey') }],
    });
    expect(JSON.stringify({ ...unused, input: {}, keys: {} })).not.toContain('sesame');
    const file = 'store:\n  valkey: { password_file: p }\n';
    expect(load({}, file)).toMatchObject({ warnings: [{ where: expect.stringMatching(/:2:\d+$/) }] });
    const snapshot = { 'store-snapshot': 'f' };
    expect(load({ ...snapshot, store: 'valkey', 'valkey-url': url })).toMatchObject({
      kind: 'ok',
      warnings: [{ where: '--store-snapshot', message: expect.stringContaining('no effect with the valkey store') }],
    });
    const elsewhere = load({ roles: 'router,facade,registry', 'kvstore-url': 'http://h:1', 'valkey-url': url });
    expect(elsewhere).toMatchObject({
      kind: 'ok',
      warnings: [{ where: '--valkey-url', message: expect.stringContaining('the kvstore does not run here') }],
    });
    for (const fine of [load(snapshot), load({ store: 'valkey', 'valkey-url': url }), load({})]) {
      const warnings = fine.kind === 'ok' ? fine.warnings : [{ where: 'error', message: '' }];
      expect(warnings.filter(({ message }) => message.includes('store'))).toEqual([]);
    }
  });

  test('needs a server', () => {
    expect(load({ store: 'valkey' })).toMatchObject({
      kind: 'error',
      problems: [{ where: '--store', message: expect.stringContaining('--valkey-url') }],
    });
  });

  test('says what is wrong with a URL, never the URL', () => {
    for (const url of [
      'sesame',
      'http://u:sesame@h',
      'redis://u:sesame@h/x',
      'redis://u:sesame@h?db=1',
      'redis://u:sesame@h#1',
      'redis:///0',
    ]) {
      const problem = load({ store: 'valkey', 'valkey-url': url });
      expect(problem).toMatchObject({ kind: 'error', problems: [{ where: '--valkey-url' }] });
      expect(JSON.stringify(problem)).not.toContain('sesame');
    }
    for (const url of ['redis://h', 'rediss://u:p%40@h:1/2', 'valkeys://[::1]:7', 'valkey://:p@h/']) {
      expect(parseValkeyUrl(url)).toEqual({ kind: 'ok', value: url });
    }
  });

  test('checks addresses and prefixes', () => {
    for (const text of ['h', 'h:0', 'h:70000', '::1:5', 'h:x', 5]) expect(parseHostPort(text).kind).toBe('bad');
    for (const text of ['', 'a b', '{a}', 'a'.repeat(65), 5]) expect(parsePrefix(text).kind).toBe('bad');
  });
});
