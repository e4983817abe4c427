import type { IncomingHttpHeaders } from 'node:http';

/** No proxy may keep a stream back. */
export const PASSED_ON = { 'cache-control': 'no-cache', 'x-accel-buffering': 'no' } as const;
/** Those of a stream that the engine did not send as one. */
export const STREAM_HEADERS = { 'content-type': 'text/event-stream; charset=utf-8', ...PASSED_ON } as const;

/** Headers that belong to one connection (an engine's cookies too), or that baton sets itself. */
const DROPPED_REPLY_HEADERS = new Set([
  'connection',
  'content-length',
  'date',
  'keep-alive',
  'proxy-authenticate',
  'proxy-connection',
  'server',
  'set-cookie',
  'te',
  'trailer',
  'transfer-encoding',
  'upgrade',
  'x-request-id',
]);

/** The engine's reply headers without those that belong to its connection or to baton. */
export function replyHeaders(headers: IncomingHttpHeaders): Record<string, string> {
  const named = new Set((headers.connection ?? '').split(',').map((name) => name.trim().toLowerCase()));
  const kept: Record<string, string> = {};
  for (const [name, value] of Object.entries(headers)) {
    if (value === undefined || DROPPED_REPLY_HEADERS.has(name) || named.has(name)) continue;
    kept[name] = Array.isArray(value) ? value.join(', ') : value;
  }
  return kept;
}
