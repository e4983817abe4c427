import type { BatonError } from './errors.ts';

/** The one error shape clients see, `{"error": {...}}`. */
export interface OpenAiError {
  readonly message: string;
  readonly type: string;
  readonly param: string | null;
  /** A string of baton's own, or what the engine wrote (vLLM: the HTTP status as a number). */
  readonly code: string | number | null;
}

/** JSON text of the envelope. */
export function errorEnvelope(error: OpenAiError): string {
  const { message, type, param, code } = error;
  return JSON.stringify({ error: { message, type, param, code } });
}

/** The same envelope as an in-stream event; a stream that fails late ends with it and `[DONE]`. */
export function errorEvent(error: OpenAiError): string {
  return `data: ${errorEnvelope(error)}\n\n`;
}

/** Last event of every OpenAI stream. */
export const DONE_EVENT = 'data: [DONE]\n\n';

/** What a client is told of one of baton's own errors. */
export function describeBatonError(error: BatonError): OpenAiError {
  return { message: error.message, type: error.type, param: error.param, code: error.reason.toLowerCase() };
}

const MAX_MESSAGE = 2000;

/**
 * Reads an engine's error reply: status, message and code stay the engine's, addresses and paths are masked.
 * `body` is undefined or junk for engines that say nothing: then the text is baton's own.
 */
export function readEngineError(status: number, body: string | undefined): OpenAiError {
  const parsed = parseError(body);
  const message = parsed?.message ?? `The engine answered with status ${status}.`;
  return {
    message: maskAddresses(message.slice(0, MAX_MESSAGE)),
    type: parsed?.type ?? (status < 500 ? 'invalid_request_error' : 'upstream_error'),
    param: parsed?.param ?? null,
    code: parsed?.code ?? status,
  };
}

interface ParsedError {
  readonly message: string;
  readonly type?: string;
  readonly param?: string | null;
  readonly code?: string | number;
}

/** vLLM writes {"error":{…}}, {"error":"Unauthorized"} and {"detail":"Not Found"}; older ones {"object":"error",…}. */
function parseError(body: string | undefined): ParsedError | undefined {
  if (body === undefined || body.trim() === '') return undefined;
  let value: unknown;
  try {
    value = JSON.parse(body);
  } catch {
    const text = body.trim();
    // An HTML page is some proxy's, and tells the client nothing it can use.
    return text.startsWith('<') ? undefined : { message: text };
  }
  if (!isRecord(value)) return undefined;
  const error = value['error'] ?? value;
  if (typeof error === 'string') return { message: error };
  if (!isRecord(error)) return undefined;
  const message = error['message'] ?? error['detail'];
  if (message === undefined || message === null) return undefined;
  const { type, param, code } = error;
  return {
    message: typeof message === 'string' ? message : JSON.stringify(message),
    ...(typeof type === 'string' ? { type } : {}),
    ...(typeof param === 'string' || param === null ? { param } : {}),
    ...(typeof code === 'string' || typeof code === 'number' ? { code } : {}),
  };
}

function isRecord(value: unknown): value is Readonly<Record<string, unknown>> {
  return typeof value === 'object' && value !== null && !Array.isArray(value);
}

const MASKS: readonly (readonly [RegExp, string])[] = [
  [/\b[a-z][a-z0-9+.-]*:\/\/[^\s"'`<>)\]}]+/gi, '[url]'],
  [/\b\d{1,3}(?:\.\d{1,3}){3}(?::\d{1,5})?\b/g, '[address]'],
  [/\[[0-9a-f:]*:[0-9a-f:.]*\](?::\d{1,5})?/gi, '[address]'],
  [/\b(?:localhost|(?:[a-z0-9_-]+\.)+[a-z][a-z0-9-]*):\d{2,5}\b/gi, '[address]'],
  // A file path has at least two segments; API routes (/v1/…) and names like org/model stay readable.
  [/(?<![\w.\]/-])\/(?!v\d+\/)[\w.@+-]+(?:\/[\w.@+-]+)+/g, '[path]'],
];

/** Replaces URLs, host:port pairs and file paths, which would tell a client about the pool's inside. */
export function maskAddresses(text: string): string {
  return MASKS.reduce((masked, [pattern, by]) => masked.replace(pattern, by), text);
}
