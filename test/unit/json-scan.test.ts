import fc from 'fast-check';
import { describe, expect, test } from 'vitest';
import {
  decodeString,
  findMember,
  type ObjectScan,
  type ScannedObject,
  scanArray,
  scanObject,
  spliceObject,
} from '../../src/core/json-scan.ts';
import { objectText, stringText, textOf, utf8, valueText, withoutSpace } from './json-text.ts';

const KEYS = ['model', 'stream', 'a', 'b', '', '\\u0061', 'max_tokens', '__proto__', 'x\\/y', '\\ud800'];

function scanned(bytes: Uint8Array): ScannedObject {
  const scan = scanObject(bytes);
  if (scan.kind !== 'object') throw new Error(`not an object: ${JSON.stringify(scan)}`);
  return scan;
}

function parses(text: string): boolean {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

interface SlowMember {
  readonly key: string;
  readonly keyAt: number;
  readonly valueAt: number;
  readonly end: number;
}

/** Finds the members of a valid object by counting brackets outside strings; shares nothing with the scanner. */
function slowMembers(text: string): readonly SlowMember[] {
  const members: SlowMember[] = [];
  let at = text.indexOf('{') + 1;
  const blank = (): void => {
    while (' \t\r\n'.includes(text[at] ?? '!')) at++;
  };
  const closing = (from: number): number => {
    let depth = 0;
    for (const token of text.slice(from).matchAll(/"(?:[^"\\]|\\.)*"|[[\]{},:]/g)) {
      if (depth === 0 && ',:}'.includes(token[0])) return text.slice(0, from + token.index).trimEnd().length;
      if ('[{'.includes(token[0])) depth++;
      if (']}'.includes(token[0])) depth--;
    }
    throw new Error('no value');
  };
  blank();
  while (text[at] === '"') {
    const keyAt = at;
    at = closing(at);
    const key: unknown = JSON.parse(text.slice(keyAt, at));
    blank();
    at++;
    blank();
    const valueAt = at;
    at = closing(at);
    members.push({ key: String(key), keyAt, valueAt, end: at });
    blank();
    if (text[at] === ',') at++;
    blank();
  }
  return members;
}

/** Removes the n-th member by the text around it. */
function slowRemove(text: string, n: number): string {
  const members = slowMembers(text);
  const member = members[n]!;
  const previous = members[n - 1];
  const next = members[n + 1];
  if (previous !== undefined) return text.slice(0, previous.end) + text.slice(member.end);
  return text.slice(0, member.keyAt) + text.slice(next === undefined ? member.end : next.keyAt);
}

/** One edit at a time, with a new parse after each. */
function slowSplice(text: string, set: ReadonlyMap<string, string>, drop: ReadonlySet<string>): string {
  let out = text;
  const indexOf = (wanted: (key: string) => boolean): number => slowMembers(out).findIndex((m) => wanted(m.key));
  for (let n = indexOf((k) => drop.has(k) && !set.has(k)); n >= 0; n = indexOf((k) => drop.has(k) && !set.has(k))) {
    out = slowRemove(out, n);
  }
  for (const [key, value] of set) {
    while (slowMembers(out).filter((m) => m.key === key).length > 1)
      out = slowRemove(
        out,
        indexOf((k) => k === key),
      );
    const member = slowMembers(out).find((m) => m.key === key);
    if (member !== undefined) out = out.slice(0, member.valueAt) + value + out.slice(member.end);
  }
  for (const [key, value] of set) {
    const members = slowMembers(out);
    if (members.some((m) => m.key === key)) continue;
    const last = members.at(-1)?.end;
    // With nothing left, where the first member stood.
    const at = last ?? slowMembers(text)[0]?.keyAt ?? out.indexOf('{') + 1;
    out = `${out.slice(0, at)}${last === undefined ? '' : ','}${JSON.stringify(key)}:${value}${out.slice(at)}`;
  }
  return out;
}

