import { didYouMean } from './suggest.ts';

/** The result of reading one setting: its value, or what to write instead. */
export type Parsed<T> = { readonly kind: 'ok'; readonly value: T } | { readonly kind: 'bad'; readonly message: string };

/** Reads one setting from YAML (any type) or from a flag or variable (text). */
export type ValueParser<T> = (raw: unknown) => Parsed<T>;

/** A listening port: 0 takes any free one, `off` opens no listener. */
export type ListenPort = number | 'off';

/** Wraps a value that was read. */
export function ok<T>(value: T): Parsed<T> {
  return { kind: 'ok', value };
}

/** Wraps the reason why a value was not taken. */
export function bad<T>(message: string): Parsed<T> {
  return { kind: 'bad', message };
}

/** Reads a text that is not blank. */
export const parseText: ValueParser<string> = (raw) =>
  typeof raw === 'string' && raw.trim() !== '' ? ok(raw.trim()) : bad(`expected a text, got ${show(raw)}`);

const UNIT_MS: Readonly<Record<string, number>> = { ms: 1, s: 1000, m: 60_000, h: 3_600_000 };
// A Node timer with a longer delay fires at once.
const MAX_TIMER_MS = 2_147_483_647;

/** Reads `30s`, `500ms`, `1m30s` or a number of seconds into whole milliseconds; 0 means off, at most 24 days. */
export function parseDuration(raw: unknown): Parsed<number> {
  const ms = durationMs(raw);
  if (ms === undefined) return bad(`expected a duration like "3s", "500ms" or 0 for off, got ${show(raw)}`);
  if (ms > MAX_TIMER_MS) return bad(`expected at most 24 days or 0 for off, got ${show(raw)}`);
  return ok(ms > 0 ? Math.max(1, Math.round(ms)) : 0);
}

function durationMs(raw: unknown): number | undefined {
  if (typeof raw === 'number') return Number.isFinite(raw) && raw >= 0 ? raw * 1000 : undefined;
  if (typeof raw !== 'string') return undefined;
  const text = raw.trim();
  if (/^\d+(\.\d+)?$/.test(text)) return Number(text) * 1000;
  if (!/^(\d+(\.\d+)?\s*(ms|s|m|h)\s*)+$/.test(text)) return undefined;
  let total = 0;
  for (const part of text.matchAll(/(\d+(?:\.\d+)?)\s*(ms|s|m|h)/g))
    total += Number(part[1]) * (UNIT_MS[part[2] ?? ''] ?? 0);
  return total;
}

const UNIT_BYTES: Readonly<Record<string, number>> = {
  '': 1,
  b: 1,
  kb: 1e3,
  mb: 1e6,
  gb: 1e9,
  ki: 2 ** 10,
  kib: 2 ** 10,
  mi: 2 ** 20,
  mib: 2 ** 20,
  gi: 2 ** 30,
  gib: 2 ** 30,
};

/** Reads `64MiB`, `10MB` or a number of bytes into whole bytes, at least 1. */
export function parseSize(raw: unknown): Parsed<number> {
  const match =
    typeof raw === 'string' || typeof raw === 'number'
      ? /^(\d+(?:\.\d+)?)\s*([a-z]*)$/i.exec(String(raw).trim())
      : null;
  const unit = UNIT_BYTES[(match?.[2] ?? '').toLowerCase()];
  if (match === null || unit === undefined)
    return bad(`expected a size like "64MiB" or a number of bytes, got ${show(raw)}`);
  const bytes = Math.round(Number(match[1]) * unit);
  if (bytes < 1 || !Number.isSafeInteger(bytes)) return bad(`expected a size of at least 1 byte, got ${show(raw)}`);
  return ok(bytes);
}

/** Most of what is counted in settings. */
export const MAX_COUNT = 1_000_000_000;

/** Makes a parser for a whole number in a range. */
export function countParser(min: number, max: number): ValueParser<number> {
  return (raw) => {
    const value = wholeNumber(raw);
    if (value === undefined || value < min || value > max)
      return bad(`expected a whole number from ${min} to ${max}, got ${show(raw)}`);
    return ok(value);
  };
}

