import { createHash } from 'node:crypto';
import { describe, expect, test } from 'vitest';
import type { Api } from '../../src/core/facts.ts';
import { scanObject } from '../../src/core/json-scan.ts';
import { LinkedRequest, type LinkRules, linkMedia, linkRequest, linkTurn } from '../../src/core/link.ts';
import { mediaOfMessages } from '../../src/core/media.ts';

const DATA = 'data:image/png;base64,AAAA';
const image = (url: string, more: object = {}) => ({ type: 'image_url', image_url: { url, ...more } });
const user = (...content: unknown[]) => ({ role: 'user', content });
const assistant = (content: string) => ({ role: 'assistant', content });

function scan(value: unknown) {
  const body = new TextEncoder().encode(typeof value === 'string' ? value : JSON.stringify(value));
  const found = scanObject(body);
  if (found.kind !== 'object') throw new Error('no object');
  return { body, scan: found };
}

function kinds(messages: unknown) {
  const { body, scan: found } = scan({ messages });
  return mediaOfMessages(body, found);
}

describe('what a message has beside text', () => {
  test.each([
    ['a picture whose bytes are in it', [image(DATA)], 'inline'],
    ['with words', [{ type: 'text', text: 'look' }, image(DATA), 'here'], 'inline'],
    ['in a given detail', [image(DATA, { detail: 'low' })], 'inline'],
    [
      'sound and video',
      [
        { type: 'audio_url', audio_url: { url: 'data:,a' } },
        { type: 'video_url', video_url: { url: 'data:,b' } },
      ],
      'inline',
    ],
    ['text alone', [{ type: 'text', text: DATA }], 'none'],
    ['a linked picture', [image('https://example/a.png')], 'other'],
    ['a file of the engine', [image('file:///a.png')], 'other'],
    ['one of each', [image(DATA), image('http://example/a.png')], 'other'],
    ['in capitals', [image('DATA:image/png;base64,AAAA')], 'other'],
    ['a picture that engines may know by another name', [{ ...image(DATA), uuid: 'cat' }], 'other'],
    ['more than is known', [image(DATA, { width: 3 })], 'other'],
    ['a URL that is no text', [image(5 as never)], 'other'],
    ['a URL without its object', [{ type: 'image_url', image_url: DATA }], 'other'],
    ['no URL', [{ type: 'image_url', image_url: {} }], 'other'],
    ['nothing under its type', [{ type: 'image_url' }], 'other'],
    ['another type than its member', [{ type: 'image_url', video_url: { url: DATA } }], 'other'],
    ['a part without a type', [{ image_url: { url: DATA } }], 'other'],
    ['sound that has no URL', [{ type: 'input_audio', input_audio: { data: 'AAAA', format: 'wav' } }], 'other'],
    ['embeddings', [{ type: 'image_embeds', image_embeds: 'AAAA' }], 'other'],
    ['a number', [5], 'other'],
  ] as const)('%s', (_, content, kind) => {
    expect(kinds([user(...content)])).toEqual([kind]);
  });

  test('each message for itself', () => {
    expect(kinds([{ role: 'system', content: 'x' }, user(image(DATA)), assistant('y'), 'z'])).toEqual([
      'none',
      'inline',
      'none',
      'other',
    ]);
    expect(kinds('x')).toBeUndefined();
  });

  test('a URL with escapes is not taken for one that is known', () => {
    const { body, scan: found } = scan(
      '{"messages":[{"content":[{"type":"image_url","image_url":{"url":"d\\u0061ta:,x"}}]}]}',
    );
    expect(mediaOfMessages(body, found)).toEqual(['other']);
  });
});

const EXACT: LinkRules = { guard: 'exact', autolink: true };
const newHash = () => createHash('sha256');

function link(messages: unknown, named = '', rules = EXACT, api: Api = 'chat.completions') {
  return linkMedia(rules, named, linked(messages, api));
}

function linked(messages: unknown, api: Api = 'chat.completions') {
  const { body, scan: found } = scan({ messages });
  return new LinkedRequest(api, body, found, newHash);
}

test('a history is hashed once, however many links are made of it', () => {
  let hashes = 0;
  const { body, scan: found } = scan({ messages: [user(image(DATA))] });
  const request = new LinkedRequest('chat.completions', body, found, () => {
    hashes += 1;
    return newHash();
  });
  const both = linkRequest(EXACT, '', request, ['messages']);
  expect(both.media?.conversationId).toBe(both.link.conversationId);
  expect(hashes).toBe(1);
});

describe('where the handle of a prompt with pictures is', () => {
  const first = [user({ type: 'text', text: 'look' }, image(DATA))];
  const second = [...first, assistant('a cat'), user('sure?')];

  test.each(['', 'mine'])('under all its messages, and a next turn looks there, name %j', (named) => {
    const own = link(first, named);
    const next = link(second, named);
    expect(own?.lookups).toEqual([{ conversationId: own?.conversationId, moreMedia: false }]);
    expect(next?.lookups).toEqual([
      { conversationId: next?.conversationId, moreMedia: false },
      { conversationId: own?.conversationId, moreMedia: false },
    ]);
  });

  test('pictures behind those messages are told of', () => {
    const more = [...first, assistant('a cat'), user({ type: 'text', text: 'and' }, image(DATA)), assistant('b')];
    const next = link([...more, user('sure?')]);
    expect(next?.lookups.map(({ moreMedia }) => moreMedia)).toEqual([false, false]);
    // All of them; without the reply at the end; before the first reply, behind which there is a second picture.
    expect(link(more)?.lookups.map(({ moreMedia }) => moreMedia)).toEqual([false, false, true]);
    expect(link(more)?.lookups.at(-1)?.conversationId).toBe(link(first)?.conversationId);
  });

  test.each([
    ['another picture', [user({ type: 'text', text: 'look' }, image('data:image/png;base64,BBBB'))]],
    ['other words', [user({ type: 'text', text: 'see' }, image(DATA))]],
    ['the other order', [user(image(DATA), { type: 'text', text: 'look' })]],
    ['one more', [user({ type: 'text', text: 'look' }, image(DATA), image(DATA))]],
    ['another detail', [user({ type: 'text', text: 'look' }, image(DATA, { detail: 'low' }))]],
  ])('%s: elsewhere', (_, messages) => {
    const own = link(first)?.conversationId;
    const ids = link([...messages, ...second.slice(1)])?.lookups.map(({ conversationId }) => conversationId);
    expect(ids).toHaveLength(2);
    expect(ids).not.toContain(own);
  });

  test('names keep it apart; without one it is where text alone would be', () => {
    const ids = ['', 'mine', 'yours'].map((named) => link(first, named)?.conversationId);
    expect(new Set(ids).size).toBe(3);
    const text = linkTurn(EXACT, '', linked(first));
    expect(ids[0]).toBe(text.conversationId);
  });

  test('nowhere with a link among them, without the guard, or where nothing is to be found by history', () => {
    expect(link([...second, user(image('https://example/a.png'))])).toBeUndefined();
    expect(link([user({ type: 'text', text: 'look' })])).toBeUndefined();
    expect(link(first, 'mine', { guard: 'history', autolink: true })).toBeUndefined();
    expect(link(first, 'mine', { guard: 'off', autolink: true })).toBeUndefined();
    expect(link(first, '', { guard: 'exact', autolink: false })).toBeUndefined();
    expect(link(first, 'mine', { guard: 'exact', autolink: false })).toBeDefined();
    expect(link(first, 'mine', EXACT, 'completions')).toBeUndefined();
    expect(link('x')).toBeUndefined();
  });
});