describe('scanObject', () => {
  test.each([
    '',
    ' \n',
    '{',
    '}',
    '{"a"}',
    '{"a":}',
    '{"a":1,}',
    '{,"a":1}',
    '{"a":1 "b":2}',
    '{a:1}',
    "{'a':1}",
    '{"a":1}}',
    '{"a":1} x',
    '\ufeff{}',
    '{"a":NaN}',
    '{"a":Infinity}',
    '{"a":-Infinity}',
    '{"a":01}',
    '{"a":-}',
    '{"a":+1}',
    '{"a":.5}',
    '{"a":1.}',
    '{"a":1.e3}',
    '{"a":1e}',
    '{"a":1e+}',
    '{"a":0x10}',
    '{"a":tru}',
    '{"a":nul',
    '{"a":True}',
    '{"a":"\t"}',
    '{"a":"\u0000"}',
    '{"a":"\\x"}',
    '{"a":"\\u12g4"}',
    '{"a":"\\u12"}',
    '{"a":"b',
    '{"a":"b\\',
    '{"a":"b\\"}',
    '{"a\n":1}',
    '{"a":[1,]}',
    '{"a":[1}',
    '{"a":{"b":1]}',
    '{"a":[1 2]}',
    '{"a":/*c*/1}',
    '[1',
    '{}{}',
    '{"a":1}\u00a0',
    '{"a":1}\f',
    'nulll',
    '-',
  ])('refuses %j', (text) => {
    expect(scanObject(utf8(text)).kind).toBe('invalid');
    expect(parses(text)).toBe(false);
  });

  test('names the empty body and the offset of the first wrong byte', () => {
    expect(scanObject(new Uint8Array(0))).toMatchObject({ kind: 'invalid', message: 'empty' });
    expect(scanObject(utf8(' \r\n\t'))).toMatchObject({ kind: 'invalid', message: 'empty' });
    expect(scanObject(utf8('{"a":tRue}'))).toMatchObject({
      kind: 'invalid',
      offset: 6,
      message: "unexpected character 'R' at offset 6",
    });
    expect(scanObject(utf8('{"a":1,"b\\x":2}'))).toMatchObject({ offset: 10 });
    expect(scanObject(utf8('{"a":'))).toMatchObject({ kind: 'invalid', offset: 5 });
    expect(scanObject(utf8('{"a":"\u0001"}'))).toMatchObject({ offset: 6, message: expect.stringContaining('0x01') });
  });

  test('refuses every control character in a string and takes every other character', () => {
    for (let c = 0; c < 0x100; c++) {
      const ch = String.fromCharCode(c);
      const text = ch === '"' || ch === '\\' ? `\\${ch}` : ch;
      expect(scanObject(utf8(`{"${text}":"${text}"}`)).kind, `0x${c.toString(16)}`).toBe(
        c < 0x20 ? 'invalid' : 'object',
      );
    }
  });

  test.each([
    ['[1,{"a":2}]', 'array'],
    [' "x" ', 'string'],
    ['-0.5e+3', 'number'],
    ['true', 'true'],
    ['false', 'false'],
    [' null', 'null'],
  ])('tells that %j is no object', (text, type) => {
    expect(scanObject(utf8(text))).toEqual({ kind: 'not-object', type });
  });

  test('lists members with types, decoded keys and exact offsets', () => {
    const text = ' { "a" : 1.50 ,"\\u0062":[ ], "c":{"d":"}"},"é":"\\"" ,"t":true,"f":false,"n":null } ';
    const bytes = utf8(text);
    const scan = scanned(bytes);
    expect(textOf(bytes.subarray(scan.start, scan.end))).toBe(text.trim());
    expect(
      scan.members.map((m) => [
        m.key,
        textOf(bytes.subarray(m.keyStart, m.keyEnd)),
        textOf(bytes.subarray(m.valueStart, m.valueEnd)),
        m.type,
      ]),
    ).toEqual([
      ['a', '"a"', '1.50', 'number'],
      ['b', '"\\u0062"', '[ ]', 'array'],
      ['c', '"c"', '{"d":"}"}', 'object'],
      ['é', '"é"', '"\\""', 'string'],
      ['t', '"t"', 'true', 'true'],
      ['f', '"f"', 'false', 'false'],
      ['n', '"n"', 'null', 'null'],
    ]);
  });

  test('never reads beyond its range', () => {
    const bytes = utf8('xx{"a":12345,"b":"text"}yy');
    const full = scanObject(bytes, 2, 24) as ScannedObject;
    expect(full).toMatchObject({ kind: 'object', start: 2, end: 24 });
    expect(full.members[0]).toMatchObject({ keyStart: 3, valueStart: 7, valueEnd: 12 });
    for (let end = 3; end < 24; end++) expect(scanObject(bytes, 2, end).kind).toBe('invalid');
    expect(scanObject(bytes, 7, 10)).toEqual({ kind: 'not-object', type: 'number' });
    expect(scanObject(bytes, 0, 24).kind).toBe('invalid');
    expect(scanObject(utf8('{}'), 0, 99)).toMatchObject({ kind: 'object', end: 2 });
  });

  test.each([
    ['[', ']'],
    ['{"a":', '}'],
    ['[{"a":', '}]'],
  ])('takes any depth of %j', (open, close) => {
    const depth = 300_000;
    const text = `{"deep":${open.repeat(depth)}1${close.repeat(depth)},"after":2}`;
    expect(scanned(utf8(text)).members.map((m) => m.key)).toEqual(['deep', 'after']);
    expect(scanObject(utf8(`{"deep":${open.repeat(depth)}`)).kind).toBe('invalid');
    const wrong = open.endsWith('[') ? '}' : ']';
    expect(scanObject(utf8(`${open.repeat(70)}1${close.repeat(69)}${wrong}`)).kind).toBe('invalid');
  });

  test('accepts exactly what JSON.parse accepts, also after one damaged place', () => {
    const damage = fc.tuple(
      fc.nat(),
      fc.constantFrom('', '"', '\\', ',', ':', '{', '}', '[', ']', '0', '-', 'e', '\n', 'u'),
    );
    const run = (text: string): void => {
      const scan: ObjectScan = scanObject(utf8(text));
      expect(scan.kind !== 'invalid').toBe(parses(text));
      if (scan.kind === 'invalid') expect(scan.offset).toBeLessThanOrEqual(utf8(text).length);
    };
    fc.assert(
      fc.property(objectText(KEYS), damage, fc.nat(2), (text, [where, put], cut) => {
        run(text);
        const at = where % (text.length + 1);
        const damaged = text.slice(0, at) + put + text.slice(at + cut);
        if (damaged.isWellFormed()) run(damaged);
      }),
      { numRuns: 1500 },
    );
  });

  test('finds the members a slow parse finds', () => {
    fc.assert(
      fc.property(objectText(KEYS), (text) => {
        const bytes = utf8(text);
        const found = scanned(bytes).members.map((m) => [m.key, textOf(bytes.subarray(m.valueStart, m.valueEnd))]);
        expect(found).toEqual(slowMembers(text).map((m) => [m.key, text.slice(m.valueAt, m.end)]));
      }),
      { numRuns: 300 },
    );
  });
});