/** Makes a parser for a decimal number in a range. */
export function numberParser(min: number, max: number): ValueParser<number> {
  return (raw) => {
    const text = typeof raw === 'string' ? raw.trim() : '';
    const value = typeof raw === 'number' ? raw : /^\d{1,15}(\.\d{1,15})?$/.test(text) ? Number(text) : Number.NaN;
    return value >= min && value <= max ? ok(value) : bad(`expected a number from ${min} to ${max}, got ${show(raw)}`);
  };
}

/** Reads a port to connect to, 1 to 65535. */
export function parsePort(raw: unknown): Parsed<number> {
  const port = wholeNumber(raw);
  return port !== undefined && port >= 1 && port <= 65_535
    ? ok(port)
    : bad(`expected a port from 1 to 65535, got ${show(raw)}`);
}

/** Reads a port to listen on: 0 to 65535, or `off`. */
export function parseListenPort(raw: unknown): Parsed<ListenPort> {
  if (typeof raw === 'string' && raw.trim().toLowerCase() === 'off') return ok('off');
  const port = wholeNumber(raw);
  if (port !== undefined && port >= 0 && port <= 65_535) return ok(port);
  return bad(`expected a port from 0 to 65535 (0 takes any free port) or "off", got ${show(raw)}`);
}

function wholeNumber(raw: unknown): number | undefined {
  if (typeof raw === 'number') return Number.isSafeInteger(raw) ? raw : undefined;
  return typeof raw === 'string' && /^\d{1,15}$/.test(raw.trim()) ? Number(raw.trim()) : undefined;
}

/** Reads an address to listen on, without brackets around IPv6. */
export function parseListenHost(raw: unknown): Parsed<string> {
  const host = typeof raw === 'string' ? raw.trim().replace(/^\[(.*)\]$/, '$1') : '';
  if (/^[A-Za-z0-9._-]+$/.test(host) || /^[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%[A-Za-z0-9._-]+)?$/.test(host)) {
    // "host:port" has exactly one colon, an IPv6 address at least two.
    if (host.split(':').length !== 2) return ok(host);
  }
  return bad(`expected an address to listen on like "127.0.0.1" or "::", without scheme or port, got ${show(raw)}`);
}

/** Reads true/false, and for variables 1/0, yes/no, on/off. */
export function parseBoolean(raw: unknown): Parsed<boolean> {
  if (typeof raw === 'boolean') return ok(raw);
  const word = typeof raw === 'string' ? raw.trim().toLowerCase() : '';
  if (['true', '1', 'yes', 'on'].includes(word)) return ok(true);
  if (['false', '0', 'no', 'off'].includes(word)) return ok(false);
  return bad(`expected true or false, got ${show(raw)}`);
}

/** Makes a parser for one word of a closed list, in any case. */
export function choiceParser<const T extends string>(choices: readonly T[]): ValueParser<T> {
  return (raw) => {
    const word = typeof raw === 'string' ? raw.trim() : show(raw);
    const match = choices.find((choice) => choice === word.toLowerCase());
    return match === undefined ? bad(unknownName(word, choices)) : ok(match);
  };
}

/** Says that a word is not in a list, with the list and the nearest member. */
export function unknownName(word: string, known: readonly string[]): string {
  return `expected one of ${known.join(', ')}, got "${word}"${didYouMean(word, known)}`;
}

/** Makes a parser for a YAML list or a comma- or space-separated text, each item read by `item`; an empty list is allowed. */
export function listParser<T>(item: ValueParser<T>): ValueParser<readonly T[]> {
  return (raw) => {
    const parts: readonly unknown[] = Array.isArray(raw)
      ? raw.flatMap(splitItem)
      : typeof raw === 'string'
        ? splitItem(raw)
        : [raw];
    const values: T[] = [];
    for (const part of parts) {
      const parsed = item(part);
      if (parsed.kind === 'bad') return parsed;
      values.push(parsed.value);
    }
    return ok(values);
  };
}

