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

const MAX_MESSAGE = 2000;

/**
 * Reads an engine's error reply: status, message and code stay the engine's, addresses and paths are masked.
 * `body` is undefined or junk for engines that say nothing: then the text is baton's own.
 */
export function readEngineError(status: number, body: string | undefined): OpenAiError {
  return describeEngineError(status, parseError(body));
}

/**
 * Whether the body of a 404 names nothing that was asked for: a server without the route answers so, and an engine that
 * misses a model does not.
 */
export function saysNoRoute(body: string): boolean {
  const said = parseError(body);
  if (said === undefined || said.message === '') return true;
  const { message, type, param, code } = said;
  const namesModel = type === 'NotFoundError' || param === 'model' || code === 'model_not_found';
  return !namesModel && NO_ROUTE.test(message);
}

/** As web frameworks and gateways say it. */
const NO_ROUTE =
  /^\W*(?:404\W+)?(?:(?:the requested )?(?:page|file|url|resource) |(?:route|path|endpoint)\b.* )?(?:was )?not found(?: on th(?:e|is) server)?\W*$|^no route\b/i;

/** What an engine said of its error; null and absent are the same. */
export interface EngineErrorParts {
  readonly message: string;
  readonly type?: string | null;
  readonly param?: string | null;
  readonly code?: string | number | null;
}

/** An engine's error as a client is told it: text masked and cut, what the engine left out filled in. */
export function describeEngineError(status: number, said: EngineErrorParts | undefined): OpenAiError {
  const message =
    said === undefined || said.message === '' ? `The engine answered with status ${status}.` : said.message;
  return {
    message: maskMessage(message),
    type: said?.type ?? (status < 500 ? 'invalid_request_error' : 'upstream_error'),
    param: said?.param ?? null,
    code: said?.code ?? status,
  };
}

/** vLLM writes {"error":{…}}, {"error":"Unauthorized"} and {"detail":"Not Found"}; older ones {"object":"error",…}. */
function parseError(body: string | undefined): EngineErrorParts | undefined {
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

const GROUP = '[0-9a-f]{1,4}';
const IPV4 = String.raw`\d{1,3}(?:\.\d{1,3}){3}`;
/** Eight groups, or fewer around a `::`: a time, a ratio or a MAC address has neither. */
const IPV6 = `(?:(?:${GROUP}:){6}(?:${GROUP}:${GROUP}|${IPV4})|(?:${GROUP}(?::${GROUP})*)?::(?:(?:${GROUP}:)*(?:${IPV4}|${GROUP}))?)`;
const ZONE = String.raw`(?:%[\w-]+)?`;
const PORT = String.raw`(?::\d{1,5})?`;

const MASKS: readonly (readonly [RegExp, string])[] = [
  [/\b[a-z][a-z0-9+.-]*:\/\/(?:\[[^\]\s]*\])?[^\s"'`<>)\]}]*/gi, '[url]'],
  // [::2] may as well be a slice.
  [new RegExp(String.raw`\[(?!::\d{0,3}\](?!:\d))${IPV6}${ZONE}\](?::\d{1,5})?`, 'gi'), '[address]'],
  // A digit in it: scoped names of code (`std::`, `add::fee`) have none as a rule.
  [
    new RegExp(String.raw`(?<![\w:.[])(?!::\d{0,3}(?![\w:.]))(?=[0-9a-f:.]*\d)${IPV6}${ZONE}(?!\w|:[\w:])`, 'gi'),
    '[address]',
  ],
  [new RegExp(String.raw`\b${IPV4}${PORT}\b`, 'g'), '[address]'],
  [/\b(?:localhost|(?:[a-z0-9_-]+\.)+[a-z][a-z0-9-]*):\d{2,5}\b/gi, '[address]'],
  // One label, as in a cluster; a digit or hyphen in it and a long port tell it from `tokens:8192`.
  [/(?<![\w./@-])(?=[a-z-]*[\d-])[a-z][a-z0-9-]*[a-z0-9]:\d{4,5}\b/gi, '[address]'],
  // A file path has at least two segments; API routes (/v1/…), schema references (#/…) and org/model stay readable.
  [/(?<![\w.\]#/-])\/(?!v\d+\/)[\w.@+-]+(?:\/[\w.@+-]+)+/g, '[path]'],
];

/** An engine's message without what would tell a client about the pool's inside: URLs, host:port pairs, file paths. */
export function maskMessage(text: string): string {
  // Cut first: some of the patterns look at a text without spaces once for each of its characters.
  return MASKS.reduce((masked, [pattern, by]) => masked.replace(pattern, by), text.slice(0, MAX_MESSAGE));
}
