import { readdirSync, readFileSync } from 'node:fs';
import fc from 'fast-check';
import { describe, expect, test } from 'vitest';
import { dataLines, eventData, SseSplitter } from '../../src/core/sse.ts';
import { textOf, utf8 } from './json-text.ts';

const SAMPLES = new URL('../fixtures/engine-samples/', import.meta.url);

function split(chunks: readonly Uint8Array[]): { readonly events: readonly string[]; readonly rest: string } {
  const splitter = new SseSplitter();
  const events = chunks.flatMap((chunk) => splitter.push(chunk)).map(latin1);
  const rest = latin1(splitter.rest());
  expect(splitter.pendingBytes).toBe(rest.length);
  return { events, rest };
}

// One character a byte, so that texts cut inside a UTF-8 character compare too.
function latin1(bytes: Uint8Array): string {
  return Array.from(bytes, (c) => String.fromCharCode(c)).join('');
}

/** The whole events at the start of a stream, by one regular expression over all of it. */
function slowEvents(stream: string): readonly string[] {
  return stream.match(/(?:[^\r\n]+(?:\r\n|\r(?!\n)|\n))*(?:\r\n|\r(?!\n)|\n)/gy) ?? [];
}

/** An event that consists of one line end says nothing; where CR and LF arrive apart there may be one more of them. */
function speaking(events: readonly string[]): readonly string[] {
  return events.map((event) => event.replaceAll(/^[\r\n]+|[\r\n]+$/g, '')).filter((event) => event !== '');
}

function cut(bytes: Uint8Array, places: readonly number[]): readonly Uint8Array[] {
  const sorted = [0, ...places.map((p) => p % (bytes.length + 1)), bytes.length].toSorted((a, b) => a - b);
  return sorted.slice(1).map((to, i) => bytes.subarray(sorted[i], to));
}

const lineEnd = fc.constantFrom('\n', '\r\n', '\r');
const line = fc.oneof(
  fc.constantFrom(
    '',
    '',
    ': ping',
    'data',
    'data:',
    'data: ',
    'data:x',
    'data: [DONE]',
    'id: 7',
    'event: error',
    'é😀',
  ),
  fc.string({ maxLength: 12 }).map((s) => `data: ${s.replaceAll(/[\r\n]/g, '')}`),
);
const stream = fc
  .array(fc.tuple(line, lineEnd), { maxLength: 24 })
  .chain((lines) => fc.tuple(fc.constant(lines.flat().join('')), fc.constantFrom('', 'data: cut', 'data: x\r')))
  .map((parts) => parts.join(''));