function splitItem(raw: unknown): readonly unknown[] {
  return typeof raw === 'string' ? raw.split(/[\s,]+/).filter((part) => part !== '') : [raw];
}

/** Reads a header name into lower case. */
export function parseHeaderName(raw: unknown): Parsed<string> {
  const name = typeof raw === 'string' ? raw.trim().toLowerCase() : '';
  return /^[!#$%&'*+.^_`|~0-9a-z-]+$/.test(name)
    ? ok(name)
    : bad(`expected a header name like "x-session-id", got ${show(raw)}`);
}

// These frame the message; a fixed value would break every request.
const FRAMING_HEADERS: readonly string[] = [
  'host',
  'content-length',
  'transfer-encoding',
  'connection',
  'upgrade',
  'te',
  'expect',
];

/** Reads a mapping of header names to values that are safe to send. */
export function parseHeaders(raw: unknown): Parsed<Readonly<Record<string, string>>> {
  if (typeof raw !== 'object' || raw === null || Array.isArray(raw))
    return bad('expected a mapping of header names to values');
  const headers: Record<string, string> = {};
  for (const [key, value] of Object.entries(raw)) {
    const name = parseHeaderName(key);
    if (name.kind === 'bad') return name;
    if (FRAMING_HEADERS.includes(name.value)) return bad(`header "${name.value}" is set by baton itself; remove it`);
    const text = headerText(value);
    // The value may be a secret, so it is not shown.
    if (text === undefined) return bad(`header "${name.value}" needs a one-line text value`);
    headers[name.value] = text;
  }
  return ok(headers);
}

/** Reads a key that is sent as `Authorization: Bearer KEY`; messages never show it. */
export function parseSecret(raw: unknown): Parsed<string> {
  const text = headerText(raw)?.trim();
  return text !== undefined && /^\S+$/.test(text) ? ok(text) : bad('expected a key without white space');
}

function headerText(raw: unknown): string | undefined {
  if (typeof raw !== 'string' && typeof raw !== 'number') return undefined;
  const text = String(raw);
  return /^[\t\x20-\x7e\x80-\xff]*$/.test(text) ? text : undefined;
}

/** An address with the number of its bits that count. */
export interface Network {
  readonly address: string;
  readonly bits: number;
  readonly family: 'ipv4' | 'ipv6';
}

/** Reads an address, `10.0.0.7` or `fd00::7`, or a network, `10.0.0.0/8` or `fd00::/8`. */
export function parseNetwork(raw: unknown): Parsed<Network> {
  const [, address = '', length] =
    /^([0-9a-f:.]+)(?:\/(\d{1,3}))?$/i.exec(typeof raw === 'string' ? raw.trim() : '') ?? [];
  const isV4 = /^\d{1,3}(\.\d{1,3}){3}$/.test(address) && address.split('.').every((part) => Number(part) <= 255);
  const isV6 = address.includes(':') && URL.canParse(`http://[${address}]`);
  const bits = Number(length ?? (isV4 ? 32 : 128));
  if ((isV4 && bits <= 32) || (isV6 && bits <= 128)) return ok({ address, bits, family: isV4 ? 'ipv4' : 'ipv6' });
  return bad(`expected an address or a network like "10.0.0.7" or "10.0.0.0/8", got ${show(raw)}`);
}

/** Reads a mapping of label names to short texts. */
export function parseLabels(raw: unknown): Parsed<Readonly<Record<string, string>>> {
  if (typeof raw !== 'object' || raw === null || Array.isArray(raw))
    return bad('expected a mapping of label names to values');
  const labels: Record<string, string> = {};
  for (const [key, value] of Object.entries(raw)) {
    if (typeof value !== 'string' && typeof value !== 'number' && typeof value !== 'boolean')
      return bad(`label "${key}" needs a text value`);
    labels[key] = String(value);
  }
  return ok(labels);
}

/** Shows a refused value in a message, shortened. */
export function show(raw: unknown): string {
  if (raw === undefined) return 'nothing';
  const text = JSON.stringify(raw) ?? String(raw);
  return text.length > 60 ? `${text.slice(0, 57)}...` : text;
}
