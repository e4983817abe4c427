import { createHash } from 'node:crypto';
import { Pool } from 'undici';
import { detectEngineKind, type EngineKind, type EngineMetrics, parseEngineMetrics } from './metrics-text.ts';
import { type EngineModelCard, parseModelCards } from './model-cards.ts';

/** Where and how one instance is probed. */
export interface ProbeTarget {
  /** Base URL `http(s)://host[:port][/prefix]`, without a trailing `/v1`. */
  readonly url: string;
  /** Sent with every probe request. Default none. */
  readonly headers?: Readonly<Record<string, string>>;
  /** Sent as `Authorization: Bearer`, replacing one among `headers`. Default none. */
  readonly apiKey?: string;
}

/**
 * Health of an instance as one probe showed it.
 * `unhealthy`: it answered, and said no; `no_engine`: it answers HTTP and on no route as an engine does; `refused`: nothing listens there; `unreachable`: no connection for another
 * reason (DNS, route, TLS); `timeout`: no answer in time; `reset`: the connection broke or carried no HTTP.
 */
export interface ProbeHealth {
  readonly kind: 'ok' | 'unhealthy' | 'no_engine' | ProbeFailureKind;
  /** For logs and state reasons; names no address. */
  readonly detail: string;
}

type ProbeFailureKind = 'refused' | 'unreachable' | 'timeout' | 'reset';

/** Result of one probe; a detail is absent where it was not asked for or the engine has no usable answer. */
export interface ProbeResult {
  readonly health: ProbeHealth;
  readonly models?: readonly EngineModelCard[];
  /** Whether /v1/models refused the key; absent where it was not asked. */
  readonly keyRefused?: boolean;
  /** Whether adapters can be replaced while the engine runs; absent where it has none, or does not tell. */
  readonly adapters?: 'fixed' | 'reloadable';
  readonly version?: string;
  readonly metrics?: EngineMetrics;
  /** Kind of engine, read off the metrics' names. */
  readonly kind?: EngineKind;
  /** See {@link TEMPLATE_PROBES}. */
  readonly templateFingerprint?: string;
}

/** Optional routes of a probe beside GET /health. */
export type ProbePart = 'models' | 'version' | 'metrics' | 'template';

/** One probe of one instance; rejects only if `signal` aborts. */
export type Probe = (
  target: ProbeTarget,
  parts: ReadonlySet<ProbePart>,
  timeoutMs: number,
  signal: AbortSignal,
) => Promise<ProbeResult>;

const MAX_BODY_BYTES = 8 * 1024 * 1024;
const MAX_VERSION_LENGTH = 128;

/** What tells an engine from any other server, where GET /health does not. */
const PROOFS: ReadonlySet<ProbePart> = new Set(['models', 'version', 'metrics']);

/**
 * Asks GET /health and then, if that is good, the wanted parts of /v1/models, /version, /metrics and /tokenize at once.
 * A server without an engine's health route is asked for the first three in any case: one has to be an engine's.
 * Each request has `timeoutMs` (0 = no limit). All connections are opened for this probe and closed with it: a full
 * request pool cannot starve it, and a refused connection is seen as such and not as the reset of a kept one.
 */
export const probeInstance: Probe = async (target, parts, timeoutMs, signal) => {
  const base = new URL(target.url);
  const pool = new Pool(base.origin, {
    connections: 1 + parts.size + PROOFS.size,
    allowH2: false,
    connectTimeout: timeoutMs,
    headersTimeout: timeoutMs,
    bodyTimeout: timeoutMs,
    maxResponseSize: MAX_BODY_BYTES,
  });
  try {
    const failures: ProbeHealth[] = [];
    const get: Get = async (path, body) => {
      const reply = await readPath(pool, base, path, body, target, timeoutMs, signal);
      if (reply.kind !== 'reply') failures.push(reply);
      else if (isTrouble(reply.status))
        failures.push({ kind: 'unhealthy', detail: `${path} answered ${reply.status}` });
      return reply;
    };
    const { health, isProof } = await readHealth(get);
    if (health.kind !== 'ok') return { health };
    const wants = (part: ProbePart) => parts.has(part) || (!isProof && PROOFS.has(part));
    const details = await Promise.all([
      wants('models') ? readModels(get) : {},
      wants('version') ? readVersion(get) : {},
      wants('metrics') ? readMetrics(get) : {},
      wants('template') ? readTemplate(get) : {},
    ]);
    const result = { health, ...details[0], ...details[1], ...details[2], ...details[3] };
    if (isProof || isOfEngine(result)) return result;
    // A route that did not answer may have been the proof.
    return {
      health: failures[0] ?? { kind: 'no_engine', detail: `${health.detail}, and no other route is an engine's` },
    };
  } finally {
    await pool.destroy();
  }
};

interface Failure {
  readonly kind: ProbeFailureKind;
  readonly detail: string;
}

