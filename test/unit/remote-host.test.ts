import { describe, expect, test } from 'vitest';
import { decodeKvTransferParams } from '../../src/core/kv-transfer.ts';
import { hostOf, isLoopbackHost, replaceLoopbackHost } from '../../src/core/remote-host.ts';
import { textOf, utf8 } from './json-text.ts';

const handle = (host: string) =>
  `{ "remote_engine_id":"e","remote_host" : ${JSON.stringify(host)},"remote_port":5600.0 }`;

function replaced(host: string, rule: 'keep' | 'instance' | 'auto', owner: string, reader: string): string | undefined {
  const raw = utf8(handle(host));
  const params = decodeKvTransferParams(raw);
  if (params === undefined) throw new Error('no handle');
  const json = replaceLoopbackHost(raw, params, rule, owner, reader);
  return json === undefined ? undefined : textOf(json);
}

describe('replaceLoopbackHost', () => {
  test.each<[string, 'keep' | 'instance' | 'auto', string, string, string | undefined]>([
    // A real address is the engine's own business, however foreign it looks.
    ['10.0.0.9', 'auto', 'http://a:8100', 'http://b:8200', '10.0.0.9'],
    ['p.svc', 'auto', 'http://127.0.0.1:8100', 'http://b:8200', 'p.svc'],
    // A loopback name serves readers on the same host and no others.
    ['localhost', 'auto', 'http://a:8100', 'http://a:8200', 'localhost'],
    ['localhost', 'auto', 'http://A:8100', 'http://a:8200', 'localhost'],
    ['127.0.0.1', 'auto', 'http://localhost:8100', 'http://127.0.0.1:8200', '127.0.0.1'],
    ['localhost', 'auto', 'http://a:8100', 'http://b:8200', 'a'],
    ['127.0.1.1', 'auto', 'http://10.0.0.1:8100/prefix', 'http://10.0.0.2:8200', '10.0.0.1'],
    ['::1', 'auto', 'http://[fd00::1]:8100', 'http://b', 'fd00::1'],
    ['0.0.0.0', 'auto', 'http://a', 'http://b', 'a'],
    ['localhost', 'auto', 'http://a:8100', 'http://localhost:8200', 'a'],
    // Nothing is known that the reader could reach.
    ['localhost', 'auto', 'http://127.0.0.1:8100', 'http://b:8200', undefined],
    ['localhost', 'auto', 'http://[::1]:8100', 'http://b:8200', undefined],
    // The two fixed rules.
    ['localhost', 'keep', 'http://a', 'http://b', 'localhost'],
    ['10.0.0.9', 'instance', 'http://a:1', 'http://b', 'a'],
    ['localhost', 'instance', 'http://127.0.0.1:8100', 'http://b', '127.0.0.1'],
  ])('%s under %s, owner %s, reader %s: %s', (host, rule, owner, reader, expected) => {
    expect(replaced(host, rule, owner, reader)).toBe(expected === undefined ? undefined : handle(expected));
  });
});

test.each([
  ['http://a', 'a'],
  ['https://Host.Example:8443/prefix/x', 'host.example'],
  ['http://10.0.0.1:80', '10.0.0.1'],
  ['http://[FE80::1]:8100/v', 'fe80::1'],
  ['http://[::1]', '::1'],
])('the host of %s is %s', (url, host) => {
  expect(hostOf(url)).toBe(host);
});

test.each([
  ['localhost', true],
  ['LOCALHOST', true],
  ['127.0.0.1', true],
  ['127.9.9.9', true],
  ['::1', true],
  ['[::1]', true],
  ['0.0.0.0', true],
  ['10.0.0.1', false],
  ['localhost.example', false],
  ['1270.example', false],
  ['', false],
])('%j only reaches its own machine: %s', (host, isLoopback) => {
  expect(isLoopbackHost(host)).toBe(isLoopback);
});
