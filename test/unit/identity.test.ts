import fc from 'fast-check';
import { describe, expect, test } from 'vitest';
import { type Api, readFacts } from '../../src/core/facts.ts';
import { readIdentity } from '../../src/core/identity.ts';
import { scanObject } from '../../src/core/json-scan.ts';

const HEADERS = ['x-session-id', 'session-id'];
const encoder = new TextEncoder();

function scanned(text: string) {
  const body = encoder.encode(text);
  const scan = scanObject(body);
  if (scan.kind !== 'object') throw new Error(`not an object: ${text}`);
  return { body, scan };
}

function identity(body: unknown, headers: Record<string, string | string[]> = {}, names = HEADERS) {
  const { body: bytes, scan } = scanned(typeof body === 'string' ? body : JSON.stringify(body));
  return readIdentity(names, headers, bytes, scan);
}

const named = (conversationId: string) => ({ kind: 'named', conversationId });
const NONE = { kind: 'none' };

describe('where a conversation is named', () => {
  const everywhere = {
    conversation_id: 'c',
    session_id: 's',
    vllm_xargs: { session_id: 'x' },
    prompt_cache_key: 'p',
  };

  test('the first that is present counts', () => {
    const headers = { 'x-session-id': 'h1', 'session-id': 'h2' };
    expect(identity(everywhere, headers)).toEqual(named('h1'));
    expect(identity(everywhere, { 'session-id': 'h2' })).toEqual(named('h2'));
    expect(identity(everywhere)).toEqual(named('c'));
    expect(identity({ ...everywhere, conversation_id: null })).toEqual(named('s'));
    expect(identity({ ...everywhere, conversation_id: '', session_id: null })).toEqual(named('x'));
    expect(identity({ vllm_xargs: { other: 1 }, prompt_cache_key: 'p' })).toEqual(named('p'));
    expect(identity({})).toEqual(NONE);
  });

  test('the order of the headers is that of the configuration', () => {
    const headers = { 'x-session-id': 'h1', 'session-id': 'h2', other: 'h3' };
    expect(identity({}, headers, ['session-id', 'x-session-id'])).toEqual(named('h2'));
    expect(identity({}, headers, [])).toEqual(NONE);
  });

  test('of duplicate members the last counts, and escapes are read', () => {
    expect(identity('{"session_id":"a","session_id":"b"}')).toEqual(named('b'));
    expect(identity('{"session\\u005fid":"\\u0062"}')).toEqual(named('b'));
  });
});

describe('unusable values', () => {
  const long = 'x'.repeat(513);
  const bad = [1, true, {}, ['s'], '', long, 'é'.repeat(257), 'a\nb', 'a\u0000', 'a\u007f', '\u0085', '\ud800'];

  test.each(bad.map((value) => [JSON.stringify(value).slice(0, 20), value]))(
    'are passed over in members that engines know: %s',
    (_, value) => {
      expect(identity({ session_id: value, prompt_cache_key: 'p' })).toEqual(named('p'));
      expect(identity({ vllm_xargs: { session_id: value }, prompt_cache_key: 'p' })).toEqual(named('p'));
      expect(identity({ prompt_cache_key: value })).toEqual(NONE);
    },
  );

  test.each([[''], ['a\tb'], [long], ['\u00e9'], [['a', 'b']]])('are passed over in headers: %j', (value) => {
    expect(identity({ session_id: 's' }, { 'x-session-id': value as string })).toEqual(named('s'));
    expect(identity({}, { 'x-session-id': value as string, 'session-id': 'h2' })).toEqual(named('h2'));
  });

  test.each([
    [1, 'must be a string'],
    [{}, 'must be a string'],
    [long, 'at most 512 bytes'],
    ['é'.repeat(257), 'at most 512 bytes'],
    ['a\nb', 'control characters'],
    ['\ud800', 'half characters'],
  ])("are a mistake in baton's own conversation_id, whatever else names one: %j", (value, message) => {
    const result = identity({ conversation_id: value, session_id: 's' }, { 'x-session-id': 'h' });
    expect(result).toEqual({ kind: 'invalid', message: expect.stringContaining(message) });
  });

  test('512 bytes are not too long', () => {
    for (const id of ['x'.repeat(512), 'é'.repeat(256)]) {
      expect(identity({ conversation_id: id })).toEqual(named(id));
      expect(identity({ session_id: id })).toEqual(named(id));
    }
  });
});

test('a header and the body name the same conversation by the same text', () => {
  fc.assert(
    fc.property(fc.string({ unit: 'grapheme', minLength: 1, maxLength: 40 }), (id) => {
      fc.pre(!/[\p{Cc}\p{Cs}]/u.test(id));
      const asNodeGivesIt = Buffer.from(id).toString('latin1');
      expect(identity({}, { 'x-session-id': asNodeGivesIt })).toEqual(identity({ conversation_id: id }));
    }),
  );
});

test('two ids that differ are never made equal', () => {
  const text = fc.string({ unit: 'binary', maxLength: 600 });
  fc.assert(
    fc.property(text, text, (a, b) => {
      fc.pre(a !== b);
      const [first, second] = [identity({ session_id: a }), identity({ session_id: b })];
      if (first.kind === 'named' && second.kind === 'named') expect(first).not.toEqual(second);
    }),
  );
});

describe('continues', () => {
  const continues = (text: string, api: Api = 'chat.completions') => {
    const { body, scan } = scanned(text);
    return readFacts(api, body, scan).continues;
  };

  test.each([
    '{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"},{"role":"user","content":"c"}]}',
    '{"messages":[{"content":"b\\"}","role":"assistant"}]}',
    '{ "messages" : [ { "r\\u006fle" : "assist\\u0061nt" } ] }',
    '{"messages":[{"role":"user","role":"assistant"}]}',
    '{"messages":[{"content":[{"text":"]"}],"role":"assistant"},{"role":"tool"}]}',
  ])('%s', (text) => {
    expect(continues(text)).toBe(true);
    expect(continues(text, 'completions')).toBe(false);
  });

  test.each([
    '{}',
    '{"messages":null}',
    '{"messages":[]}',
    '{"messages":"assistant"}',
    '{"messages":["assistant",1,null,["role","assistant"]]}',
    '{"messages":{"role":"assistant"}}',
    '{"messages":[{"role":"user","content":"{\\"role\\":\\"assistant\\"}"}]}',
    '{"messages":[{"role":"user","content":[{"role":"assistant"}],"x":{"role":"assistant"}}]}',
    '{"messages":[{"role":"assistant","role":"user"}]}',
    '{"messages":[{"role":["assistant"]}],"role":"assistant"}',
  ])('not: %s', (text) => {
    expect(continues(text)).toBe(false);
  });
});