type Reply = { readonly kind: 'reply'; readonly status: number; readonly text: string } | Failure;

/** GET, or POST with a body. */
type Get = (path: string, body?: string) => Promise<Reply>;

interface HealthReading {
  readonly health: ProbeHealth;
  /** False where any server might have answered so. */
  readonly isProof: boolean;
}

async function readHealth(get: Get): Promise<HealthReading> {
  const reply = await get('/health');
  if (reply.kind !== 'reply') return { health: reply, isProof: false };
  const { status, text } = reply;
  const ok = (detail: string, isProof: boolean): HealthReading => ({ health: { kind: 'ok', detail }, isProof });
  // Engines answer with nothing, a word or JSON; a page is some web server's.
  if (status >= 200 && status < 300) return ok(`health answered ${status}`, !text.trimStart().startsWith('<'));
  // A busy server is alive, and one without the route has answered too.
  if (status === 429) return ok('health answered 429, busy', true);
  if (status === 404 || status === 405 || status === 501) return ok(`no health route, answered ${status}`, false);
  return { health: { kind: 'unhealthy', detail: `health answered ${status}` }, isProof: false };
}

/** A model list, if only for those who have its key, a version, metrics or tokens of an engine. */
function isOfEngine({ models, keyRefused, version, kind, templateFingerprint }: ProbeResult): boolean {
  return [models, keyRefused, version, kind, templateFingerprint].some((part) => part !== undefined);
}

/** Says nothing of whether there is such a route. */
function isTrouble(status: number): boolean {
  return status === 429 || (status >= 500 && status !== 501);
}

async function readModels(get: Get): Promise<Pick<ProbeResult, 'models' | 'keyRefused' | 'adapters'>> {
  const reply = await get('/v1/models');
  if (reply.kind === 'reply' && (reply.status === 401 || reply.status === 403)) return { keyRefused: true };
  const models = reply.kind === 'reply' && reply.status === 200 ? parseModelCards(reply.text) : undefined;
  if (models === undefined) return {};
  const hasAdapters = models.some(({ parent }) => parent !== '');
  return { models, keyRefused: false, ...(hasAdapters ? await readAdapters(get) : {}) };
}

/** vLLM has the route by which adapters are replaced only where that is allowed; it takes no GET. */
async function readAdapters(get: Get): Promise<Pick<ProbeResult, 'adapters'>> {
  const reply = await get('/v1/load_lora_adapter');
  if (reply.kind !== 'reply') return {};
  if (reply.status === 404) return { adapters: 'fixed' };
  return reply.status === 405 ? { adapters: 'reloadable' } : {};
}

async function readVersion(get: Get): Promise<Pick<ProbeResult, 'version'>> {
  const reply = await get('/version');
  const version = reply.kind === 'reply' && reply.status === 200 ? versionOf(reply.text) : undefined;
  return version === undefined ? {} : { version };
}

async function readMetrics(get: Get): Promise<Pick<ProbeResult, 'metrics' | 'kind'>> {
  const reply = await get('/metrics');
  if (reply.kind !== 'reply' || reply.status !== 200) return {};
  const kind = detectEngineKind(reply.text);
  return { metrics: parseEngineMetrics(reply.text, kind), ...(kind === undefined ? {} : { kind }) };
}

/** A tool, a call of it and its result, and what the model thought before the call. */
const TOOL_TALK = {
  tools: [
    {
      type: 'function',
      function: { name: 'look_up', description: 'Looks it up.', parameters: { type: 'object', properties: {} } },
    },
  ],
  messages: [
    { role: 'user', content: 'Is it so?' },
    {
      role: 'assistant',
      content: '',
      reasoning: 'Let me see.',
      tool_calls: [{ id: 'a', type: 'function', function: { name: 'look_up', arguments: '{}' } }],
    },
    { role: 'tool', tool_call_id: 'a', content: 'It is.' },
  ],
};

/**
 * What engines tokenise so that their tokenizers and chat templates can be told apart: equal ids here are a strong sign,
 * not a proof, that prompts are rendered alike. A template may refuse all but the first, and all engines with it do.
 */
const TEMPLATE_PROBES = [
  JSON.stringify({
    messages: [
      { role: 'system', content: 'Be brief.' },
      { role: 'user', content: 'Grüße, 3.14 \u{1F600}\n\tx == y' },
      { role: 'assistant', content: 'Yes.' },
      { role: 'user', content: 'Why?' },
    ],
  }),
  JSON.stringify(TOOL_TALK),
  // The question after it: what was thought and called in earlier turns may be left out.
  JSON.stringify({ ...TOOL_TALK, messages: [...TOOL_TALK.messages, { role: 'user', content: 'Why?' }] }),
] as const;

/** Models without a chat template are asked for the text. */
const TEXT_PROBE = JSON.stringify({ prompt: 'Grüße, 3.14 \u{1F600}\n\tx == y' });

