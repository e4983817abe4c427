import { readdirSync, readFileSync } from 'node:fs';
import fc from 'fast-check';
import { describe, expect, test } from 'vitest';
import { type EventFacts, type MuteSpec, muteEvent, muteReply, readEvent, readReply } from '../../src/core/reply.ts';
import { eventData, SseSplitter } from '../../src/core/sse.ts';
import { textOf, utf8 } from './json-text.ts';

const SAMPLES = new URL('../fixtures/engine-samples/', import.meta.url);
const SPEC: MuteSpec = {
  top: ['kv_transfer_params', 'prompt_token_ids', 'prompt_text'],
  choice: ['token_ids', 'prompt_token_ids'],
};

function event(payload: unknown): Uint8Array {
  return utf8(`data: ${typeof payload === 'string' ? payload : JSON.stringify(payload)}\n\n`);
}

function chunk(choice: Record<string, unknown>, top: Record<string, unknown> = {}): Uint8Array {
  return event({ id: 'chatcmpl-1', object: 'chat.completion.chunk', choices: [{ index: 0, ...choice }], ...top });
}

function readAll(bytes: Uint8Array): readonly EventFacts[] {
  return new SseSplitter().push(bytes).map(readEvent);
}

/** The muted value by way of JavaScript objects: another road to the same bytes for compact and pretty-printed JSON. */
function slowMute(value: unknown): unknown {
  const mute = (object: unknown, names: readonly string[]): unknown =>
    typeof object !== 'object' || object === null || Array.isArray(object)
      ? object
      : Object.fromEntries(Object.entries(object).map(([k, v]) => [k, names.includes(k) ? null : v]));
  const top = mute(value, SPEC.top);
  if (typeof top !== 'object' || top === null || !('choices' in top) || !Array.isArray(top.choices)) return top;
  return { ...top, choices: top.choices.map((choice: unknown) => mute(choice, SPEC.choice)) };
}

