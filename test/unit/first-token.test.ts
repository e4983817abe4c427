import { describe, expect, test } from 'vitest';
import { lmcache } from '../../src/connectors/lmcache.ts';
import type { Api } from '../../src/core/facts.ts';
import { readFacts } from '../../src/core/facts.ts';
import {
  type Composition,
  readFirstToken,
  reshapeEvent,
  reshapeWhole,
  whyNotSplit,
} from '../../src/core/first-token.ts';
import { scanObject, spliceObject } from '../../src/core/json-scan.ts';

const encode = (value: unknown) => new TextEncoder().encode(typeof value === 'string' ? value : JSON.stringify(value));
const decode = (bytes: Uint8Array) => new TextDecoder().decode(bytes);

function requestOf(body: unknown, api: Api = 'chat.completions') {
  const bytes = encode(body);
  const scan = scanObject(bytes);
  if (scan.kind !== 'object') throw new Error('no object');
  return { api, body: bytes, scan, facts: readFacts(api, bytes, scan) };
}

const MESSAGES = [{ role: 'user', content: 'Hi' }];

describe('what the protocol cannot carry', () => {
  test.each([
    ['n', { n: 2 }],
    ['use_beam_search', { use_beam_search: true }],
    ['prompt_logprobs', { prompt_logprobs: 1 }],
    ['echo', { echo: true }],
    ['best_of', { best_of: 3 }],
    ['structured_outputs', { structured_outputs: { regex: 'a+' } }],
    ['guided_json', { guided_json: {} }],
    ['response_format', { response_format: { type: 'json_object' } }],
    ['tool_choice', { tools: [], tool_choice: 'required' }],
    ['tool_choice', { tools: [], tool_choice: { type: 'function', function: { name: 'f' } } }],
    ['documents', { documents: [{ text: 'x' }] }],
    ['reasoning_effort', { reasoning_effort: 'low' }],
    ['messages', { messages: [{ role: 'user', content: [{ type: 'image_url', image_url: { url: 'data:,' } }] }] }],
  ])('%s', (param, members) => {
    const request = requestOf({ model: 'm', messages: MESSAGES, ...members });
    expect(lmcache.uncarried(request)).toMatchObject({ param });
  });

  test('several prompts', () => {
    expect(lmcache.uncarried(requestOf({ prompt: ['a', 'b'] }, 'completions'))).toMatchObject({ param: 'prompt' });
  });

  test.each([
    {},
    { n: 1, best_of: 1, echo: false, response_format: { type: 'text' }, tool_choice: 'auto', tools: [{}] },
    { tool_choice: 'none', tools: [{}], documents: null, logprobs: true, top_logprobs: 3, stop: ['a'], min_tokens: 2 },
    { chat_template: 'x', chat_template_kwargs: {}, add_generation_prompt: true, response_format: null },
  ])('and what it can: %j', (members) => {
    const request = requestOf({ model: 'm', messages: MESSAGES, ...members });
    expect(lmcache.uncarried(request)).toBeUndefined();
    expect(lmcache.unproven(request)).toBe(false);
  });

  test('an unknown member may shape the prompt', () => {
    expect(lmcache.unproven(requestOf({ messages: MESSAGES, some_new_thing: 1 }))).toBe(true);
  });
});

describe('how a stream is asked for', () => {
  test.each([
    [{ stream: true }, false],
    [{ stream: false }, false],
    [{ stream: null, stream_options: null }, false],
    [{ stream: true, stream_options: {} }, false],
    [{ stream: true, stream_options: { include_usage: true, continuous_usage_stats: null } }, false],
    [{ stream: 'true' }, true],
    [{ stream: 'false' }, true],
    [{ stream: 1 }, true],
    [{ stream: {} }, true],
    [{ stream: true, stream_options: 'all' }, true],
    [{ stream: true, stream_options: { include_usage: 'maybe' } }, true],
    [{ stream: true, stream_options: { another: true } }, true],
    [{ stream_options: { include_usage: true } }, true],
  ])('%j is for an engine to judge: %s', (members, odd) => {
    expect(lmcache.unproven(requestOf({ messages: MESSAGES, ...members }))).toBe(odd);
  });
});

describe('limits', () => {
  test.each([
    [{}, { kind: 'ok', max: undefined, min: 0 }],
    [{ max_tokens: 4 }, { kind: 'ok', max: 4, min: 0 }],
    [
      { max_tokens: 9, max_completion_tokens: 4 },
      { kind: 'ok', max: 4, min: 0 },
    ],
    [
      { max_tokens: null, min_tokens: 3 },
      { kind: 'ok', max: undefined, min: 3 },
    ],
    [{ max_tokens: 0 }, { kind: 'odd' }],
    [{ max_tokens: '4' }, { kind: 'odd' }],
    [{ max_tokens: 2, min_tokens: 3 }, { kind: 'odd' }],
  ])('%j', (members, want) => {
    expect(lmcache.readLimits(requestOf({ messages: MESSAGES, ...members }))).toEqual(want);
  });

  test('completions have a default of their own', () => {
    expect(lmcache.readLimits(requestOf({ prompt: 'a' }, 'completions'))).toEqual({ kind: 'ok', max: 16, min: 0 });
  });

  test('min_tokens are shared out', () => {
    const request = requestOf({ messages: MESSAGES, max_tokens: 9, min_tokens: 3 });
    const receiver = { host: 'd', initPorts: [1], allocPorts: [2], queryPorts: [3] };
    const legs = [lmcache.prefill(request, [1], 'x', receiver), lmcache.decode(request, [1], 2, 9)];
    const bodies = legs.map((edits) => JSON.parse(decode(spliceObject(request.body, request.scan, edits))));
    expect(bodies).toMatchObject([
      { max_tokens: 1, min_tokens: 1, kv_transfer_params: { disagg_spec: { receiver_query_port: [3] } } },
      { max_tokens: 8, min_tokens: 2, prompt: [1, 2] },
    ]);
  });
});