describe('scanArray', () => {
  test('lists elements and refuses all but one valid array', () => {
    const bytes = utf8(' [ 1 ,"]",[2],{} ] ');
    const found = scanArray(bytes, 0, bytes.length);
    expect(found?.map((e) => [textOf(bytes.subarray(e.valueStart, e.valueEnd)), e.type])).toEqual([
      ['1', 'number'],
      ['"]"', 'string'],
      ['[2]', 'array'],
      ['{}', 'object'],
    ]);
    expect(scanArray(utf8('[ ]'), 0, 3)).toEqual([]);
    for (const text of ['', '{}', '[', '[1', '[1,', '[1,]', '[,1]', '[1]]', '[] x', '[1 2]', '1', '["a]']) {
      expect(scanArray(utf8(text), 0, utf8(text).length)).toBeUndefined();
    }
  });
});

describe('findMember and decodeString', () => {
  test('the last duplicate wins, however its key is spelled', () => {
    const bytes = utf8('{"a":1,"\\u0061":2,"b":3}');
    const member = findMember(scanned(bytes), 'a');
    expect(member && textOf(bytes.subarray(member.valueStart, member.valueEnd))).toBe('2');
    expect(findMember(scanned(bytes), 'c')).toBeUndefined();
  });

  test('decodes as JSON.parse does', () => {
    fc.assert(
      fc.property(
        fc.oneof(
          stringText,
          fc.string({ maxLength: 120 }).map((s) => JSON.stringify(s)),
        ),
        (text) => {
          const bytes = utf8(text);
          expect(decodeString(bytes, { valueStart: 0, valueEnd: bytes.length })).toBe(JSON.parse(text));
        },
      ),
      { numRuns: 1000 },
    );
  });
});

