import fc from 'fast-check';
import { describe, expect, test } from 'vitest';
import { renderChat, type TemplateInput } from '../../src/sim/chat-template.ts';
import { readSimOptions, simFlags } from '../../src/sim/cli-options.ts';
import { resolveOptions } from '../../src/sim/options.ts';
import { decodeTokens, encodeText, special, vocabularySize } from '../../src/sim/tokenizer.ts';

test('any text comes back from its tokens, with either tokenizer', () => {
  fc.assert(
    fc.property(fc.string({ unit: 'binary' }), fc.constantFrom('bytes' as const, 'pairs' as const), (text, kind) => {
      const wellFormed = text.toWellFormed().replace(/^\uFEFF/, '');
      const ids = encodeText(wellFormed, kind);
      expect(decodeTokens(ids)).toBe(wellFormed);
      expect(ids.every((id) => id >= 0 && id < vocabularySize)).toBe(true);
    }),
  );
});

test('pairs merges lower-case letters two by two, bytes does not', () => {
  expect(encodeText('abcD', 'bytes')).toEqual([97, 98, 99, 68]);
  expect(encodeText('abcD', 'pairs')).toEqual([300 + 1, 99, 68]);
});

test('text never becomes a special token', () => {
  expect(encodeText('</s><|user|>', 'bytes')).not.toContain(special.eos);
  expect(decodeTokens([97, special.eos])).toBe('a');
  expect(decodeTokens([97, special.eos], true)).toBe('a</s>');
});

describe('chat template', () => {
  const base: TemplateInput = {
    messages: [{ role: 'user', content: 'hi' }],
    addGenerationPrompt: true,
    continueFinalMessage: false,
    addSpecialTokens: false,
  };
  const render = (more: Partial<TemplateInput>): number[] => renderChat({ ...base, ...more }, 'bytes').tokens;

  test('roles, content parts and the generation prompt', () => {
    expect(render({})).toEqual([special.user, 104, 105, special.end, special.assistant]);
    expect(render({ messages: [{ role: 'user', content: [{ type: 'text', text: 'hi' }] }] })).toEqual(render({}));
    expect(render({ addGenerationPrompt: false })).toEqual([special.user, 104, 105, special.end]);
    expect(render({ continueFinalMessage: true })).toEqual([special.user, 104, 105]);
  });

  test.each([
    [{ tools: [{ type: 'function', function: { name: 'f' } }] }],
    [{ documents: [{ text: 'd' }] }],
    [{ reasoningEffort: 'high' }],
    [{ chatTemplate: '{{x}}' }],
    [{ templateKwargs: { thinking: true } }],
    [{ messages: [{ role: 'system', content: 'hi' }] }],
    [{ messages: [{ role: 'user', name: 'n', content: 'hi' }] }],
  ])('%j changes the prompt', (more) => {
    expect(render(more)).not.toEqual(render({}));
  });

  test('the white space of tool call arguments is lost, as templates lose it', () => {
    const call = (text: string): number[] =>
      render({
        messages: [{ role: 'assistant', content: null, tool_calls: [{ function: { name: 'f', arguments: text } }] }],
      });
    expect(call('{"a": 1}')).toEqual(call('{"a":1}'));
    expect(call('{"a": 2}')).not.toEqual(call('{"a":1}'));
    expect(call('not json')).toContain(special.call);
  });

  test('media take placeholder tokens, and their bytes part the KV', () => {
    const image = (url: string) =>
      renderChat(
        { ...base, messages: [{ role: 'user', content: [{ type: 'image_url', image_url: { url } }] }] },
        'bytes',
      );
    expect(image('a').tokens).toEqual(image('b').tokens);
    expect(image('a').media).toEqual(image('a').media);
    expect([...image('a').media.keys()]).toEqual([...image('b').media.keys()]);
    expect([...image('a').media.values()]).not.toEqual([...image('b').media.values()]);
    expect(image('a').media.size).toBe(image('a').tokens.filter((id) => id === special.media).length);
  });
});

describe('command line options', () => {
  test('the defaults of the flags are those of startSim', () => {
    // Each engine has a clock of its own, and the switch that stops it; the command line has a port.
    const own = { clock: undefined, switch: undefined, port: undefined };
    expect({ ...resolveOptions(readSimOptions({})), ...own }).toEqual({ ...resolveOptions({}), ...own });
  });

  test('values are read by kind and unit', () => {
    const options = readSimOptions({
      role: 'decode',
      port: '8200',
      'kv-lease': '2.5',
      bidirectional: true,
      model: ['m', 'l=/root@m'],
    });
    expect(options).toMatchObject({
      role: 'decode',
      port: 8200,
      kvLeaseMs: 2500,
      bidirectional: true,
      models: [{ id: 'm' }, { id: 'l', root: '/root', parent: 'm' }],
    });
  });

  test('a bad value names its flag', () => {
    expect(() => readSimOptions({ role: 'x' })).toThrow('--role must be one of prefill, decode, both');
    expect(() => readSimOptions({ 'block-size': 'x' })).toThrow('--block-size must be a number');
    expect(() => readSimOptions({ port: '' })).toThrow('--port must be a number');
  });

  test('each flag is there once', () => {
    const names = simFlags.map((flag) => flag.flag);
    expect(new Set(names).size).toBe(names.length);
  });
});