describe('readEvent', () => {
  test.each<[string, Uint8Array, boolean]>([
    ['role only', chunk({ delta: { role: 'assistant', content: '' }, logprobs: null, finish_reason: null }), false],
    ['role with null content', chunk({ delta: { role: 'assistant', content: null, tool_calls: [] } }), false],
    ['empty delta', chunk({ delta: {}, finish_reason: null }), false],
    ['content', chunk({ delta: { content: ' ' } }), true],
    ['content beside the role', chunk({ delta: { role: 'assistant', content: 'a' } }), true],
    ['reasoning', chunk({ delta: { reasoning: 'a' } }), true],
    ['reasoning of older engines', chunk({ delta: { reasoning_content: 'a', content: null } }), true],
    ['refusal', chunk({ delta: { refusal: 'no' } }), true],
    ['tool call', chunk({ delta: { tool_calls: [{ index: 0, function: { arguments: '' } }] } }), true],
    ['function call', chunk({ delta: { function_call: { name: 'f' } } }), true],
    ['audio', chunk({ delta: { audio: { data: '' } } }), true],
    ['a member of a later engine', chunk({ delta: { role: 'assistant', images: [1] } }), true],
    ['finish reason', chunk({ delta: {}, finish_reason: 'stop' }), true],
    [
      'second choice',
      event({
        choices: [
          { index: 0, delta: {} },
          { index: 1, delta: { content: 'x' } },
        ],
      }),
      true,
    ],
    ['text', chunk({ text: 'a', finish_reason: null }), true],
    ['empty text', chunk({ text: '', logprobs: null, finish_reason: null, token_ids: null }), false],
    ['empty text with token ids', chunk({ text: '', token_ids: [7] }), true],
    ['chat logprobs', chunk({ delta: {}, logprobs: { content: [{ token: '' }] } }), true],
    ['completion logprobs', chunk({ text: '', logprobs: { tokens: ['a'] } }), true],
    ['logprobs without tokens', chunk({ delta: {}, logprobs: { content: [], refusal: null } }), false],
    ['usage only', event({ choices: [], usage: { prompt_tokens: 1 } }), false],
    ['usage without choices', event({ usage: { prompt_tokens: 1 } }), false],
    ['comment', utf8(': keep-alive\n\n'), false],
    ['blank line', utf8('\n'), false],
    ['other fields', utf8('event: ping\nid: 4\n\n'), false],
    ['error', event({ error: { message: 'x' } }), false],
    ['no JSON', event('{"choices":['), true],
    ['NaN', event('{"choices":[],"x":NaN}'), true],
    ['text payload', event('hello'), true],
    ['empty payload', event(''), true],
    ['other JSON', event('[1]'), true],
    ['unknown object', event({ type: 'response.created' }), true],
    ['choices of another kind', event({ choices: { a: 1 } }), true],
    ['a choice of another kind', event({ choices: ['x'] }), true],
    ['a delta of another kind', event({ choices: [{ delta: 'x' }] }), true],
    ['invalid UTF-8', new Uint8Array([...utf8('data: "'), 0xff, ...utf8('\n\n')]), true],
  ])('content: %s', (_name, bytes, expected) => {
    const facts = readEvent(bytes);
    expect(facts.hasContent).toBe(expected);
    expect(facts.done).toBe(false);
  });

  test('the end marker', () => {
    for (const text of ['data: [DONE]\n\n', 'data:[DONE]\r\n\r\n', 'data: [DONE] \n\n', '\ndata: [DONE]\n\n']) {
      expect(readEvent(utf8(text))).toEqual({ done: true, hasContent: false, seen: [], finished: [] });
    }
    expect(readEvent(utf8('data: "[DONE]"\n\n')).done).toBe(false);
  });

  test.each<[unknown, EventFacts['error']]>([
    [
      { error: { message: 'Internal "x"', type: 'InternalServerError', param: null, code: 500 } },
      { message: 'Internal "x"', type: 'InternalServerError', param: null, code: 500 },
    ],
    [{ error: 'Unauthorized' }, { message: 'Unauthorized', type: null, param: null, code: null }],
    [
      { object: 'error', message: 'old', type: 'BadRequestError', param: 'n', code: 400 },
      { message: 'old', type: 'BadRequestError', param: 'n', code: 400 },
    ],
    [{ error: { code: 'rate_limited' } }, { message: '', type: null, param: null, code: 'rate_limited' }],
    [{ error: { message: null, type: 3 } }, { message: '', type: null, param: null, code: null }],
    [{ error: { message: { a: 1 } } }, { message: '{"a":1}', type: null, param: null, code: null }],
    [{ error: true }, { message: 'true', type: null, param: null, code: null }],
    [{ error: null, choices: [] }, undefined],
    [{ object: 'chat.completion.chunk', message: 'x', choices: [] }, undefined],
  ])('error: %j', (payload, expected) => {
    expect(readEvent(event(payload)).error).toEqual(expected);
    const reply = readReply(utf8(JSON.stringify(payload)));
    expect(reply.kind === 'ok' ? reply.error : 'invalid').toEqual(expected);
  });

  test('choices seen and finished, token ids of choice 0 alone', () => {
    const facts = readEvent(
      event({
        choices: [
          { index: 2, delta: {}, finish_reason: 'length', token_ids: [9] },
          { index: 0, delta: { content: 'x' }, finish_reason: null, token_ids: [1, 2] },
          { delta: {}, finish_reason: 'stop', token_ids: [8], prompt_token_ids: [8] },
        ],
        prompt_token_ids: [5, 6],
      }),
    );
    expect(facts).toMatchObject({ seen: [2, 0, 2], finished: [2, 2], tokenIds: [1, 2], promptTokenIds: [5, 6] });
  });

  test('prompt token ids of a completion stand in the choice', () => {
    expect(readEvent(chunk({ text: 'a', prompt_token_ids: [1, 2, 3], token_ids: [4] }))).toMatchObject({
      promptTokenIds: [1, 2, 3],
      tokenIds: [4],
    });
  });

  test.each(['[1,-2]', '[1.0]', '[1e3]', '["1"]', '[9007199254740993]', '[[1]]', '{}', 'null', '7'])(
    'token ids %s are none',
    (ids) => {
      expect(readEvent(event(`{"choices":[{"index":0,"token_ids":${ids}}]}`)).tokenIds).toBeUndefined();
    },
  );

  test('usage', () => {
    const usage = {
      prompt_tokens: 3,
      total_tokens: 5,
      completion_tokens: 2,
      prompt_tokens_details: { cached_tokens: 1 },
    };
    expect(readEvent(event({ choices: [], usage })).usage).toEqual({
      promptTokens: 3,
      completionTokens: 2,
      cachedTokens: 1,
    });
    expect(readEvent(event({ choices: [], usage: { ...usage, prompt_tokens_details: null } })).usage).toMatchObject({
      cachedTokens: 0,
    });
    expect(readEvent(event({ choices: [], usage: null })).usage).toBeUndefined();
    expect(readEvent(event({ choices: [], usage: { prompt_tokens: '3' } })).usage).toBeUndefined();
  });

  test('a handle comes as its raw bytes, only from the top level and only if it is not null', () => {
    const raw = '{ "remote_port": 56e2,"x":9007199254740993 }';
    const facts = readEvent(event(`{"choices":[{"index":0,"finish_reason":"stop"}],"kv_transfer_params":${raw}}`));
    expect(facts.kvTransferParams && textOf(facts.kvTransferParams)).toBe(raw);
    expect(readEvent(chunk({ delta: {} }, { kv_transfer_params: null })).kvTransferParams).toBeUndefined();
    expect(readEvent(chunk({ kv_transfer_params: { a: 1 } })).kvTransferParams).toBeUndefined();
    expect(readEvent(utf8('data: {"choices":[],\ndata: "kv_transfer_params":{"a":\ndata: 1}}\n\n'))).toMatchObject({
      kvTransferParams: utf8('{"a":\n1}'),
    });
  });

  test('never throws', () => {
    fc.assert(
      fc.property(fc.uint8Array({ maxLength: 60 }), fc.json(), fc.nat(), (bytes, json, at) => {
        readEvent(bytes);
        readReply(bytes);
        muteReply(bytes, SPEC);
        const text = `data: {"choices":${json},"error":${json},"usage":${json}}`;
        expect(readEvent(utf8(text)).done).toBe(false);
        readEvent(utf8(text.slice(0, at % text.length)));
      }),
      { numRuns: 500 },
    );
  });
});

