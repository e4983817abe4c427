/**
 * Headers of one connection, or that baton sets itself, or by which sidecars of engines (llm-d's) are told where to send a
 * request; the rest of a client's headers reaches both legs.
 */
const DROPPED = new Set([
  'accept-encoding',
  'authorization',
  'connection',
  'content-encoding',
  'content-length',
  'content-type',
  'cookie',
  'expect',
  'host',
  'keep-alive',
  'proxy-authenticate',
  'proxy-authorization',
  'proxy-connection',
  'te',
  'trailer',
  'transfer-encoding',
  'upgrade',
  'x-baton-debug',
  'x-data-parallel-host-port',
  'x-decoder-host-port',
  'x-encoder-hosts-ports',
  'x-gateway-destination-endpoint',
  'x-gateway-destination-endpoint-subset',
  'x-prefiller-host-port',
  'x-prefiller-url',
  'x-request-id',
]);

/** What proxies say of whom they speak for; from anybody else it would be a lie that engines and their logs believe. */
const OF_PROXIES = /^(?:forwarded|via|x-forwarded(?:-.*)?|x-real-ip|x-client-ip|true-client-ip)$/;

/** Whether a header counts from trusted proxies alone. */
export function isOfProxies(name: string): boolean {
  return OF_PROXIES.test(name);
}

/** A client's headers as both legs get them: without hop-by-hop ones, those named in Connection, and baton's own. */
export function forwardedHeaders(
  headers: Readonly<Record<string, string | readonly string[] | undefined>>,
): Record<string, string> {
  const connection = headers['connection'];
  const named = new Set(
    String(connection ?? '')
      .split(',')
      .map((name) => name.trim().toLowerCase()),
  );
  const kept: Record<string, string> = {};
  for (const [name, value] of Object.entries(headers)) {
    if (value === undefined || DROPPED.has(name) || named.has(name)) continue;
    kept[name] = typeof value === 'string' ? value : value.join(', ');
  }
  return kept;
}

/** Names the facades that a request came through, the last at the end, so that each knows its own requests again. */
export const THROUGH = 'x-baton-through';

/** The value of {@link THROUGH} from here on; undefined where the request has been through `own` before. */
export function throughNext(before: string | readonly string[] | undefined, own: string): string | undefined {
  const names = (before === undefined ? [] : [before].flat())
    .flatMap((value) => value.split(','))
    .map((name) => name.trim());
  return names.includes(own) ? undefined : [...names, own].join(', ');
}

const REQUEST_ID = /^[A-Za-z0-9._:-]{1,128}$/;

/** The client's own request id where it is fit for logs and for engines' ids; else undefined. */
export function acceptedRequestId(value: string | readonly string[] | undefined): string | undefined {
  return typeof value === 'string' && REQUEST_ID.test(value) ? value : undefined;
}
