import { ADAPTER_ROUTES } from './adapters.ts';
import { ApiError, deadEngineError, internalError, schemaError, toPythonJson } from './api-error.ts';
import type { Engine } from './engine.ts';
import type { FaultRule } from './faults.ts';
import type { GenerateContext } from './generate.ts';
import { type Exchange, resetSocket, sendJson, sendText } from './http-front.ts';
import { isInteger, isObject, isTruthy, type JsonObject } from './json.ts';
import type { NoticeFault } from './kv-sender.ts';
import { loadMedia } from './media.ts';
import { renderMetrics } from './metrics.ts';
import { findModel, fingerprintOf, listModels } from './models.ts';
import type { ServedModel, SimConfig } from './options.ts';
import {
  type ApiKind,
  checkSchema,
  type GenerateRequest,
  parseBody,
  readChatPrompt,
  readCompletionPrompts,
  readGenerate,
} from './parse-request.ts';
import { type HandleFilter, replyStream, replyWhole, toApiError } from './reply.ts';
import { EngineError } from './sequence.ts';
import type { ReplyMeta } from './shapes.ts';
import { decodeTokens, tokenText } from './tokenizer.ts';

/** What a route needs of the running simulator. */
export interface RouteContext {
  /** The rank that the request went to, and all of them. */
  readonly engine: Engine;
  readonly engines: readonly Engine[];
  readonly config: SimConfig;
  /** An active fault that changes the reply. */
  readonly fault: FaultRule | undefined;
  /** Serves other models from now on. */
  readonly serve: (models: readonly ServedModel[]) => void;
  readonly drawHex: (digits: number) => string;
  /** Other exchanges in flight. */
  readonly load: number;
}

type Route = (exchange: Exchange, context: RouteContext) => void | Promise<void>;

const getRoutes: Readonly<Record<string, Route>> = {
  '/health': answerHealth,
  '/ping': answerHealth,
  '/version': (exchange, { config }) => sendJson(exchange.response, 200, { version: config.version }),
  '/load': (exchange, context) => sendJson(exchange.response, 200, { server_load: context.load }),
  '/v1/models': (exchange, { engine, config }) =>
    sendJson(exchange.response, 200, listModels(config, Math.floor(engine.startedAt / 1000))),
  '/metrics': (exchange, { engine, engines, config }) => {
    const text = renderMetrics(engines, config, engine.startedAt / 1000);
    sendText(exchange.response, 200, 'text/plain; version=0.0.4; charset=utf-8', text);
  },
};

const postRoutes: Readonly<Record<string, Route>> = {
  '/ping': answerHealth,
  '/v1/chat/completions': (exchange, context) => answerGenerate(exchange, context, 'chat'),
  '/v1/completions': (exchange, context) => answerGenerate(exchange, context, 'completions'),
  '/tokenize': (exchange, { config }) => answerJson(exchange, () => tokenize(exchange, config)),
  '/detokenize': (exchange) => answerJson(exchange, () => detokenize(exchange)),
};

function answerHealth(exchange: Exchange, { engine }: RouteContext): void {
  sendText(exchange.response, engine.dead ? 503 : 200, undefined, '');
}

/** Answers one request as the engine's HTTP server does. */
export async function answer(exchange: Exchange, context: RouteContext): Promise<void> {
  const { request, response } = exchange;
  const key = context.config.apiKey;
  if (key !== undefined && request.path.startsWith('/v1') && request.headers['authorization'] !== `Bearer ${key}`) {
    sendJson(response, 401, { error: 'Unauthorized' });
    return;
  }
  const isPost = request.method === 'POST';
  const change = context.config.runtimeAdapters ? ADAPTER_ROUTES[request.path] : undefined;
  if (change !== undefined && isPost) {
    await answerChange(exchange, context, change);
    return;
  }
  const routes = isPost ? postRoutes : getRoutes;
  const route = request.method === 'GET' || isPost ? routes[request.path] : undefined;
  if (route !== undefined) {
    await route(exchange, context);
    return;
  }
  const isKnown = change !== undefined || request.path in getRoutes || request.path in postRoutes;
  sendJson(response, isKnown ? 405 : 404, { detail: isKnown ? 'Method Not Allowed' : 'Not Found' });
}

function answerJson(exchange: Exchange, build: () => JsonObject): void {
  try {
    sendJson(exchange.response, 200, build());
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    sendJson(exchange.response, error.status, error.body);
  }
}

async function answerChange(
  exchange: Exchange,
  { config, serve }: RouteContext,
  change: (typeof ADAPTER_ROUTES)[string],
): Promise<void> {
  try {
    const { models, said } = await change(config.models, readJson(exchange));
    serve(models);
    sendText(exchange.response, 200, 'application/json', JSON.stringify(said));
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    sendJson(exchange.response, error.status, error.body);
  }
}

function readJson(exchange: Exchange): unknown {
  const type = exchange.request.headers['content-type'];
  if (typeof type !== 'string' || type.split(';')[0]?.trim().toLowerCase() !== 'application/json') {
    throw new ApiError(400, "Unsupported Media Type: Only 'application/json' is allowed", 'Bad Request', null);
  }
  return exchange.parsed ?? parseBody(exchange.request.body);
}

function tokenize(exchange: Exchange, config: SimConfig): JsonObject {
  const parsed = readJson(exchange);
  const isChat = isObject(parsed) && 'messages' in parsed;
  const body = checkSchema(parsed, isChat ? 'messages' : 'prompt');
  findModel(config, body['model']);
  const prompt = isChat ? readChatPrompt(body, config, undefined) : readCompletionPrompts(body['prompt'], config);
  const tokens = prompt.ids[0] ?? [];
  return {
    count: tokens.length,
    max_model_len: config.maxModelLen,
    tokens,
    token_strs: body['return_token_strs'] === true ? tokens.map(tokenText) : null,
  };
}

