import { describe, expect, test } from 'vitest';
import { hostPortUrl, isLoopback, parseServerUrl } from '../../src/config/instance-url.ts';

describe('parseServerUrl', () => {
  test.each([
    ['http://10.0.0.1:8100', 'http://10.0.0.1:8100', '10.0.0.1:8100'],
    ['http://localhost:8100/', 'http://localhost:8100', 'localhost:8100'],
    ['HTTP://Engine.Example:8100', 'http://engine.example:8100', 'engine.example:8100'],
    ['http://engine', 'http://engine', 'engine:80'],
    ['http://engine:80', 'http://engine', 'engine:80'],
    ['https://engine/a/b/', 'https://engine/a/b', 'engine:443/a/b'],
    ['http://[::1]:8100', 'http://[::1]:8100', '[::1]:8100'],
    [' http://[0:0::1]:8100 ', 'http://[::1]:8100', '[::1]:8100'],
  ])('%s', (raw, url, id) => {
    expect(parseServerUrl(raw)).toEqual({ kind: 'ok', value: { url, id } });
  });

  test.each([
    ['localhost:8100', 'write "http://localhost:8100"'],
    ['8100', 'expected a URL like'],
    ['', 'expected a URL like'],
    ['ftp://x', 'expected http:// or https://'],
    ['http://', 'expected a URL like'],
    ['http://::1:8100', 'an IPv6 address in a URL needs brackets'],
    ['http://x:0', 'expected a port from 1 to 65535'],
    ['http://x:99999', 'expected a URL like'],
    ['http://x:8100?a=1', 'without ? and #'],
    ['http://x:8100#a', 'without ? and #'],
    [5, 'expected a URL like'],
    [null, 'expected a URL like'],
  ])('%j is refused', (raw, message) => {
    expect(parseServerUrl(raw)).toMatchObject({ kind: 'bad', message: expect.stringContaining(message) });
  });

  test('a password in a URL is refused and not shown', () => {
    for (const raw of ['http://me:hunter2@x:8100', 'https://me:hunter2@x', '//me:hunter2@x']) {
      const parsed = parseServerUrl(raw);
      expect(parsed).toMatchObject({ kind: 'bad', message: expect.stringContaining('without user and password') });
      expect(JSON.stringify(parsed)).not.toContain('hunter2');
    }
  });
});

describe('hostPortUrl', () => {
  test.each([
    ['localhost', 'http://localhost:8100'],
    ['::1', 'http://[::1]:8100'],
    ['[::1]', 'http://[::1]:8100'],
    ['fd00::2', 'http://[fd00::2]:8100'],
  ])('%s', (host, url) => {
    expect(hostPortUrl(host, 8100)).toEqual({ kind: 'ok', value: url });
  });

  test.each([
    ['http://localhost', 'expected a host name'],
    ['localhost:8100', 'expected a host without a port'],
    ['a b', 'expected a host name'],
    ['', 'expected a host name'],
  ])('%s is refused', (host, message) => {
    expect(hostPortUrl(host, 8100)).toMatchObject({ kind: 'bad', message: expect.stringContaining(message) });
  });
});

test('isLoopback knows the names of this machine', () => {
  for (const host of ['localhost', '127.0.0.1', '127.5.0.1', '::1']) expect(isLoopback(host)).toBe(true);
  for (const host of ['0.0.0.0', '::', '10.0.0.1', '127.example.com', 'localhost.example.com'])
    expect(isLoopback(host)).toBe(false);
});
