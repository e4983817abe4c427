import fc from 'fast-check';
import { expect, test } from 'vitest';
import { parseJson } from '../../src/core/parse-json.ts';

test('objects of any two keys keep both, whatever objects stood before them', () => {
  const keys = ['"', '\\', '\n', '\u0000', '\u001c', 'n', 'u', '/', 'a', 'é', '中', '😀'];
  const pairs = keys.flatMap((first) => keys.filter((key) => key !== first).map((second) => [first, second] as const));
  for (let round = 0; round < 40; round++) {
    const list = pairs.toSorted(() => Math.random() - 0.5);
    const text = `[${list.map((pair) => `{${pair.map((key) => `${JSON.stringify(key)}:-0.5`).join(',')}}`).join(',')}]`;
    const parsed = parseJson(text) as object[];
    // Integer keys aside, objects keep the order of their members.
    expect(parsed.map((value) => Object.keys(value))).toEqual(list);
  }
});

test('every JSON value reads as it was written, with and without spaces', () => {
  const value = fc.anything({
    key: fc.string({ unit: 'grapheme' }),
    values: [fc.string(), fc.double(), fc.boolean(), fc.constant(null)],
  });
  fc.assert(
    fc.property(value, fc.constantFrom(0, 1, '\t'), (sample, indent) => {
      const text = JSON.stringify({ sample, escaped: '\n' }, null, indent);
      expect(JSON.stringify(parseJson(text), null, indent)).toBe(text);
    }),
  );
});

test('of a key written twice the last value holds, and __proto__ is a key', () => {
  expect(parseJson('{"a":1,"b":"\\n","\\u0061":2}')).toEqual({ a: 2, b: '\n' });
  expect(Object.keys(parseJson('{"__proto__":"\\n"}') as object)).toEqual(['__proto__']);
});

test.each([
  '"\\',
  '"\\n" 1',
  '["\\n",]',
  '["\\n"',
  '{"\\n":}',
  '{"\\n" 1}',
  '{1:"\\n"}',
  '{"\\n":1}"',
  '{"a":01,"\\n":1}',
  '["\\n"}',
  '[\u00a0"\\n"]',
  '["\\x"]',
  '\\',
])('%s is refused', (text) => {
  expect(() => JSON.parse(text)).toThrow(SyntaxError);
  expect(() => parseJson(text)).toThrow(SyntaxError);
});
