import { bad, ok, type Parsed, show } from './values.ts';

/** Where a server is reached. */
export interface ServerUrl {
  /** Lower-case host, no default port, no trailing slash: two spellings of one server are equal. */
  readonly url: string;
  /** `host:port[/prefix]`, the port always written out. */
  readonly id: string;
}

/** Reads `http(s)://host[:port][/prefix]`; the port defaults to the scheme's. Credentials in it are refused and not shown. */
export function parseServerUrl(raw: unknown): Parsed<ServerUrl> {
  const text = typeof raw === 'string' ? raw.trim() : '';
  const scheme = /^([a-z][a-z0-9+.-]*):\/\//i.exec(text)?.[1]?.toLowerCase();
  if (/^[^/]*\/\/[^/]*@/.test(text)) return bad('expected a URL without user and password; give a key by api_key');
  if (scheme === undefined) {
    const guess = parseServerUrl(`http://${text}`);
    return bad(
      guess.kind === 'ok' && !/^\d*$/.test(text)
        ? `${show(raw)} has no scheme; write "${guess.value.url}"`
        : `expected a URL like "http://10.0.0.1:8100", got ${show(raw)}`,
    );
  }
  if (scheme !== 'http' && scheme !== 'https') return bad(`expected http:// or https://, got ${show(raw)}`);
  const authority = text.slice(scheme.length + 3).split('/', 1)[0] ?? '';
  if (!authority.startsWith('[') && authority.split(':').length > 2) {
    return bad(`an IPv6 address in a URL needs brackets, like "http://[::1]:8100", got ${show(raw)}`);
  }
  if (!URL.canParse(text)) return bad(`expected a URL like "http://10.0.0.1:8100", got ${show(raw)}`);
  const url = new URL(text);
  if (url.search !== '' || url.hash !== '' || /[?#]/.test(text))
    return bad(`expected a URL without ? and #, got ${show(raw)}`);
  if (url.port === '0') return bad(`expected a port from 1 to 65535, got ${show(raw)}`);
  const prefix = url.pathname.replace(/\/+$/, '');
  const port = url.port === '' ? (scheme === 'https' ? '443' : '80') : url.port;
  return ok({ url: `${scheme}://${url.host}${prefix}`, id: `${url.hostname}:${port}${prefix}` });
}

/** Reads the URL of another baton process: as {@link parseServerUrl} does, or `unix:/path` of its socket. */
export function parsePeerUrl(raw: unknown): Parsed<ServerUrl> {
  const text = typeof raw === 'string' ? raw.trim() : '';
  if (!/^unix:/i.test(text)) return parseServerUrl(raw);
  const path = /^unix:(?:\/\/)?(\/.*[^/])$/i.exec(text)?.[1];
  if (path === undefined)
    return bad(`expected the absolute path of a socket, like "unix:/run/baton.sock", got ${show(raw)}`);
  return ok({ url: `unix:${path}`, id: path });
}

/** Makes the URL of a host and a port given apart, as by `--prefiller-host` and `--prefiller-port`; IPv6 needs no brackets. */
export function hostPortUrl(host: string, port: number): Parsed<string> {
  const bare = host.replace(/^\[(.*)\]$/, '$1');
  const colons = bare.split(':').length - 1;
  if (host.includes('/')) return bad(`expected a host name or address, got ${show(host)}`);
  if (colons === 1) return bad(`expected a host without a port, got ${show(host)}`);
  const parsed = parseServerUrl(`http://${colons > 1 ? `[${bare}]` : bare}:${port}`);
  return parsed.kind === 'ok' ? ok(parsed.value.url) : bad(`expected a host name or address, got ${show(host)}`);
}

/** Tells whether only this machine reaches a listener on this address. */
export function isLoopback(host: string): boolean {
  return host === 'localhost' || host === '::1' || /^127\.\d+\.\d+\.\d+$/.test(host);
}

/** Reads the address of a key set: `https:`, because by http: somebody else could give his own keys, or this machine's. */
export function parseKeySetUrl(raw: unknown): Parsed<string> {
  const text = typeof raw === 'string' ? raw.trim() : '';
  if (!URL.canParse(text)) return bad('expected a URL like "https://issuer.example/.well-known/jwks.json"');
  const url = new URL(text);
  if (url.username !== '' || url.password !== '') return bad('expected a URL without user and password');
  const isNear = isLoopback(url.hostname.replace(/^\[(.*)\]$/, '$1'));
  if (url.protocol === 'https:' || (url.protocol === 'http:' && isNear)) return ok(text);
  return bad(
    'expected https://, because keys that come by http:// can be those of anybody on the way; or give jwks_file',
  );
}
