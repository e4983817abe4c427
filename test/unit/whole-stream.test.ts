import { readFileSync } from 'node:fs';
import { describe, expect, test } from 'vitest';
import type { Api } from '../../src/core/facts.ts';
import { scanObject } from '../../src/core/json-scan.ts';
import { isConvertible, streamOf, wantsUsage } from '../../src/core/whole-stream.ts';

const encoder = new TextEncoder();
const decoder = new TextDecoder();
const sample = (name: string) =>
  readFileSync(new URL(`../fixtures/engine-samples/v032-D-${name}`, import.meta.url), 'utf8');

interface Chunk {
  readonly id: string;
  readonly created: number;
  readonly choices: readonly {
    readonly text?: string;
    readonly delta?: { readonly role?: string; readonly content?: string };
    readonly finish_reason: string | null;
  }[];
  readonly usage?: object;
}

const eventsOf = (stream: string) => stream.split('\n\n').filter((event) => event !== '');
const chunkOf = (event: string): Chunk => JSON.parse(event.slice('data: '.length));

/** A recorded stream, and the whole reply that the same engine would have given, after a recorded one. */
function recorded(kind: 'chat' | 'completion', usage: 'usage' | 'nousage') {
  const native = eventsOf(sample(`${kind}-stream-${usage}.sse`));
  const chunks = native.slice(0, -1).map(chunkOf);
  const text = chunks.map(({ choices: [c] }) => c?.text ?? c?.delta?.content ?? '').join('');
  const { body } = JSON.parse(sample(`${kind}-nonstream.json`));
  const [{ id, created }, last] = [chunks[0]!, chunks.at(-1)!];
  const [choice] = body.choices;
  Object.assign(body, { id, created });
  if (last.usage !== undefined) {
    const { prompt_tokens_details: details } = body.usage;
    Object.assign(body.usage, last.usage, {
      prompt_tokens_details: { ...details, ...(last.usage as typeof body.usage).prompt_tokens_details },
    });
  }
  if (kind === 'chat') choice.message.content = text;
  else choice.text = text;
  return { native, body: encoder.encode(JSON.stringify(body)), text };
}

describe.each([
  ['chat', 'chat.completions'],
  ['completion', 'completions'],
] as const)('a whole reply of vLLM 0.32 as its stream: %s', (kind, api: Api) => {
  test.each(['usage', 'nousage'] as const)(
    '%s: every chunk is as the engine writes it, and nothing is lost',
    (usage) => {
      const { native, body, text } = recorded(kind, usage);
      const written = streamOf(api, body, usage === 'usage');
      const events = eventsOf(decoder.decode(written?.events));
      expect(written?.hasMore).toBe(false);
      const [content] = native.filter((event) => kind === 'completion' || !event.includes('"role"'));
      const final = native.find((event) => /"finish_reason":"/.test(event)) ?? '';
      /** The engine's chunk with another text in it. */
      const saying = (event: string, other: string) => {
        const { choices } = chunkOf(event);
        const said = choices[0]?.text ?? choices[0]?.delta?.content ?? '';
        const key = kind === 'chat' ? 'content' : 'text';
        return event.replace(`"${key}":${JSON.stringify(said)}`, () => `"${key}":${JSON.stringify(other)}`);
      };
      const expected = [
        ...(kind === 'chat' ? native.slice(0, 1) : []),
        saying(content ?? '', text),
        saying(final, ''),
        ...native.slice(native.indexOf(final) + 1),
      ];
      expect(events).toEqual(expected);
      expect(events.at(-1)).toBe('data: [DONE]');
    },
  );
});

const chat = (message: object, rest: object = {}) =>
  encoder.encode(
    JSON.stringify({
      id: 'c',
      created: 1,
      model: 'm',
      choices: [{ index: 0, message: { role: 'assistant', ...message }, finish_reason: 'stop', stop_reason: null }],
      ...rest,
    }),
  );

test('texts are copied as they are written, escapes and all', () => {
  const escaped = String.raw`"\u00e9\ud83d\ude00 é \/ \ud83d"`;
  const body = encoder.encode(decoder.decode(chat({ content: 'TEXT' })).replace('"TEXT"', () => escaped));
  expect(decoder.decode(streamOf('chat.completions', body, false)?.events)).toContain(`"delta":{"content":${escaped}}`);
});

test('what else a message has is shown before its text, and said to be more', () => {
  const body = chat({ content: 'yes', reasoning: 'hm', refusal: null, tool_calls: [], annotations: [] });
  const written = streamOf('chat.completions', body, false);
  const deltas = eventsOf(decoder.decode(written?.events))
    .slice(0, -1)
    .map((event) => chunkOf(event).choices[0]?.delta);
  expect(deltas).toEqual([
    { role: 'assistant', content: '' },
    { reasoning: 'hm' },
    { content: 'yes' },
    { content: '' },
  ]);
  expect(written?.hasMore).toBe(true);
});

test('a reply without text is its first and its last chunk', () => {
  const events = eventsOf(decoder.decode(streamOf('chat.completions', chat({ content: null }), true)?.events));
  expect(events.map((event) => /"finish_reason":"stop"|"role"|DONE/.exec(event)?.[0])).toEqual([
    '"role"',
    '"finish_reason":"stop"',
    'DONE',
  ]);
});

test.each(['[]', '{}', '{"choices":[]}', '{"choices":[1]}', '{"choices":[{"index":0}]}', 'no'])(
  'what is no reply is not made one: %s',
  (body) => expect(streamOf('chat.completions', encoder.encode(body), false)).toBeUndefined(),
);

test.each<[object, boolean]>([
  [{}, true],
  [{ temperature: 0.5, n: 1, logprobs: false, tools: null, echo: false, stream_options: null }, true],
  [{ stream_options: { include_usage: true } }, true],
  [{ stream_options: { include_usage: false, continuous_usage_stats: false } }, true],
  [{ stream_options: { include_usage: true, continuous_usage_stats: true } }, false],
  [{ stream_options: { later: 1 } }, false],
  [{ stream_options: true }, false],
  [{ n: 2 }, false],
  [{ logprobs: true }, false],
  [{ logprobs: 0 }, false],
  [{ top_logprobs: 2 }, false],
  [{ tools: [] }, false],
  [{ echo: true }, false],
  [{ return_token_ids: true }, false],
])('%j can be written as a stream afterwards: %s', (members, expected) => {
  const body = encoder.encode(JSON.stringify({ model: 'm', stream: true, ...members }));
  const scan = scanObject(body);
  if (scan.kind !== 'object') throw new Error('no object');
  expect(isConvertible(body, scan)).toBe(expected);
  const wanted = JSON.stringify(members).includes('"include_usage":true');
  if (expected) expect(wantsUsage(body, scan)).toBe(wanted);
});
