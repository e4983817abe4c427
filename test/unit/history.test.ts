import { createHash } from 'node:crypto';
import fc from 'fast-check';
import { describe, expect, test } from 'vitest';
import { type HistoryHashes, hashHistory, historyLookups, type IncrementalHash } from '../../src/core/history.ts';
import { scanObject } from '../../src/core/json-scan.ts';
import { elementsOf, memberOf } from '../../src/core/json-walk.ts';
import { objectText, space, stringText, valueText, withoutSpace } from './json-text.ts';

type Api = 'chat.completions' | 'completions';
const encoder = new TextEncoder();
const decoder = new TextDecoder();
const sha256 = () => createHash('sha256');

function hashes(text: string, api: Api = 'chat.completions'): HistoryHashes | undefined {
  const body = encoder.encode(text);
  const scan = scanObject(body);
  if (scan.kind !== 'object') throw new Error(`not an object: ${text}`);
  return hashHistory(api, body, scan, sha256);
}

function all(text: string, api?: Api): string {
  const found = hashes(text, api);
  if (found === undefined) throw new Error('no history');
  return found.all;
}

/** Keeps what it is fed, so that a test sees the bytes. */
class Tape implements IncrementalHash {
  readonly #text: string;
  #more = '';
  constructor(text = '') {
    this.#text = text;
  }
  update(bytes: Uint8Array): void {
    this.#more += decoder.decode(bytes);
  }
  copy(): Tape {
    return new Tape(this.digest());
  }
  digest(): string {
    return this.#text + this.#more;
  }
}

const user = (content: string) => ({ role: 'user', content });
const assistant = (content: string) => ({ role: 'assistant', content });
const chat = (...messages: unknown[]) => JSON.stringify({ model: 'm', messages });

describe('what is hashed', () => {
  test('each message on a line without white space outside strings, after the API', () => {
    const body = encoder.encode('{"x":1, "messages" : [ {"role" : "user",\n"content":" a  b\\" "} , 12 , 3 ]}');
    const scan = scanObject(body);
    if (scan.kind !== 'object') throw new Error('not an object');
    expect(hashHistory('chat.completions', body, scan, () => new Tape())?.all).toBe(
      'chat.completions\n{"role":"user","content":" a  b\\" "}\n12\n3\n',
    );
  });

  test('long strings and many small pieces arrive whole', () => {
    const long = 'x y "'.repeat(5000);
    const ids = Array.from({ length: 20_000 }, (_, i) => i);
    const body = encoder.encode(JSON.stringify({ messages: [user(long), { ids }, user(long)] }, undefined, 1));
    const scan = scanObject(body);
    if (scan.kind !== 'object') throw new Error('not an object');
    expect(hashHistory('chat.completions', body, scan, () => new Tape())?.all).toBe(
      `chat.completions\n${[user(long), { ids }, user(long)].map((m) => JSON.stringify(m)).join('\n')}\n`,
    );
  });

  test('nothing but the messages counts', () => {
    const messages = [user('a')];
    expect(all(JSON.stringify({ model: 'a', messages, temperature: 1 }))).toBe(
      all(JSON.stringify({ messages, model: 'b' })),
    );
  });

  test('the prompt of completions, a text or token ids; never equal to a chat', () => {
    expect(all('{"prompt": "a b"}', 'completions')).toBe(all('{"n":1,"prompt":"a b"}', 'completions'));
    expect(all('{"prompt":[1, 2]}', 'completions')).toBe(all('{"prompt":[1,2]}', 'completions'));
    expect(all('{"prompt":[1,2]}', 'completions')).not.toBe(all('{"prompt":[12]}', 'completions'));
    expect(all('{"prompt":"a"}', 'completions')).not.toBe(all('{"messages":["a"]}'));
    expect(hashes('{"prompt":"a"}', 'completions')).toMatchObject({
      beforeAssistant: undefined,
      beforeTrailing: undefined,
    });
  });

  test.each([
    ['{}', 'chat.completions'],
    ['{"messages":null}', 'chat.completions'],
    ['{"messages":"a"}', 'chat.completions'],
    ['{"messages":[{}]}', 'completions'],
    ['{"prompt":null}', 'completions'],
  ] as const)('no history: %s as %s', (text, api) => {
    expect(hashes(text, api)).toBeUndefined();
  });
});