describe('SseSplitter', () => {
  test('hands out LF, CRLF, CR and mixed events and keeps the rest', () => {
    const text = 'data: a\n\ndata: b\r\n\r\ndata: c\r\rdata: d\r\n\n: hi\n\n\n\r\n\rdata: tail\n';
    expect(split([utf8(text)])).toEqual({
      events: ['data: a\n\n', 'data: b\r\n\r\n', 'data: c\r\r', 'data: d\r\n\n', ': hi\n\n', '\n', '\r\n', '\r'],
      rest: 'data: tail\n',
    });
  });

  test('does not wait for an LF behind the CR that ends an event, and passes a late one on at once', () => {
    const splitter = new SseSplitter();
    expect(splitter.push(utf8('data: a\r\n\r')).map(latin1)).toEqual(['data: a\r\n\r']);
    expect(splitter.pendingBytes).toBe(0);
    expect(splitter.push(utf8('\n')).map(latin1)).toEqual(['\n']);
    expect(splitter.push(utf8('data: b\r')).map(latin1)).toEqual([]);
    expect(splitter.push(utf8('\n\r')).map(latin1)).toEqual(['data: b\r\n\r']);
    expect(splitter.push(utf8('\ndata: c\n\n')).map(latin1)).toEqual(['\n', 'data: c\n\n']);
    expect(splitter.push(utf8('data: d\r')).map(latin1)).toEqual([]);
    expect(splitter.push(new Uint8Array(0))).toEqual([]);
    expect(splitter.push(utf8('\r')).map(latin1)).toEqual(['data: d\r\r']);
  });

  test('any split gives the same bytes and the same events as soon as they are complete', () => {
    fc.assert(
      fc.property(stream, fc.array(fc.nat(), { maxLength: 8 }), (text, places) => {
        const bytes = utf8(text);
        const whole = slowEvents(latin1(bytes));
        const once = split([bytes]);
        expect(once.events).toEqual(whole);
        expect(once.events.join('') + once.rest).toBe(latin1(bytes));
        const parts = split(cut(bytes, places));
        expect(parts.events.join('') + parts.rest).toBe(latin1(bytes));
        expect(speaking(parts.events)).toEqual(speaking(whole));

        const splitter = new SseSplitter();
        const given: string[] = [];
        for (let i = 0; i < bytes.length; i++) {
          given.push(...splitter.push(bytes.subarray(i, i + 1)).map(latin1));
          expect(speaking(given)).toEqual(speaking(slowEvents(latin1(bytes.subarray(0, i + 1)))));
          expect(given.join('').length + splitter.pendingBytes).toBe(i + 1);
        }
      }),
      { numRuns: 150 },
    );
  });

  test.each(readdirSync(SAMPLES).filter((name) => name.endsWith('.sse')))('%s, cut at every byte', (name) => {
    const raw = readFileSync(new URL(name, SAMPLES));
    // Every third place for CRLF, which meets both sides of a CR in one blank line or another.
    const forms = [[new Uint8Array(raw), 1] as const, [utf8(textOf(raw).replaceAll('\n', '\r\n')), 3] as const];
    for (const [bytes, step] of forms) {
      const whole = split([bytes]);
      const sizes = whole.events.map((event) => event.length);
      const payloads = whole.events.map((event) => event.trim());
      for (let at = 0; at <= bytes.length; at += step) {
        const splitter = new SseSplitter();
        const events = [bytes.subarray(0, at), bytes.subarray(at)].flatMap((chunk) => splitter.push(chunk));
        if (!Buffer.concat([...events, splitter.rest()]).equals(bytes)) expect.fail(`bytes differ, cut at ${at}`);
        // The same sizes in the same order are the same events; only the others are looked at.
        if (events.length === sizes.length && events.every((event, i) => event.length === sizes[i])) continue;
        expect(events.map((event) => textOf(event).trim()).filter((event) => event !== '')).toEqual(payloads);
      }
    }
  });

  test('an event inside one chunk is a view, and a chunk that is only pending is not copied', () => {
    const chunk = utf8('data: a\n\ndata: b\n\ndata: c');
    const splitter = new SseSplitter();
    for (const event of splitter.push(chunk)) expect(event.buffer).toBe(chunk.buffer);
    expect(splitter.rest().buffer).toBe(chunk.buffer);
    expect(textOf(splitter.rest())).toBe('data: c');
  });

  test('a long event in one-byte chunks is joined once, not at every chunk', () => {
    const splitter = new SseSplitter();
    const byte = utf8('x');
    for (let i = 0; i < 300_000; i++) splitter.push(byte);
    expect(splitter.push(utf8('\n\n'))[0]?.length).toBe(300_002);
  });
});

describe('eventData', () => {
  test.each<[string, string | undefined, number]>([
    ['data: x\n\n', 'x', 1],
    ['data:x\n\n', 'x', 1],
    ['data:  x \r\n\r\n', ' x ', 1],
    ['data\n\n', '', 1],
    ['data:\n\n', '', 1],
    ['data: a\ndata:b\r\ndata\rdata: \n\n', 'a\nb\n\n', 4],
    ['event: error\nid: 1\ndata: x\n: c\n\n', 'x', 1],
    ['\ufeffdata: x\n\n', 'x', 1],
    ['\ndata: x\n\n', 'x', 1],
    ['data: no line end', 'no line end', 1],
    [': comment\n\n', undefined, 0],
    ['database: x\n\n', undefined, 0],
    [' data: x\n\n', undefined, 0],
    ['Data: x\n\n', undefined, 0],
    ['dat', undefined, 0],
    ['data', '', 1],
    ['\n', undefined, 0],
    ['', undefined, 0],
  ])('%j', (event, text, lines) => {
    const data = eventData(utf8(event));
    expect(data && textOf(data.text)).toBe(text);
    expect(data?.lines ?? 0).toBe(lines);
    expect(dataLines(utf8(event)).length).toBe(lines);
  });

  test('offsets point at the payload of a single line and are -1 for several', () => {
    const event = utf8('id: 1\ndata: {"a":1}\n\n');
    const data = eventData(event);
    expect(data && textOf(event.subarray(data.start, data.end))).toBe('{"a":1}');
    expect(data?.text.buffer).toBe(event.buffer);
    expect(eventData(utf8('data: a\ndata: b\n\n'))).toMatchObject({ start: -1, end: -1 });
  });
});
