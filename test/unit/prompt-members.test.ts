import { describe, expect, test } from 'vitest';
import { scanObject } from '../../src/core/json-scan.ts';
import {
  isInTokens,
  isProvable,
  PROVEN_VERSIONS,
  tokenizeDrops,
  toldMembers,
  unprovenMembers,
} from '../../src/core/prompt-members.ts';

type Api = 'chat.completions' | 'completions';

function scan(value: unknown) {
  const body = new TextEncoder().encode(typeof value === 'string' ? value : JSON.stringify(value));
  const found = scanObject(body);
  if (found.kind !== 'object') throw new Error('no object');
  return { body, found };
}

function unproven(api: Api, value: unknown): readonly string[] {
  const { body, found } = scan(value);
  return unprovenMembers(api, body, found);
}

const messages = [{ role: 'user', content: 'hi' }];
const chat = (more: object) => unproven('chat.completions', { model: 'm', messages, ...more });
const text = (more: object) => unproven('completions', { model: 'm', prompt: 'hi', ...more });

describe('members of a body', () => {
  test('sampling, output and bookkeeping prove nothing and need no proof', () => {
    const harmless = {
      temperature: 0.5,
      stream: true,
      stop: ['x'],
      n: 1,
      seed: 3,
      cache_salt: 's',
      conversation_id: 'c',
    };
    expect(chat({ ...harmless, logprobs: true, top_logprobs: 2, vllm_xargs: { session_id: 'x' } })).toEqual([]);
    expect(text({ ...harmless, logprobs: 2 })).toEqual([]);
  });

  test('what /tokenize renders as well is proven', () => {
    const honoured = { tools: [], chat_template: 't', chat_template_kwargs: {}, add_generation_prompt: false };
    expect(chat({ ...honoured, continue_final_message: true, add_special_tokens: true })).toEqual([]);
    expect(text({ add_special_tokens: false })).toEqual([]);
  });

  test.each([
    'documents',
    'reasoning_effort',
    'response_format',
    'truncate_prompt_tokens',
    'truncation_side',
    'mm_processor_kwargs',
    'guided_json',
    'structured_outputs',
    'a_member_of_later_versions',
  ])('%s could shape the prompt unseen', (member) => {
    expect(chat({ [member]: 'x' })).toEqual([member]);
    expect(chat({ [member]: null })).toEqual([]);
    expect(text({ [member]: 1 })).toEqual([member]);
  });

  test('members of the other API are not honoured', () => {
    expect(text({ tools: [] })).toEqual(['tools']);
    expect(chat({ prompt: 'x' })).toEqual(['prompt']);
  });

  test.each([
    ['tool_choice', 'auto', []],
    ['tool_choice', 'none', ['tool_choice']],
    ['tool_choice', 'required', ['tool_choice']],
    ['tool_choice', { type: 'function', function: { name: 'f' } }, ['tool_choice']],
    ['echo', false, []],
    ['echo', true, ['echo']],
    ['use_beam_search', false, []],
    ['use_beam_search', true, ['use_beam_search']],
    ['constructor', 1, ['constructor']],
    ['toString', 'x', ['toString']],
  ])('%s %j', (member, value, want) => {
    expect(chat({ [member]: value })).toEqual(want);
  });
});

describe('content of messages', () => {
  const content = (value: unknown) => unproven('chat.completions', { messages: [{ role: 'user', content: value }] });

  test.each([
    ['a text', 'x'],
    ['nothing', null],
    ['text parts', [{ type: 'text', text: 'a' }, 'b']],
    ['no parts', []],
  ])('%s is in the tokens', (_, value) => {
    expect(content(value)).toEqual([]);
  });

  test.each([
    [
      'a picture',
      [
        { type: 'text', text: 'a' },
        { type: 'image_url', image_url: { url: 'data:,' } },
      ],
    ],
    ['a sound', [{ type: 'input_audio', input_audio: {} }]],
    ['a part without a type', [{ text: 'a' }]],
    ['an object', { type: 'text' }],
    ['a number', 5],
    ['a number among parts', [5]],
  ])('%s is not', (_, value) => {
    expect(content(value)).toEqual(['messages']);
    expect(isInTokens(content(value))).toBe(false);
  });

  test('messages that are no list, or hold something else, are not', () => {
    expect(unproven('chat.completions', { messages: 'x' })).toEqual(['messages']);
    expect(unproven('chat.completions', {})).toEqual(['messages']);
    expect(unproven('chat.completions', { messages: ['x'] })).toEqual(['messages']);
  });

  test('a type in escapes is read as what it says', () => {
    const escaped = '{"messages":[{"role":"user","content":[{"type":"t\\u0065xt","text":"a"}]}]}';
    expect(unproven('chat.completions', escaped)).toEqual([]);
  });

  test('other members say nothing about it', () => {
    expect(isInTokens(['documents', 'tool_choice'])).toBe(true);
    expect(isInTokens([])).toBe(true);
  });

  test.each([
    [[], false, true],
    [['messages'], false, false],
    [['messages'], true, true],
    [['messages', 'mm_processor_kwargs'], true, false],
    [['documents'], true, false],
  ])('%j with the history that is equal byte by byte (%s)', (members, hasHistory, provable) => {
    expect(isProvable(members, hasHistory)).toBe(provable);
  });
});

test('a call of /tokenize takes the model and what it honours', () => {
  const { found } = scan({
    model: 'm',
    messages,
    tools: [],
    stream: true,
    stop: 'x',
    documents: [],
    conversation_id: 'c',
  });
  expect([...tokenizeDrops('chat.completions', found)].sort()).toEqual([
    'conversation_id',
    'documents',
    'stop',
    'stream',
  ]);
});

test.each([
  ['0.32.0', true],
  ['0.33.1rc2', true],
  ['0.34.0', false],
  ['0.3.0', false],
  ['10.32.0', false],
])('the lists are proven for version %s: %s', (version, proven) => {
  expect(PROVEN_VERSIONS.test(version)).toBe(proven);
});

test('the router is told a few of the names, cut, and never without those that it asks for', () => {
  const names = Array.from({ length: 50 }, (_, index) => `${index}${'k'.repeat(1000)}`);
  const told = toldMembers([...names, 'echo', 'messages']);
  expect(told.length).toBe(10);
  expect(told.every((name) => name.length <= 64)).toBe(true);
  expect(told.slice(-2)).toEqual(['echo', 'messages']);
  expect(toldMembers([])).toEqual([]);
});
