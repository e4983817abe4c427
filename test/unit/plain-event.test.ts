import fc from 'fast-check';
import { describe, expect, test } from 'vitest';
import { isPlainEvent } from '../../src/core/plain-event.ts';
import { muteEvent, readEvent } from '../../src/core/reply.ts';

const encoder = new TextEncoder();
const sent = (text: string) => encoder.encode(`data: ${text}\n\n`);
const chunk = (delta: object, rest: object = {}, top: object = {}) =>
  JSON.stringify({
    id: 'chatcmpl-1',
    object: 'chat.completion.chunk',
    created: 1,
    model: 'm',
    choices: [{ index: 0, delta, logprobs: null, finish_reason: null, token_ids: null, ...rest }],
    usage: null,
    ...top,
  });

const SPEC = {
  top: ['kv_transfer_params', 'ec_transfer_params', 'prompt_token_ids'],
  choice: ['prompt_token_ids', 'token_ids'],
};

function choicesOf(event: Uint8Array): number {
  const text = new TextDecoder().decode(event).slice('data: '.length);
  try {
    const { choices } = JSON.parse(text) as { readonly choices?: unknown };
    return Array.isArray(choices) ? choices.length : 0;
  } catch {
    return 0;
  }
}

/** What must hold of an event that is taken for plain: whoever reads it finds nothing, and changes nothing. */
function expectNothingIn(event: Uint8Array): void {
  const { done, error, usage, kvTransferParams, promptTokenIds, tokenIds, seen, finished } = readEvent(event);
  const nothing = { done, error, usage, kvTransferParams, promptTokenIds, tokenIds, finished };
  const none = { error: undefined, usage: undefined, kvTransferParams: undefined };
  expect(nothing).toEqual({ ...none, done: false, promptTokenIds: undefined, tokenIds: undefined, finished: [] });
  // A reply with one choice has one at most here, too.
  if (choicesOf(event) <= 1) expect(seen.filter((index) => index !== 0)).toEqual([]);
  expect(muteEvent(event, SPEC)).toBe(event);
}

test.each([
  ['a piece of text', chunk({ content: 'Hello' })],
  ['with spaces, as Python writes it', chunk({ content: 'a' }).replaceAll('":', '": ').replaceAll(',"', ', "')],
  ['a text that begins with a colon', chunk({ content: ': usage: finish_reason:' })],
  ['a text with the names of members', chunk({ content: '"usage", "finish_reason" and "error"' })],
  ['log probabilities', chunk({ content: 'a' }, { logprobs: { content: [{ token: 'a', logprob: -0.1 }] } })],
  ['a completion', '{"object":"text_completion","choices":[{"index":0,"text":"x","finish_reason":null}]}'],
])('%s is plain', (_, text) => {
  expect(isPlainEvent(sent(text))).toBe(true);
  expectNothingIn(sent(text));
});

test.each([
  ['an end', chunk({ content: '' }, { finish_reason: 'stop' })],
  ['another choice', chunk({ content: 'a' }, { index: 1 })],
  ['a tenth choice', chunk({ content: 'a' }, { index: 10 })],
  ['token ids', chunk({ content: 'a' }, { token_ids: [1] })],
  ['usage', chunk({ content: 'a' }, {}, { usage: { prompt_tokens: 1 } })],
  ['a handle', chunk({ content: 'a' }, {}, { kv_transfer_params: {} })],
  ['an error', '{"error":{"message":"m"}}'],
  ['an error with a space before its colon', '{"error" :{"message":"m"}}'],
  ['an error in escapes', '{"\\u0065rror":{"message":"m"}}'],
  ['an object that is an error', '{"object":"error","message":"m"}'],
  ['an object that is an error in escapes', '{"object":"\\u0065rror","message":"m"}'],
  ['a text that could be members', chunk({ content: '"usage":{"prompt_tokens":1}' })],
  ['the end marker', '[DONE]'],
  ['no object', '"text"'],
])('%s is not plain', (_, text) => {
  expect(isPlainEvent(sent(text))).toBe(false);
});

test.each([
  ['a comment before it', `: ping\ndata: ${chunk({ content: 'a' })}\n\n`],
  ['several lines of data', 'data: {"choices":\ndata: []}\n\n'],
  ['other line ends', `data: ${chunk({ content: 'a' })}\r\n\r\n`],
  ['no blank line', `data: ${chunk({ content: 'a' })}\n`],
  ['the name of an event', `event: error\ndata: ${chunk({ content: 'a' })}\n\n`],
])('%s is not plain', (_, text) => {
  expect(isPlainEvent(encoder.encode(text))).toBe(false);
});

describe('whatever is taken for plain', () => {
  const name = fc.constantFrom(
    ...['error', 'usage', 'finish_reason', 'kv_transfer_params', 'ec_transfer_params', 'prompt_token_ids'],
    ...['token_ids', 'index', 'object', 'choices', 'delta', 'content', 'x', '"', '\\', 'a"b', ':', 'ü', ''],
  );
  const value = fc.oneof(
    fc.constantFrom(
      null,
      0,
      1,
      10,
      -0.5,
      1e21,
      true,
      false,
      '',
      'stop',
      'error',
      ':',
      '":',
      '\\":',
      '\n',
      '{"error":1}',
    ),
    fc.array(fc.nat(9), { maxLength: 2 }),
    fc.string({ maxLength: 6 }),
  );
  const { tree } = fc.letrec<{ tree: unknown }>((tie) => ({
    tree: fc.oneof(
      { maxDepth: 4 },
      value,
      fc.array(tie('tree'), { maxLength: 3 }),
      fc.uniqueArray(fc.tuple(name, tie('tree')), { maxLength: 5, selector: ([key]) => key }).map(Object.fromEntries),
    ),
  }));
  const object = fc
    .uniqueArray(fc.tuple(name, tree), { maxLength: 6, selector: ([key]) => key })
    .map((members) => Object.fromEntries(members) as object);
  // As Python and others write it, and with a letter of any text in escapes.
  const written = fc
    .tuple(object, fc.constantFrom('', ' ', '\t'), fc.constantFrom('', ' '), fc.nat(3))
    .map(([value, before, behind, escaped]) => {
      const text = JSON.stringify(value).replaceAll('":', `"${before}:${behind}`);
      return escaped === 0 ? text.replace(/e(?=[a-z_]*"[ \t]*:)/, '\\u0065') : text;
    });

  test('tells nothing and has nothing to be shown as null', () => {
    let plain = 0;
    fc.assert(
      fc.property(written, (text) => {
        const event = sent(text);
        if (!isPlainEvent(event)) return;
        plain++;
        expectNothingIn(event);
      }),
      { numRuns: 5000 },
    );
    expect(plain).toBeGreaterThan(500);
  });

  test('also of bytes that are no JSON', () => {
    const piece = fc.oneof(name, fc.constantFrom('"', ':', '{', '}', '[', ']', ',', 'null', '\\', ' ', '0'));
    fc.assert(
      fc.property(fc.array(piece, { maxLength: 12 }), (pieces) => {
        const event = sent(`{${pieces.join('')}}`);
        if (isPlainEvent(event)) expectNothingIn(event);
      }),
      { numRuns: 5000 },
    );
  });
});