describe('spliceObject', () => {
  const edit = (text: string, set: Record<string, string>, drop: readonly string[]): string => {
    const bytes = utf8(text);
    return textOf(spliceObject(bytes, scanned(bytes), { set: new Map(Object.entries(set)), drop: new Set(drop) }));
  };

  test.each<[string, Record<string, string>, readonly string[], string]>([
    ['{}', { a: '1' }, [], '{"a":1}'],
    [' { } ', { a: '1', b: '2' }, [], ' {"a":1,"b":2 } '],
    ['{"a":1}', { b: '2' }, [], '{"a":1,"b":2}'],
    ['{"a":1\n}', { b: '2' }, [], '{"a":1,"b":2\n}'],
    ['{"a":1}', {}, ['a'], '{}'],
    ['{ "a":1 }', { b: '2' }, ['a'], '{ "b":2 }'],
    ['{"a":1, "b":2, "c":3}', {}, ['a'], '{"b":2, "c":3}'],
    ['{"a":1, "b":2, "c":3}', {}, ['b'], '{"a":1, "c":3}'],
    ['{"a":1, "b":2, "c":3}', {}, ['c'], '{"a":1, "b":2}'],
    ['{"a":1,"b":2,"a":3}', { a: '9' }, [], '{"b":2,"a":9}'],
    ['{"a":1,"b":2,"a":3}', {}, ['a'], '{"b":2}'],
    ['{"a":1,"\\u0061":2}', { a: 'null' }, [], '{"\\u0061":null}'],
    ['{"a":1,"b":2}', { a: '7' }, ['a', 'b'], '{"a":7}'],
    ['{"x":{"a":1},"a":2}', {}, ['a'], '{"x":{"a":1}}'],
    ['{"a":1.50, "b" : 1e3}', { a: '"é"' }, [], '{"a":"é", "b" : 1e3}'],
    ['{"a":1}', { 'q"\\\ud800': '2' }, [], '{"a":1,"q\\"\\\\\\ud800":2}'],
  ])('%j set %j drop %j', (text, set, drop, expected) => {
    expect(edit(text, set, drop)).toBe(expected);
  });

  test('gives the same reference where nothing applies', () => {
    const bytes = utf8('{"a":1,"a":2}');
    const same = spliceObject(bytes, scanned(bytes), { set: new Map(), drop: new Set(['b']) });
    expect(same).toBe(bytes);
  });

  test('takes bytes as a value and keeps bytes around the object', () => {
    const bytes = utf8('data: {"a":1} tail');
    const scan = scanObject(bytes, 6, 13) as ScannedObject;
    const out = spliceObject(bytes, scan, { set: new Map([['a', utf8('[1, 2]')]]), drop: new Set() });
    expect(textOf(out)).toBe('data: {"a":[1, 2]} tail');
  });

  test('does what a slow splice on the text does', () => {
    const names = ['model', 'stream', 'a', 'b', '', 'new', 'x/y', '\ud800'];
    fc.assert(
      fc.property(
        objectText(KEYS),
        fc.dictionary(fc.constantFrom(...names), valueText, { maxKeys: 3 }),
        fc.uniqueArray(fc.constantFrom(...names), { maxLength: 4 }),
        (text, set, drop) => {
          const out = edit(text, set, drop);
          expect(out).toBe(slowSplice(text, new Map(Object.entries(set)), new Set(drop)));
          expect(parses(out)).toBe(true);
        },
      ),
      { numRuns: 1200 },
    );
  });

  test('keeps every token of the members it does not name', () => {
    fc.assert(
      fc.property(objectText(KEYS), (text) => {
        const kept = slowMembers(text).filter((m) => m.key !== 'a' && m.key !== 'stream');
        const members = kept.map((m) => withoutSpace(text.slice(m.keyAt, m.end)));
        expect(withoutSpace(edit(text, { stream: '0' }, ['a'])).replace(/"stream":0/, '')).toSatisfy((out: string) =>
          members.every((member) => out.includes(member)),
        );
      }),
      { numRuns: 200 },
    );
  });
});
