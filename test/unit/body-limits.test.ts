import { describe, expect, test } from 'vitest';
import { findBodyFault, scanBody } from '../../src/core/body-limits.ts';
import { scanObject } from '../../src/core/json-scan.ts';
import { utf8 } from './json-text.ts';

const members = (count: number) => Array.from({ length: count }, (_, index) => `"k${index}":1`).join(',');

describe('scanBody', () => {
  test('takes a thousand members and refuses one more, without reading what is behind it', () => {
    expect(scanBody(utf8(`{${members(1000)}}`))).toMatchObject({ kind: 'object', members: { length: 1000 } });
    // What follows is no JSON: a scan to the end would say so.
    const refused = { kind: 'over-limit', key: 'k1000', message: 'more than 1000 members' };
    expect(scanBody(utf8(`{${members(1001)}!`))).toEqual(refused);
    expect(scanBody(utf8(`{${'"a":1,'.repeat(1001)}`))).toMatchObject({ kind: 'over-limit', key: 'a' });
    expect(scanObject(utf8(`{${members(1001)}}`)).kind).toBe('object');
  });

  test('counts no members within others', () => {
    const inner = `{${members(2000)}}`;
    const body = `{"messages":[${inner}],"vllm_xargs":${inner}}`;
    expect(scanBody(utf8(body))).toMatchObject({ kind: 'object', members: { length: 2 } });
  });

  test('takes a name of 1024 bytes and tells the beginning of a longer one', () => {
    expect(scanBody(utf8(`{"${'k'.repeat(1024)}":1}`)).kind).toBe('object');
    expect(scanBody(utf8(`{"a":1,"${'k'.repeat(1025)}":!`))).toEqual({
      kind: 'over-limit',
      key: 'k'.repeat(64),
      message: 'a member whose name is longer than 1024 bytes',
    });
    expect(scanBody(utf8(`{"${'é'.repeat(513)}":1}`)).kind).toBe('over-limit');
  });
});

describe('findBodyFault', () => {
  const faultOf = (text: string) => {
    const body = utf8(text);
    const scan = scanObject(body);
    if (scan.kind !== 'object') throw new Error(`no object: ${text}`);
    return findBodyFault(body, scan);
  };

  test.each(['model', 'cache_salt'])('%s may have 512 bytes of UTF-8, however it is written', (param) => {
    for (const text of ['m'.repeat(512), 'é'.repeat(256), '\\u006d'.repeat(512)]) {
      expect(faultOf(`{"${param}":"${text}"}`)).toBeUndefined();
    }
    for (const text of ['m'.repeat(513), 'é'.repeat(257), '\\u006d'.repeat(513), 'm'.repeat(100_000)]) {
      const message = `\`${param}\` must be at most 512 bytes long.`;
      expect(faultOf(`{"${param}":"${text}"}`)).toEqual({ param, message });
    }
  });

  test('a salt has no half characters; what is no text is not looked at', () => {
    expect(faultOf('{"cache_salt":"\\ud800"}')).toMatchObject({ param: 'cache_salt' });
    expect(faultOf('{"cache_salt":"\\ud83d\\ude00"}')).toBeUndefined();
    expect(faultOf(`{"model":[${'1,'.repeat(1000)}1],"cache_salt":null}`)).toBeUndefined();
  });
});