/** Hash of the token ids, with the kind of probe that gave them; absent where the engine has no such route. */
async function readTemplate(get: Get): Promise<Pick<ProbeResult, 'templateFingerprint'>> {
  const chat = await Promise.all(TEMPLATE_PROBES.map((body) => readIds(get, body)));
  const [first] = chat;
  const kind = first === 'none' ? 1 : 0;
  const told = kind === 1 ? [await readIds(get, TEXT_PROBE)] : chat;
  // Half of it would look like another template.
  if (told[0] === 'none' || told.includes(undefined)) return {};
  return { templateFingerprint: `${kind}:${createHash('sha256').update(told.join()).digest('hex').slice(0, 32)}` };
}

/** Token ids as text; `none` where the engine refuses, undefined where it has no answer at this time. */
async function readIds(get: Get, body: string): Promise<string | undefined> {
  const reply = await get('/tokenize', body);
  // A template that cannot be rendered is a 400 or a 500, by version.
  if (reply.kind !== 'reply' || (isTrouble(reply.status) && reply.status !== 500)) return undefined;
  return (reply.status === 200 ? tokensOf(reply.text) : undefined) ?? 'none';
}

function tokensOf(text: string): string | undefined {
  try {
    const body: unknown = JSON.parse(text);
    if (typeof body !== 'object' || body === null || !('tokens' in body) || !Array.isArray(body.tokens))
      return undefined;
    return body.tokens.length === 0 ? undefined : JSON.stringify(body.tokens);
  } catch {
    return undefined;
  }
}

function versionOf(text: string): string | undefined {
  try {
    const body: unknown = JSON.parse(text);
    if (typeof body !== 'object' || body === null || !('version' in body)) return undefined;
    const { version } = body;
    return typeof version === 'string' && version.length <= MAX_VERSION_LENGTH ? version : undefined;
  } catch {
    return undefined;
  }
}

async function readPath(
  pool: Pool,
  base: URL,
  path: string,
  body: string | undefined,
  target: ProbeTarget,
  timeoutMs: number,
  signal: AbortSignal,
): Promise<Reply> {
  try {
    const response = await pool.request({
      method: body === undefined ? 'GET' : 'POST',
      path: `${base.pathname.replace(/\/+$/, '')}${path}`,
      headers: { ...probeHeaders(target), ...(body === undefined ? {} : { 'content-type': 'application/json' }) },
      ...(body === undefined ? {} : { body }),
      signal: timeoutMs > 0 ? AbortSignal.any([signal, AbortSignal.timeout(timeoutMs)]) : signal,
    });
    return { kind: 'reply', status: response.statusCode, text: await response.body.text() };
  } catch (error) {
    signal.throwIfAborted();
    return classifyFailure(error);
  }
}

function probeHeaders(target: ProbeTarget): Record<string, string> {
  const headers: Record<string, string> = { 'accept-encoding': 'identity' };
  for (const [name, value] of Object.entries(target.headers ?? {})) headers[name.toLowerCase()] = value;
  if (target.apiKey !== undefined) headers['authorization'] = `Bearer ${target.apiKey}`;
  return headers;
}

const TIMEOUTS = new Set(['UND_ERR_CONNECT_TIMEOUT', 'UND_ERR_HEADERS_TIMEOUT', 'UND_ERR_BODY_TIMEOUT', 'ETIMEDOUT']);
const RESETS = new Set(['ECONNRESET', 'EPIPE', 'UND_ERR_SOCKET', 'UND_ERR_RES_EXCEEDED_MAX_SIZE']);

function classifyFailure(error: unknown): Failure {
  const code = codeOf(error);
  if (code === 'ECONNREFUSED') return { kind: 'refused', detail: 'connection refused' };
  if (TIMEOUTS.has(code) || (error instanceof Error && error.name === 'TimeoutError')) {
    return { kind: 'timeout', detail: 'no answer in time' };
  }
  if (RESETS.has(code)) return { kind: 'reset', detail: `connection broke (${code})` };
  // undici gives its parser's errors a code only in part.
  if (error instanceof Error && error.name === 'HTTPParserError')
    return { kind: 'reset', detail: 'answer is not HTTP' };
  return { kind: 'unreachable', detail: code === '' ? 'no connection' : `no connection (${code})` };
}

/** The first error code on the cause chain, looking into the parts of an AggregateError; '' where there is none. */
function codeOf(error: unknown): string {
  for (let at: unknown = error, depth = 0; at instanceof Error && depth < 5; at = at.cause, depth += 1) {
    if ('code' in at && typeof at.code === 'string') return at.code;
    if (at instanceof AggregateError) {
      const inner = at.errors.map(codeOf).find((code) => code !== '');
      if (inner !== undefined) return inner;
    }
  }
  return '';
}
