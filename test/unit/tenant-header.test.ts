import type { IncomingMessage } from 'node:http';
import { describe, expect, test } from 'vitest';
import { parseNetwork } from '../../src/config/values.ts';
import { takeProxyHeaders, trustedPeers } from '../../src/http/tenant-header.ts';

const networks = (...texts: readonly string[]) =>
  texts.map((text) => {
    const parsed = parseNetwork(text);
    if (parsed.kind === 'bad') throw new Error(parsed.message);
    return parsed.value;
  });
const trusted = trustedPeers(networks('10.0.0.0/8', '192.168.1.7', 'fd00::/8'));

function take(remoteAddress: string | undefined, headers: Record<string, string>) {
  const request = { socket: { remoteAddress }, headers: { accept: '*/*', ...headers } };
  const tenant = takeProxyHeaders({ header: 'x-tenant', trusted }, request as unknown as IncomingMessage);
  return { tenant, headers: request.headers };
}

const SAID = { forwarded: 'for=1.2.3.4', 'x-forwarded-for': '10.0.0.1', 'x-real-ip': '10.0.0.1', via: '1.1 x' };

describe('who may speak for others', () => {
  test.each(['10.1.2.3', '::ffff:10.1.2.3', '192.168.1.7', 'fd12::1'])('%s is listed', (address) => {
    expect(take(address, { ...SAID, 'x-tenant': 'team-a' })).toEqual({
      tenant: 'team-a',
      headers: { accept: '*/*', ...SAID },
    });
  });

  test.each(['11.0.0.1', '::ffff:192.168.1.8', '::1', 'fe80::1', 'nonsense', undefined])('%s is not', (address) => {
    expect(take(address, { ...SAID, 'x-tenant': 'team-a' })).toEqual({ tenant: undefined, headers: { accept: '*/*' } });
  });

  test.each(['', 'a, b', 'a b', 'anonymous', 'cred-1', 'x'.repeat(65), '../a'])('%j is no tenant', (name) => {
    expect(() => take('10.0.0.1', { 'x-tenant': name })).toThrow('The header x-tenant names no tenant.');
    expect(take('11.0.0.1', { 'x-tenant': name }).tenant).toBeUndefined();
  });

  test('a trusted proxy need not name one', () => {
    expect(take('10.0.0.1', {}).tenant).toBeUndefined();
  });
});

describe('networks in settings', () => {
  test.each([
    ['10.0.0.7', { address: '10.0.0.7', bits: 32, family: 'ipv4' }],
    ['10.0.0.0/8', { address: '10.0.0.0', bits: 8, family: 'ipv4' }],
    ['fd00::/8', { address: 'fd00::', bits: 8, family: 'ipv6' }],
    ['::1', { address: '::1', bits: 128, family: 'ipv6' }],
  ])('%s', (text, value) => {
    expect(parseNetwork(text)).toEqual({ kind: 'ok', value });
  });

  test.each(['', '10.0.0.0/33', '10.0.0.256', '10.0.0', 'fd00::/129', ':::', 'proxy.local', '10.0.0.0/', 7, null])(
    '%j is none',
    (raw) => {
      expect(parseNetwork(raw).kind).toBe('bad');
    },
  );
});
