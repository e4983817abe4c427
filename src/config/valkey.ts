import { field, optional } from './fields.ts';
import { bad, listParser, ok, type Parsed, parseBoolean, parseText, show } from './values.ts';

const SCHEMES = ['redis:', 'rediss:', 'valkey:', 'valkeys:'];

/** Reads the URL of a Redis or Valkey server; it may hold a password, so messages never show it. */
export function parseValkeyUrl(raw: unknown): Parsed<string> {
  const text = typeof raw === 'string' ? raw.trim() : '';
  const sample = '"valkey://10.0.0.1:6379"';
  if (!URL.canParse(text)) return bad(`expected a URL like ${sample}`);
  const url = new URL(text);
  if (!SCHEMES.includes(url.protocol)) {
    return bad(`expected valkey://, valkeys://, redis:// or rediss://, like ${sample}`);
  }
  if (url.hostname === '') return bad(`the URL has no host; expected one like ${sample}`);
  if (!/^\/?\d*$/.test(url.pathname)) return bad('expected the number of a database, like /0, after the host');
  if (url.search !== '' || url.hash !== '') return bad('expected a URL without ? and #; write them as %3F and %23');
  return ok(text);
}

/** Reads `host:port`. */
export function parseHostPort(raw: unknown): Parsed<string> {
  const match = typeof raw === 'string' ? /^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(\d{1,5})$/.exec(raw.trim()) : null;
  const port = Number(match?.[2]);
  return match !== null && port >= 1 && port <= 65_535
    ? ok(match[0])
    : bad(`expected host:port like "10.0.0.1:26379", got ${show(raw)}`);
}

/** Reads what names at the server begin with; braces would break that all of a store's names have one slot. */
export function parsePrefix(raw: unknown): Parsed<string> {
  return typeof raw === 'string' && /^[A-Za-z0-9._:-]{1,64}$/.test(raw)
    ? ok(raw)
    : bad(`expected at most 64 letters, digits and ._:-, got ${show(raw)}`);
}

/** The server of the `valkey` backend. */
export const valkeyKeys = {
  url: optional(
    parseValkeyUrl,
    'none',
    'Server of the `valkey` backend: `valkey://` or `redis://`, with TLS `valkeys://` or `rediss://`, then `[user:password@]host[:port][/db]`.',
  ),
  password_file: optional(parseText, 'none', 'File with the password, instead of one in the URL.'),
  cluster: field(parseBoolean, false, 'Whether the server is a node of a cluster.'),
  sentinels: optional(
    listParser(parseHostPort),
    'none',
    'Sentinels as `host:port`; they tell where the primary is, instead of the host in the URL.',
  ),
  sentinel_name: field(parseText, 'mymaster', 'Name of the primary at the sentinels.'),
  prefix: field(
    parsePrefix,
    'baton',
    'What all names at the server begin with; processes with equal prefixes share one store.',
  ),
  ca: optional(parseText, 'those of Node', 'File with the certificates that a TLS server is checked by.'),
};