describe('muteEvent and muteReply', () => {
  const mute = (text: string): string => textOf(muteEvent(utf8(text), SPEC));

  test.each([
    chunk({ delta: { content: 'a' }, token_ids: null }, { kv_transfer_params: null }),
    chunk({ delta: { content: '{"kv_transfer_params":1,"token_ids":[2]}' } }),
    chunk({ delta: { kv_transfer_params: { a: 1 }, token_ids: [1] } }),
    chunk({ logprobs: { content: [{ token_ids: [1], kv_transfer_params: 2 }] } }),
    chunk({ kv_transfer_params: { a: 1 } }),
    event({ token_ids: [1], choices: [] }),
    event('{"kv_transfer_params": {"a":1}'),
    event('[{"kv_transfer_params":1}]'),
    utf8(': "kv_transfer_params":1\n\n'),
    utf8('data: [DONE]\n\n'),
    utf8('\n'),
  ])('leaves alone, as the same reference: event %#', (bytes) => {
    expect(muteEvent(bytes, SPEC)).toBe(bytes);
    expect(muteEvent(bytes, { top: [], choice: [] })).toBe(bytes);
  });

  test.each([
    ['data: {"kv_transfer_params":{"a":[1,"}"]},"x":1}\r\n\r\n', 'data: {"kv_transfer_params":null,"x":1}\r\n\r\n'],
    ['data:{ "kv_transfer_params" : 5 }\n\n', 'data:{ "kv_transfer_params" : null }\n\n'],
    [
      'data: {"kv_transfer_params":1,"kv_transfer_params":null}\n\n',
      'data: {"kv_transfer_params":null,"kv_transfer_params":null}\n\n',
    ],
    ['data: {"kv\\u005ftransfer_params":1}\n\n', 'data: {"kv\\u005ftransfer_params":null}\n\n'],
    [
      'id: 1\ndata: {"choices":[{"token_ids":[1,2]},3,{"token_ids":[]}]}\n: c\n\n',
      'id: 1\ndata: {"choices":[{"token_ids":null},3,{"token_ids":null}]}\n: c\n\n',
    ],
    [
      'data: {"choices":[{"token_ids":[1]}],"choices":[{"token_ids":[2]}]}\n\n',
      'data: {"choices":[{"token_ids":null}],"choices":[{"token_ids":null}]}\n\n',
    ],
    ['\ufeffdata: {"prompt_text":"a"}\n\n', '\ufeffdata: {"prompt_text":null}\n\n'],
    ['data: {"prompt_text":false,"n":1e400,"m":1519.0}\n\n', 'data: {"prompt_text":null,"n":1e400,"m":1519.0}\n\n'],
    // One value inside a line of several, one over three lines.
    ['data: {"kv_transfer_params":{"a":1},\ndata: "x":2}\n\n', 'data: {"kv_transfer_params":null,\ndata: "x":2}\n\n'],
    [
      'data: {"kv_transfer_params":{\rid: 9\rdata: "a":1\rdata:},"x":2}\r\r',
      'data: {"kv_transfer_params":null\rid: 9\rdata: \rdata:,"x":2}\r\r',
    ],
    [
      'data: {"kv_transfer_params":\ndata: {"a":1},"prompt_text":"b"}\n\n',
      'data: {"kv_transfer_params":\ndata: null,"prompt_text":null}\n\n',
    ],
  ])('%j', (text, expected) => {
    expect(mute(text)).toBe(expected);
    expect(mute(expected)).toBe(expected);
  });

  const names = [
    'kv_transfer_params',
    'token_ids',
    'prompt_token_ids',
    'prompt_text',
    'choices',
    'content',
    'a"b',
    'é',
  ];
  const nested = fc.letrec<{ node: unknown }>((tie) => ({
    node: fc.oneof(
      { depthSize: 'small', maxDepth: 4 },
      fc.oneof(fc.constant(null), fc.nat(), fc.string({ unit: 'grapheme' }), fc.constantFrom(...names), fc.boolean()),
      fc.array(tie('node'), { maxLength: 4 }),
      fc.dictionary(fc.constantFrom(...names), tie('node'), { noNullPrototype: true }),
    ),
  })).node;
  const reply = fc
    .tuple(
      fc.dictionary(fc.constantFrom(...names), nested, { noNullPrototype: true }),
      fc.option(
        fc.array(fc.dictionary(fc.constantFrom(...names), nested, { noNullPrototype: true }), { maxLength: 3 }),
      ),
    )
    .map(([top, choices]) => (choices === null ? top : { ...top, choices }));

  test('mutes what a rebuild of the object mutes, and not a byte more', () => {
    fc.assert(
      fc.property(reply, fc.constantFrom(0, 1), (value, indent) => {
        const body = utf8(JSON.stringify(value, null, indent));
        const expected = JSON.stringify(slowMute(value), null, indent);
        const muted = muteReply(body, SPEC);
        expect(textOf(muted)).toBe(expected);
        if (textOf(body) === expected) expect(muted).toBe(body);
        if (indent === 0) expect(textOf(muteEvent(event(value), SPEC))).toBe(`data: ${expected}\n\n`);
      }),
      { numRuns: 150 },
    );
  });

  test('an event of many lines keeps its lines and stays the same JSON', () => {
    fc.assert(
      fc.property(reply, fc.constantFrom('\n', '\r\n', '\r'), (value, end) => {
        const lines = JSON.stringify(value, null, 1).split('\n');
        const text = `event: m${end}${lines.map((l, i) => `data: ${l}${end}${i % 3 === 1 ? `: c${end}` : ''}`).join('')}${end}`;
        const muted = muteEvent(utf8(text), SPEC);
        const data = eventData(muted);
        expect(data?.lines).toBe(lines.length);
        expect(JSON.parse(textOf(data?.text ?? utf8('')))).toEqual(slowMute(value));
        const others = (event: string): readonly string[] => event.split(end).filter((l) => !l.startsWith('data:'));
        expect(others(textOf(muted))).toEqual(others(text));
      }),
      { numRuns: 60 },
    );
  });
});

