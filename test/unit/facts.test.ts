import { describe, expect, test } from 'vitest';
import { type Api, readFacts } from '../../src/core/facts.ts';
import { scanObject } from '../../src/core/json-scan.ts';
import { utf8 } from './json-text.ts';

function factsOf(api: Api, text: string) {
  const body = utf8(text);
  const scan = scanObject(body);
  if (scan.kind !== 'object') throw new Error(`no object: ${text}`);
  return readFacts(api, body, scan, '');
}

const reasonsOf = (text: string, api: Api = 'completions') => factsOf(api, text).localReasons;

describe('n: anything that an engine could read as more than one keeps the request on D', () => {
  test.each([
    ['1', []],
    ['null', []],
    ['2', ['n']],
    ['"2"', ['n']],
    ['2.0', ['n']],
    ['2e0', ['n']],
    ['0', ['n']],
    ['-1', ['n']],
    // These are 1 to an engine; a needless detour is no harm.
    ['1.0', ['n']],
    ['"1"', ['n']],
    ['true', ['n']],
    ['[]', ['n']],
    ['1111111111111111111111111111111111111111111111111111111111111111111111', ['n']],
  ])('%s', (n, reasons) => {
    expect(reasonsOf(`{"n":${n}}`)).toEqual(reasons);
    expect(reasonsOf(`{ "n" :\n${n} ,"a":1}`, 'chat.completions')).toEqual(reasons);
  });

  test('the last duplicate counts, as engines read it, however the key is spelled', () => {
    expect(reasonsOf('{"n":2,"n":1}')).toEqual([]);
    expect(reasonsOf('{"n":1,"\\u006e":2}')).toEqual(['n']);
    expect(reasonsOf('{"a":{"n":2},"b":[{"n":2}]}')).toEqual([]);
  });
});

describe('flags are read as pydantic reads them', () => {
  test.each<[string, boolean]>([
    ['true', true],
    ['1', true],
    ['1.0', true],
    ['"true"', true],
    ['"TRUE"', true],
    ['"on"', true],
    ['"yes"', true],
    ['"1"', true],
    ['"t"', true],
    ['"\\u0074rue"', true],
    ['false', false],
    ['null', false],
    ['0', false],
    ['0.0', false],
    ['-0', false],
    ['"false"', false],
    ['"False"', false],
    ['"off"', false],
    ['"no"', false],
    ['"n"', false],
    ['"f"', false],
    ['"0"', false],
    ['""', false],
    // No engine takes these; what baton thinks of them changes nothing but a time limit.
    ['{}', true],
    ['"maybe"', true],
  ])('%s is %s', (value, truth) => {
    expect(factsOf('completions', `{"stream":${value}}`).stream).toBe(truth);
    expect(reasonsOf(`{"use_beam_search":${value}}`)).toEqual(truth ? ['beam_search'] : []);
  });

  test('a missing flag is off', () => {
    expect(factsOf('completions', '{}')).toMatchObject({ stream: false, localReasons: [], refused: [] });
  });
});

describe('several prompts', () => {
  test.each<[string, boolean]>([
    ['"one"', false],
    ['["one"]', false],
    ['[ "one" ]', false],
    ['[1,2,3]', false],
    ['[\n -1]', false],
    ['[[1,2,3]]', false],
    ['null', false],
    ['{}', false],
    ['["one","two"]', true],
    ['[[1],[2]]', true],
    ['["one",[2]]', true],
    ['[]', true],
  ])('%s: %s', (prompt, several) => {
    expect(reasonsOf(`{"prompt":${prompt}}`)).toEqual(several ? ['multi_prompt'] : []);
    expect(reasonsOf(`{"prompt":${prompt}}`, 'chat.completions')).toEqual([]);
  });

  test('embeddings are no prompt that P could share', () => {
    expect(reasonsOf('{"prompt_embeds":"AAAA"}')).toEqual(['prompt_embeds']);
    expect(reasonsOf('{"prompt_embeds":["AAAA","BBBB"],"prompt":null}')).toEqual(['prompt_embeds']);
    expect(reasonsOf('{"prompt_embeds":null}')).toEqual([]);
  });
});

describe('log-probabilities of the prompt', () => {
  test.each<[string, readonly string[]]>([
    ['"prompt_logprobs":0', ['prompt_logprobs']],
    ['"prompt_logprobs":-1', ['prompt_logprobs']],
    ['"prompt_logprobs":"5"', ['prompt_logprobs']],
    ['"prompt_logprobs":false', ['prompt_logprobs']],
    ['"prompt_logprobs":null', []],
    ['"logprobs":5', []],
    ['"echo":true', []],
    ['"echo":true,"logprobs":5', ['echo_logprobs']],
    ['"echo":"yes","logprobs":1', ['echo_logprobs']],
    ['"echo":1,"logprobs":0', ['echo_logprobs']],
    ['"echo":true,"logprobs":"0"', ['echo_logprobs']],
    ['"echo":true,"logprobs":false', ['echo_logprobs']],
    ['"echo":true,"logprobs":null', []],
    ['"echo":false,"logprobs":5', []],
    ['"echo":"off","logprobs":5', []],
  ])('completions {%s}', (members, reasons) => {
    expect(reasonsOf(`{${members}}`)).toEqual(reasons);
  });

  test.each<[string, readonly string[]]>([
    ['"echo":true,"logprobs":true', ['echo_logprobs']],
    ['"echo":true,"logprobs":true,"top_logprobs":2', ['echo_logprobs']],
    ['"echo":true,"top_logprobs":0', ['echo_logprobs']],
    ['"echo":true,"logprobs":false', []],
    ['"logprobs":true,"top_logprobs":2', []],
    ['"prompt_logprobs":1', ['prompt_logprobs']],
  ])('chat {%s}', (members, reasons) => {
    expect(reasonsOf(`{${members}}`, 'chat.completions')).toEqual(reasons);
  });
});

test('every reason is told', () => {
  expect(
    reasonsOf('{"n":2,"use_beam_search":true,"prompt":["a","b"],"echo":true,"logprobs":1,"prompt_logprobs":1}'),
  ).toEqual(['n', 'beam_search', 'prompt_logprobs', 'multi_prompt', 'echo_logprobs']);
});

test('model and salt are the decoded strings; what is no string is none', () => {
  expect(factsOf('completions', '{"model":"a","model":"org\\/\\u00e9","cache_salt":"s"}')).toMatchObject({
    model: 'org/é',
    cacheSalt: 's',
  });
  expect(factsOf('completions', '{"model":7,"cache_salt":null}')).toMatchObject({ model: '', cacheSalt: '' });
});

test('members that steer hand-overs are refused unless they are null', () => {
  const refusedOf = (text: string) => factsOf('completions', text).refused;
  expect(refusedOf('{"kv_transfer_params":{},"ec_transfer_params":0}')).toEqual([
    'kv_transfer_params',
    'ec_transfer_params',
  ]);
  expect(refusedOf('{"kv_transfer_params":null}')).toEqual([]);
  expect(refusedOf('{"a":{"kv_transfer_params":1}}')).toEqual([]);
  expect(refusedOf('{"kv_transfer_params":null,"kv_transfer_params":false}')).toEqual(['kv_transfer_params']);
});

test('depth and size of what is not looked at do not matter', () => {
  const deep = '['.repeat(100_000) + ']'.repeat(100_000);
  expect(reasonsOf(`{"prompt":${deep},"tools":${deep}}`)).toEqual([]);
  expect(reasonsOf(`{"prompt":[${'1,'.repeat(200_000)}1]}`)).toEqual([]);
});
