import fc from 'fast-check';

/** White space as JSON allows it, most often none. */
export const space = fc.constantFrom('', '', '', '', ' ', '\n', '\t', '\r\n  ');

const piece = fc.oneof(
  { weight: 4, arbitrary: fc.string({ unit: 'grapheme', maxLength: 6 }).map((s) => JSON.stringify(s).slice(1, -1)) },
  {
    weight: 3,
    arbitrary: fc.constantFrom(
      '\\/',
      '\\u00e9',
      '\\ud83d\\ude00',
      '\\uD800',
      '\\udfff',
      '\\\\',
      '\\"',
      '\\u0000',
      '\\b\\f\\n\\r\\t',
      '\u2028',
      '\ufeff',
      '😀',
      '"kv_transfer_params":1'.replaceAll('"', '\\"'),
    ),
  },
);

/** The text of a JSON string, quotes and odd escapes included. */
export const stringText = fc.array(piece, { maxLength: 4 }).map((parts) => `"${parts.join('')}"`);

/** The text of a JSON number in any spelling. */
export const numberText = fc.oneof(
  fc.constantFrom('0', '-0', '-0.0', '1e3', '1E+10', '1.5e-7', '1519.0', '1e400', '5e-324', '0.10'),
  fc.constantFrom('9007199254740993', '4294967295', '4294967296', '18446744073709551616', '-9007199254740993'),
  fc.bigInt({ min: -(10n ** 40n), max: 10n ** 40n }).map(String),
  fc.nat().map(String),
  fc.double({ noNaN: true, noDefaultInfinity: true }).map((n) => String(n)),
);

/** The text of any JSON value, nested up to four levels. */
export const { value: valueText } = fc.letrec<{ value: string; array: string; object: string }>((tie) => ({
  value: fc.oneof(
    { depthSize: 'small', maxDepth: 4 },
    { weight: 3, arbitrary: fc.oneof(stringText, numberText, fc.constantFrom('true', 'false', 'null', '{}', '[ ]')) },
    { weight: 2, arbitrary: tie('array') },
    { weight: 2, arbitrary: tie('object') },
  ),
  array: fc
    .array(fc.tuple(space, tie('value'), space), { maxLength: 4 })
    .map((items) => `[${items.map((item) => item.join('')).join(',')}]`),
  object: fc
    .array(fc.tuple(space, stringText, space, space, tie('value'), space), { maxLength: 4 })
    .map((members) => `{${members.map(([a, key, b, c, v, d]) => `${a}${key}${b}:${c}${v}${d}`).join(',')}}`),
}));

/** The text of an object whose keys come from a list of key texts (without quotes), so that duplicates are common. */
export function objectText(keys: readonly string[], value: fc.Arbitrary<string> = valueText): fc.Arbitrary<string> {
  const key = fc.oneof(
    { weight: 5, arbitrary: fc.constantFrom(...keys).map((text) => `"${text}"`) },
    { weight: 1, arbitrary: stringText },
  );
  return fc
    .tuple(space, fc.array(fc.tuple(space, key, space, space, value, space), { maxLength: 8 }), space, space)
    .map(([before, members, inside, after]) => {
      const inner = members.map(([a, k, b, c, v, d]) => `${a}${k}${b}:${c}${v}${d}`).join(',');
      return `${before}{${members.length === 0 ? inside : inner}}${after}`;
    });
}

/** The text without the white space outside strings; a plain loop, on purpose unlike the code under test. */
export function withoutSpace(text: string): string {
  let out = '';
  let inString = false;
  for (let i = 0; i < text.length; i++) {
    const c = text[i] ?? '';
    if (inString && c === '\\') {
      out += c + (text[i + 1] ?? '');
      i++;
      continue;
    }
    if (c === '"') inString = !inString;
    if (inString || !' \t\r\n'.includes(c)) out += c;
  }
  return out;
}

const encoder = new TextEncoder();
const decoder = new TextDecoder('utf-8', { fatal: true, ignoreBOM: true });

/** UTF-8 bytes of a text. */
export function utf8(text: string): Uint8Array {
  return encoder.encode(text);
}

/** Text of UTF-8 bytes; throws where they are none. */
export function textOf(bytes: Uint8Array): string {
  return decoder.decode(bytes);
}