test.each([
  ['a', [], undefined],
  ['', [], 'partial_text'],
  ['\ufffd', [], 'partial_text'],
  ['xa', ['ab'], 'stop_at_boundary'],
  ['xab', ['abc'], 'stop_at_boundary'],
  ['ab', ['ab'], undefined],
  ['xb', ['ab'], undefined],
] as const)('%j with stops %j: %s', (text, stops, want) => {
  expect(whyNotSplit(text, stops)).toBe(want);
});

test.each([
  ['no handle', { choices: [{ text: 'a' }], kv_transfer_params: null }],
  ['no token', { choices: [{ text: 'a' }], kv_transfer_params: {} }],
  ['a token that is none', { choices: [{ text: 'a' }], kv_transfer_params: { first_tok: '5' } }],
  ['no choice', { choices: [], kv_transfer_params: { first_tok: 5 } }],
  ['no object', []],
])('P’s reply with %s has no first token', (_name, reply) => {
  expect(readFirstToken(encode(reply))).toBeUndefined();
});

describe('composition', () => {
  const first = {
    id: 'cmpl-p',
    created: 7,
    model: 'm',
    text: 'é!',
    tokenId: 5,
    finishReason: 'length',
    stopReason: null,
    logprobs: { text_offset: [0], token_logprobs: [-1], tokens: ['é!'], top_logprobs: [{ 'é!': -1, x: -2, 1: -1.5 }] },
    promptDetails: { cached_tokens: 3 },
  };
  const reply: Composition = {
    api: 'completions',
    first,
    promptTokenIds: [1, 2, 3],
    showTokenIds: false,
    topLogprobs: 2,
    includeUsage: true,
    continuousUsage: false,
  };

  test('offsets count characters, not bytes', () => {
    const logprobs = { text_offset: [0, 1], token_logprobs: [-1, -2], tokens: ['a', 'b'], top_logprobs: [null, null] };
    const whole = { id: 'cmpl-d', choices: [{ index: 0, text: 'ab', logprobs, finish_reason: 'stop' }] };
    const merged = JSON.parse(decode(reshapeWhole(reply, encode(whole)))) as { choices: unknown[] };
    expect(merged).toMatchObject({ id: 'cmpl-p', choices: [{ text: 'é!ab', finish_reason: 'stop' }] });
    expect(merged.choices[0]).toMatchObject({ logprobs: { text_offset: [0, 2, 3], tokens: ['é!', 'a', 'b'] } });
  });

  test('chat log probabilities: as many alternatives as were asked for, best first', () => {
    const chat: Composition = { ...reply, api: 'chat.completions' };
    const whole = { choices: [{ index: 0, text: '', logprobs: null, finish_reason: 'stop' }] };
    const merged = JSON.parse(decode(reshapeWhole(chat, encode(whole)))) as { choices: { logprobs: unknown }[] };
    expect(merged.choices[0]?.logprobs).toEqual({
      content: [
        {
          token: 'é!',
          logprob: -1,
          bytes: [195, 169, 33],
          top_logprobs: [
            { token: 'é!', logprob: -1, bytes: [195, 169, 33] },
            { token: '1', logprob: -1.5, bytes: [49] },
          ],
        },
      ],
    });
  });

  test('usage tells what P had cached', () => {
    const usage = {
      prompt_tokens: 4,
      completion_tokens: 2,
      total_tokens: 6,
      prompt_tokens_details: { cached_tokens: 4 },
    };
    const event = decode(reshapeEvent(reply, encode(`data: ${JSON.stringify({ id: 'd', choices: [], usage })}\n\n`)));
    expect(JSON.parse(event.slice(6))).toEqual({
      id: 'cmpl-p',
      choices: [],
      usage: { prompt_tokens: 3, completion_tokens: 3, total_tokens: 6, prompt_tokens_details: { cached_tokens: 3 } },
    });
  });

  test.each(['data: [DONE]\n\n', ': ping\n\n', 'data: {"error":{"message":"no"}}\n\n', 'data: junk\n\n', '\n'])(
    '%j is passed on',
    (event) => {
      for (const api of ['completions', 'chat.completions'] as const) {
        expect(decode(reshapeEvent({ ...reply, api }, encode(event)))).toBe(event);
      }
    },
  );
});
