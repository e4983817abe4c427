import { createHash } from 'node:crypto';
import { describe, expect, test } from 'vitest';
import type { Api } from '../../src/core/facts.ts';
import { scanObject } from '../../src/core/json-scan.ts';
import { LinkedRequest, type LinkRules, linkTurn } from '../../src/core/link.ts';

const EXACT: LinkRules = { guard: 'exact', autolink: true };
const user = (content: string) => ({ role: 'user', content });
const assistant = (content: string) => ({ role: 'assistant', content });

function link(value: unknown, rules = EXACT, named = '', api: Api = 'chat.completions') {
  const body = new TextEncoder().encode(JSON.stringify(value));
  const scan = scanObject(body);
  if (scan.kind !== 'object') throw new Error('not an object');
  return linkTurn(rules, named, new LinkedRequest(api, body, scan, () => createHash('sha256')));
}

describe('chat', () => {
  const first = [user('one')];
  const second = [...first, assistant('two'), user('three')];

  test('a turn is looked for under all its messages, and under those before the last reply', () => {
    const own = link({ messages: first });
    expect(own).toMatchObject({ derived: true, lookups: [own.conversationId] });
    const next = link({ messages: second });
    expect(next.lookups).toEqual([next.conversationId, own.conversationId]);
  });

  test('a last message of the assistant is looked at without it too', () => {
    const own = link({ messages: second });
    const next = link({ messages: [...second, assistant('fo')] });
    expect(next.lookups).toEqual([next.conversationId, own.conversationId, link({ messages: first }).conversationId]);
  });

  test('another history is another conversation, another model the same: the store keeps those apart', () => {
    expect(link({ messages: [user('ones')] }).conversationId).not.toBe(link({ messages: first }).conversationId);
    expect(link({ messages: first, model: 'm' })).toEqual(link({ messages: first }));
  });

  test('named, switched off or unproven, nothing is derived', () => {
    expect(link({ messages: first }, EXACT, 'mine')).toEqual({ conversationId: 'mine', lookups: [], derived: false });
    const none = { conversationId: '', lookups: [], derived: false };
    expect(link({ messages: first }, { guard: 'exact', autolink: false })).toEqual(none);
    expect(link({ messages: first }, { guard: 'off', autolink: true })).toEqual(none);
    expect(link({ messages: first }, { guard: 'history', autolink: true })).toEqual(none);
    expect(link({ messages: 'one' })).toEqual(none);
    expect(link({})).toEqual(none);
  });
});

describe('completions', () => {
  const of = (prompt: unknown) => link({ prompt }, EXACT, '', 'completions');
  const text = Array.from({ length: 3000 }, (_, i) => `word${i} `).join('');

  test.each([
    ['text', (length: number) => text.slice(0, length)],
    ['token ids', (length: number) => Array.from({ length: Math.floor(length / 4) }, (_, i) => (i * 7919) % 100_000)],
  ])('a longer prompt finds what a shorter one with the same beginning left: %s', (_, prompt) => {
    for (const [short, long] of [
      [300, 301],
      [300, 9000],
      [1023, 1025],
      [4096, 20_000],
    ] as const) {
      expect(of(prompt(long)).lookups, `${short}, ${long}`).toContain(of(prompt(short)).conversationId);
    }
  });

  test('the longest beginning is looked for first, and a turn is kept under its own longest', () => {
    const { conversationId, lookups } = of(text.slice(0, 5000));
    expect(lookups).toHaveLength(5);
    expect(lookups[0]).toBe(conversationId);
    expect(lookups.at(-1)).toBe(of(text.slice(0, 300)).conversationId);
  });

  test('another beginning is not found', () => {
    expect(of(text.slice(0, 9000)).lookups).not.toContain(of(text.slice(1, 600)).conversationId);
  });

  test('a prompt of fewer bytes than are worth a transfer is not linked', () => {
    expect(of('short')).toEqual({ conversationId: '', lookups: [], derived: false });
  });
});

test('the history guard finds a named turn by its history alone', () => {
  const rules: LinkRules = { guard: 'history', autolink: true };
  const own = link({ messages: [user('one')] }, rules, 'mine');
  expect(own.derived).toBe(false);
  expect(own.lookups).toEqual([`${own.conversationId}-first`]);
  expect(link({ messages: [user('one'), assistant('two'), user('three')] }, rules, 'mine').lookups).toEqual([
    own.conversationId,
  ]);
  expect(link({ messages: [user('one')] }, rules, 'other').conversationId).not.toBe(own.conversationId);
});
