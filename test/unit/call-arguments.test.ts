import { expect, test } from 'vitest';
import { checkSize } from '../../src/services/call-arguments.ts';

test('a text is counted in bytes of UTF-8, and has no half of a surrogate pair', () => {
  expect(checkSize('key.model', 'é😀', 6)).toBe('é😀');
  const refusal = (text: string) => expect(() => checkSize('key.model', text, 6));
  refusal('é😀.').toThrow('key.model is longer than 6 bytes');
  for (const text of ['\ud800', 'a\udc00', '\ud83d']) refusal(text).toThrow('key.model is not well-formed Unicode');
});
