import { createHash } from 'node:crypto';
import { describe, expect, test } from 'vitest';
import type { Api } from '../../src/core/facts.ts';
import { scanObject } from '../../src/core/json-scan.ts';
import { prefixMarks } from '../../src/core/prefix-marks.ts';

function marksOf(body: unknown, api: Api = 'chat.completions') {
  const bytes = new TextEncoder().encode(JSON.stringify(body));
  const scan = scanObject(bytes);
  if (scan.kind !== 'object') throw new Error('no object');
  return prefixMarks(api, bytes, scan, () => createHash('sha256'));
}

const hashes = (...args: Parameters<typeof marksOf>) => marksOf(...args).map(({ hash }) => hash);
const turn = (content: string, role = 'user') => ({ role, content });
const CHAT = [turn('be brief', 'system'), turn('hello'), turn('hi', 'assistant'), turn('and then?')];

describe('a chat', () => {
  test('has a mark after each message, and the next turn has all of them', () => {
    const first = marksOf({ model: 'm', messages: CHAT.slice(0, 2) });
    const next = marksOf({ temperature: 1, messages: CHAT, model: 'm' });
    expect(next.slice(0, 2)).toEqual(first);
    expect(next.map(({ bytes }) => bytes)).toEqual([38, 71, 106, 143]);
    expect(new Set(next.map(({ hash }) => hash)).size).toBe(4);
  });

  test.each([
    ['another model', { model: 'n' }],
    ['another salt', { cache_salt: 's' }],
    ['tools', { tools: [{ type: 'function' }] }],
    ['another system prompt', { messages: [turn('be verbose', 'system'), ...CHAT.slice(1)] }],
  ])('with %s has no mark in common', (_, changes) => {
    const plain = hashes({ model: 'm', messages: CHAT });
    expect(hashes({ model: 'm', messages: CHAT, ...changes }).filter((hash) => plain.includes(hash))).toEqual([]);
  });

  test('with another message has the marks before it', () => {
    const plain = hashes({ messages: CHAT });
    const edited = hashes({ messages: CHAT.with(2, turn('hm', 'assistant')) });
    expect(edited.map((hash, i) => hash === plain[i])).toEqual([true, true, false, false]);
  });
});

test('a long text is marked within, so that another end still shares its beginning', () => {
  const document = 'a fact. '.repeat(1000);
  const [one, two] = [hashes({ messages: [turn(`${document}one?`)] }), hashes({ messages: [turn(`${document}two?`)] })];
  expect(one.length).toBe(4);
  expect(one.map((hash, i) => hash === two[i])).toEqual([true, true, true, false]);
  const prompts = [hashes({ prompt: `${document}one?` }, 'completions'), hashes({ prompt: document }, 'completions')];
  expect(prompts[0]?.slice(0, 3)).toEqual(prompts[1]?.slice(0, 3));
});

test('of very many messages the first and the last are marked, and the next turn still has one in common', () => {
  const long = Array.from({ length: 300 }, (_, i) => turn(`message ${i}`, i % 2 === 0 ? 'user' : 'assistant'));
  const before = hashes({ messages: long.slice(0, 298) });
  const now = hashes({ messages: long });
  expect([before.length, now.length]).toEqual([64, 64]);
  expect(now.slice(0, 16)).toEqual(before.slice(0, 16));
  expect(now).toContain(before.at(-1));
});

test('a body without messages or prompt has none', () => {
  expect([marksOf({}), marksOf({ messages: null }), marksOf({ messages: 'x' }), marksOf({}, 'completions')]).toEqual([
    [],
    [],
    [],
    [],
  ]);
});