describe('finding the turn before', () => {
  const [u1, a1, u2, a2] = [user('u1'), assistant('a1'), user('u2'), assistant('a2')];

  test('the first turn is found by its own repetition only', () => {
    const first = hashes(chat(u1));
    expect(first).toMatchObject({ all: all(chat(u1)), beforeAssistant: undefined, beforeTrailing: undefined });
    expect(historyLookups(first!)).toEqual([first?.all]);
  });

  test('the next turn is found under what stands before the answer', () => {
    expect(historyLookups(hashes(chat(u1, a1, u2))!)).toEqual([all(chat(u1, a1, u2)), all(chat(u1))]);
    expect(historyLookups(hashes(chat(u1, a1, u2, a2, user('u3')))!)[1]).toBe(all(chat(u1, a1, u2)));
    // Tool results follow the answer that asked for them.
    const tool = { role: 'tool', content: 't' };
    expect(historyLookups(hashes(chat(u1, a1, tool, tool))!)[1]).toBe(all(chat(u1)));
  });

  test('each hash is of so many messages', () => {
    const { lengths } = hashes(chat(u1, a1, u2, a2))!;
    const of = (...messages: Parameters<typeof chat>) => lengths.get(all(chat(...messages)));
    expect([of(u1), of(u1, a1), of(u1, a1, u2), of(u1, a1, u2, a2)]).toEqual([1, undefined, 3, 4]);
  });

  test('an answer to be continued is looked up before it, then before the answer that was already complete', () => {
    expect(historyLookups(hashes(chat(u1, a1, u2, a2))!)).toEqual([
      all(chat(u1, a1, u2, a2)),
      all(chat(u1, a1, u2)),
      all(chat(u1)),
    ]);
    expect(historyLookups(hashes(chat(u1, a1))!)).toEqual([all(chat(u1, a1)), all(chat(u1))]);
  });
});

describe('properties', () => {
  const message = objectText(['role', 'content', '', 'r\\u006fle']);
  const spelled = fc.array(message, { minLength: 1, maxLength: 4 });

  test('white space between tokens changes nothing', () => {
    fc.assert(
      fc.property(spelled, fc.array(space, { minLength: 12, maxLength: 12 }), (messages, gaps) => {
        const gap = (i: number) => gaps[i % gaps.length] ?? '';
        const loose = `${gap(0)}{${gap(1)}"messages"${gap(2)}:${gap(3)}[${gap(4)}${messages
          .map((each, i) => `${gap(i)}${each}${gap(i + 5)}`)
          .join(',')}${gap(6)}]${gap(7)}}`;
        const tight = `{"messages":[${messages.map(withoutSpace).join(',')}]}`;
        expect(all(loose)).toBe(all(tight));
      }),
    );
  });

  test('any other difference of the bytes does', () => {
    fc.assert(
      fc.property(spelled, spelled, (first, second) => {
        const same = first.map(withoutSpace).join('\n') === second.map(withoutSpace).join('\n');
        const [a, b] = [first, second].map((messages) => all(`{"messages":[${messages.join(',')}]}`));
        expect(a === b).toBe(same);
      }),
    );
    fc.assert(
      fc.property(stringText, fc.nat(), (content, at) => {
        const text = `{"messages":[{"role":"user","content":${content}}]}`;
        const from = text.lastIndexOf(content) + 1;
        const index = from + (at % (content.length - 1));
        const longer = `${text.slice(0, index)} ${text.slice(index)}`;
        fc.pre(isJson(longer));
        expect(all(longer)).not.toBe(all(text));
      }),
    );
  });

  test('the walker sees the elements and members that JSON.parse sees', () => {
    fc.assert(
      fc.property(fc.array(valueText, { maxLength: 5 }), space, (values, gap) => {
        const body = encoder.encode(`[${gap}${values.join(`${gap},${gap}`)}${gap}]`);
        const found = elementsOf(body, { valueStart: 0, valueEnd: body.length });
        expect(found.map((each) => decoder.decode(body.subarray(each.valueStart, each.valueEnd)).trim())).toEqual(
          values.map((value) => value.trim()),
        );
      }),
    );
    fc.assert(
      fc.property(message, (text) => {
        const body = encoder.encode(text);
        const start = text.length - text.trimStart().length;
        const range = { valueStart: start, valueEnd: encoder.encode(text.trimEnd()).length };
        const keys: string[] = [];
        const last = memberOf(body, range, (key) => {
          keys.push(JSON.parse(decoder.decode(body.subarray(key.valueStart, key.valueEnd))) as string);
          return true;
        });
        const parsed = JSON.parse(text) as Record<string, unknown>;
        expect(new Set(keys)).toEqual(new Set(Object.keys(parsed)));
        if (last !== undefined) {
          const value = decoder.decode(body.subarray(last.valueStart, last.valueEnd));
          expect(JSON.parse(value)).toEqual(parsed[keys.at(-1) ?? '']);
        }
      }),
    );
  });
});

function isJson(text: string): boolean {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}
