import { describe, expect, test } from 'vitest';
import { suggest } from '../../src/config/suggest.ts';
import {
  choiceParser,
  countParser,
  listParser,
  parseBoolean,
  parseDuration,
  parseHeaders,
  parseListenHost,
  parseListenPort,
  parsePort,
  parseSecret,
  parseSize,
} from '../../src/config/values.ts';

describe('parseDuration', () => {
  test.each([
    ['30s', 30_000],
    ['500ms', 500],
    ['2m', 120_000],
    ['1h', 3_600_000],
    ['1m30s', 90_000],
    ['1.5s', 1500],
    [1.1, 1100],
    [30, 30_000],
    ['30', 30_000],
    [0, 0],
    ['0', 0],
    ['0s', 0],
    ['0.1ms', 1],
  ])('%j is %d ms', (raw, value) => {
    expect(parseDuration(raw)).toEqual({ kind: 'ok', value });
  });

  test.each(['', '3 seconds', '-1s', -1, 'off', '3sec', null, undefined, true, Number.NaN, [], '30s,'])(
    '%j is refused',
    (raw) => {
      expect(parseDuration(raw)).toMatchObject({
        kind: 'bad',
        message: expect.stringContaining('expected a duration like "3s"'),
      });
    },
  );

  test('a delay that a timer cannot hold is refused', () => {
    expect(parseDuration('25h')).toMatchObject({ kind: 'ok' });
    expect(parseDuration(2_147_484)).toMatchObject({ kind: 'bad', message: expect.stringContaining('24 days') });
  });
});

describe('parseSize', () => {
  test.each([
    ['64MiB', 67_108_864],
    ['64Mi', 67_108_864],
    ['64 mib', 67_108_864],
    ['10MB', 10_000_000],
    ['1.5KiB', 1536],
    ['1GiB', 1_073_741_824],
    ['512', 512],
    [512, 512],
    ['7B', 7],
  ])('%j is %d bytes', (raw, value) => {
    expect(parseSize(raw)).toEqual({ kind: 'ok', value });
  });

  test.each(['', '64M', '-1', 0, '0', '1TiB', null, true, '64MiB/s'])('%j is refused', (raw) => {
    expect(parseSize(raw)).toMatchObject({ kind: 'bad', message: expect.stringContaining('expected a size') });
  });
});

describe('ports, hosts and counts', () => {
  test('a listening port is 0 to 65535 or off, as a number or as text', () => {
    expect(parseListenPort(0)).toEqual({ kind: 'ok', value: 0 });
    expect(parseListenPort('65535')).toEqual({ kind: 'ok', value: 65_535 });
    expect(parseListenPort('OFF')).toEqual({ kind: 'ok', value: 'off' });
    for (const raw of [-1, 65_536, '80a', '', '0x50', 1.5, false, null]) expect(parseListenPort(raw).kind).toBe('bad');
  });

  test('a port to connect to is not 0', () => {
    expect(parsePort('8100')).toEqual({ kind: 'ok', value: 8100 });
    for (const raw of ['0', '65536', '-1', '8100x', '']) expect(parsePort(raw).kind).toBe('bad');
  });

  test('a listening address has neither scheme nor port', () => {
    for (const [raw, value] of [
      ['0.0.0.0', '0.0.0.0'],
      ['localhost', 'localhost'],
      ['::', '::'],
      ['[::1]', '::1'],
      ['fe80::1%eth0', 'fe80::1%eth0'],
    ]) {
      expect(parseListenHost(raw)).toEqual({ kind: 'ok', value });
    }
    for (const raw of ['', 'http://x', 'x:80', 'a b', 5, null]) expect(parseListenHost(raw).kind).toBe('bad');
  });

  test('a count stays in its range', () => {
    const parse = countParser(1, 10);
    expect(parse('10')).toEqual({ kind: 'ok', value: 10 });
    for (const raw of [0, 11, 1.5, '1e1', ''])
      expect(parse(raw)).toMatchObject({ kind: 'bad', message: expect.stringContaining('from 1 to 10') });
  });
});

describe('words', () => {
  test('booleans as YAML and variables write them', () => {
    for (const raw of [true, 'true', '1', 'YES', 'on']) expect(parseBoolean(raw)).toEqual({ kind: 'ok', value: true });
    for (const raw of [false, 'false', '0', 'no', 'off'])
      expect(parseBoolean(raw)).toEqual({ kind: 'ok', value: false });
    for (const raw of ['maybe', 1, null, '']) expect(parseBoolean(raw).kind).toBe('bad');
  });

  test('a wrong word gets the list and the nearest one', () => {
    const parse = choiceParser(['replace', 'forward']);
    expect(parse('Replace')).toEqual({ kind: 'ok', value: 'replace' });
    expect(parse('foward')).toEqual({
      kind: 'bad',
      message: 'expected one of replace, forward, got "foward"; did you mean forward?',
    });
    expect(parse('zzz')).toEqual({ kind: 'bad', message: 'expected one of replace, forward, got "zzz"' });
  });

  test('a list comes as YAML or as text with commas or spaces', () => {
    const parse = listParser(countParser(0, 9));
    for (const raw of [[1, 2], '1,2', '1 2', ['1,2'], ['1', 2]])
      expect(parse(raw)).toEqual({ kind: 'ok', value: [1, 2] });
    expect(parse([1, 'x']).kind).toBe('bad');
  });

  test('a suggestion ignores case and dashes and keeps quiet when nothing is near', () => {
    expect(suggest('ROUND-ROBIN', ['round_robin', 'random'])).toBe('round_robin');
    expect(suggest('conect', ['connect', 'store'])).toBe('connect');
    expect(suggest('banana', ['connect', 'store'])).toBeUndefined();
  });
});

describe('headers and keys', () => {
  test('names become lower case and numbers text', () => {
    expect(parseHeaders({ 'X-Team': 'a', 'x-n': 5 })).toEqual({ kind: 'ok', value: { 'x-team': 'a', 'x-n': '5' } });
  });

  test('what would break a request is refused', () => {
    for (const raw of [
      { Host: 'x' },
      { 'content-length': '1' },
      { 'a b': 'x' },
      { x: 'a\r\nb: c' },
      { x: null },
      [],
      'x',
    ]) {
      expect(parseHeaders(raw).kind).toBe('bad');
    }
  });

  test('messages do not show secrets', () => {
    expect(JSON.stringify(parseHeaders({ 'x-key': 'secret\nvalue' }))).not.toContain('secret');
    expect(JSON.stringify(parseSecret('secret value'))).not.toContain('secret');
  });
});