function detokenize(exchange: Exchange): JsonObject {
  const body = checkSchema(readJson(exchange), 'tokens');
  const tokens = body['tokens'];
  if (!Array.isArray(tokens) || !tokens.every(isInteger)) {
    throw schemaError('list_type', 'body.tokens', 'Input should be a valid list', "'<input>'");
  }
  return { prompt: decodeTokens(tokens, true) };
}

function publicIdOf(exchange: Exchange, body: JsonObject, api: ApiKind, drawHex: (digits: number) => string): string {
  const header = exchange.request.headers['x-request-id'];
  const given = typeof header === 'string' ? header : body['request_id'];
  return `${api === 'chat' ? 'chatcmpl' : 'cmpl'}-${typeof given === 'string' && given !== '' ? given : drawHex(16)}`;
}

/** Makes the handle of a decode leg point at no engine. */
function breakHandle(kv: JsonObject | undefined): JsonObject | undefined {
  return kv === undefined ? undefined : { ...kv, remote_engine_id: '00000000-0000-0000-0000-000000000000' };
}

function handleFilter(fault: FaultRule | undefined): HandleFilter {
  if (fault?.kind === 'no_handle') return () => null;
  if (fault?.kind !== 'patch_handle') return (handle) => handle;
  return (handle) => (handle === null ? null : { ...handle, ...fault.patch });
}

function noticeFault(fault: FaultRule | undefined): NoticeFault | undefined {
  switch (fault?.kind) {
    case 'notice_late':
      return { kind: 'late', ms: fault.ms ?? 100 };
    case 'notice_lost':
      return { kind: 'lost' };
    case 'notice_early':
      return { kind: 'early' };
    case 'notice_doubled':
      return { kind: 'doubled' };
    case 'notice_foreign':
      return { kind: 'foreign' };
    case 'kv_unwritten':
      return { kind: 'unwritten' };
    default:
      return undefined;
  }
}

async function answerGenerate(exchange: Exchange, context: RouteContext, api: ApiKind): Promise<void> {
  const { engine, config, fault } = context;
  const { response } = exchange;
  let body: JsonObject = {};
  let request: GenerateRequest;
  try {
    body = checkSchema(readJson(exchange), api === 'chat' ? 'messages' : 'prompt');
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    sendJson(response, error.status, error.body);
    return;
  }
  let model: ServedModel;
  try {
    model = findModel(config, body['model']);
    const media = await loadMedia(api === 'chat' ? body['messages'] : undefined, exchange.signal);
    request = readGenerate(body, api, typeof body['model'] === 'string' ? body['model'] : model.id, config, media);
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    const kv = body['kv_transfer_params'];
    if (isObject(kv) && isTruthy(kv['do_remote_prefill'])) await engine.notifyUnread(kv);
    sendJson(response, error.status, error.body);
    return;
  }
  if (fault?.kind === 'load_failure') request = { ...request, kv: breakHandle(request.kv) };
  const publicId = publicIdOf(exchange, body, api, context.drawHex);
  exchange.suffix = context.drawHex(8);
  const meta: ReplyMeta = {
    id: publicId,
    created: Math.floor(config.clock.now() / 1000),
    model: request.model,
    fingerprint: fingerprintOf(config),
    isCurrent: config.hasGeneration,
  };
  const run: GenerateContext = {
    engine,
    config,
    model,
    publicId,
    suffix: exchange.suffix,
    slowMs: fault?.kind === 'slow' ? (fault.ms ?? 100) : 0,
    noticeFault: noticeFault(fault),
    signal: exchange.signal,
  };
  if (engine.dead) {
    const error = deadEngineError(config.version);
    sendJson(response, error.status, error.body);
    return;
  }
  const filter = handleFilter(fault);
  try {
    if (request.stream) await stream(exchange, context, request, run, meta, filter);
    else sendJson(response, 200, await replyWhole(request, run, meta, filter));
  } catch (error) {
    if (!(error instanceof EngineError)) throw error;
    if (error.kind === 'aborted' || exchange.isSilent) return;
    const shown = toApiError(error, config.version);
    sendJson(response, shown.status, shown.body);
  }
}

async function stream(
  exchange: Exchange,
  { fault }: RouteContext,
  request: GenerateRequest,
  run: GenerateContext,
  meta: ReplyMeta,
  filter: HandleFilter,
): Promise<void> {
  const { response, socket } = exchange;
  response.writeHead(200, { 'content-type': 'text/event-stream; charset=utf-8' });
  response.flushHeaders();
  let events = 0;
  let isCut = false;
  const cutAfter = fault?.events ?? 1;
  const send = (data: string): void => {
    if (isCut || response.destroyed) return;
    if (data === '[DONE]' && fault?.kind === 'no_done') return;
    const cuts = fault?.kind === 'reset_stream' || fault?.kind === 'end_stream' || fault?.kind === 'error_event';
    if (!cuts || events < cutAfter) response.write(`data: ${data}\n\n`);
    events += 1;
    if (!cuts || events < cutAfter) return;
    isCut = true;
    if (fault.kind === 'error_event') {
      response.write(`data: ${toPythonJson(internalError().body)}\n\ndata: [DONE]\n\n`);
    }
  };
  await replyStream(request, run, meta, filter, send);
  if (fault?.kind === 'reset_stream') {
    await new Promise((resolve) => {
      response.write('', resolve);
    });
    resetSocket(socket);
    return;
  }
  if (!response.destroyed) response.end();
}