describe('recorded replies', () => {
  const names = readdirSync(SAMPLES);

  test.each(names.filter((name) => name.endsWith('.sse')))('%s', (name) => {
    const bytes = new Uint8Array(readFileSync(new URL(name, SAMPLES)));
    const splitter = new SseSplitter();
    const events = splitter.push(bytes);
    expect(splitter.pendingBytes).toBe(0);
    const facts = events.map(readEvent);
    expect(facts.filter((f) => f.done).length).toBe(1);
    expect(facts.at(-1)?.done).toBe(true);
    const first = facts.findIndex((f) => f.hasContent);
    const failed = facts.find((f) => f.error !== undefined);
    if (failed === undefined) {
      expect(facts.flatMap((f) => f.finished)).toEqual([0]);
      expect(first).toBeLessThanOrEqual(1);
    } else {
      expect(failed.error).toMatchObject({ message: 'Internal server error', code: 500 });
      expect(first).toBe(-1);
    }
    for (const [i, bytesOfEvent] of events.entries()) {
      const text = textOf(bytesOfEvent);
      const muted = muteEvent(bytesOfEvent, SPEC);
      if (facts[i]?.done || !text.startsWith('data: ')) {
        expect(muted).toBe(bytesOfEvent);
        continue;
      }
      const again = readEvent(muted);
      expect(again.kvTransferParams).toBeUndefined();
      expect(again.hasContent).toBe(facts[i]?.hasContent);
      const value: unknown = JSON.parse(text.slice(6));
      // Errors are written by another serializer, with blanks; they hold nothing to mute.
      expect(textOf(muted)).toBe(again.error ? text : `data: ${JSON.stringify(slowMute(value))}\n\n`);
    }
  });

  test.each(names.filter((name) => name.endsWith('.json') && !name.endsWith('.request.json')))('%s', (name) => {
    const sample: unknown = JSON.parse(readFileSync(new URL(name, SAMPLES), 'utf8'));
    const body = (sample as { body: unknown }).body;
    if (typeof body !== 'object' || body === null) return;
    const bytes = utf8(JSON.stringify(body));
    const reply = readReply(bytes);
    if (reply.kind !== 'ok') throw new Error('not read');
    const params = 'kv_transfer_params' in body ? body.kv_transfer_params : null;
    expect(reply.kvTransferParams === undefined ? null : JSON.parse(textOf(reply.kvTransferParams))).toEqual(params);
    expect(reply.error !== undefined).toBe('error' in body);
    if ('choices' in body)
      expect(reply).toMatchObject({ hasContent: true, usage: { promptTokens: expect.any(Number) } });
    expect(textOf(muteReply(bytes, SPEC))).toBe(JSON.stringify(slowMute(body)));
  });

  test('the handle, the token counts and the finish of a 0.33 stream', () => {
    const facts = readAll(new Uint8Array(readFileSync(new URL('v033-D-chat-stream-usage.sse', SAMPLES))));
    const withHandle = facts.filter((f) => f.kvTransferParams !== undefined);
    expect(withHandle.length).toBe(1);
    expect(withHandle[0]?.finished).toEqual([0]);
    expect(facts.filter((f) => f.usage !== undefined).length).toBe(1);
    expect(facts[0]).toMatchObject({ hasContent: false, seen: [0] });
  });
});
