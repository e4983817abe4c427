import { isUtf8 } from 'node:buffer';
import { createHash, randomUUID } from 'node:crypto';
import type { FastifyReply, FastifyRequest } from 'fastify';
import { LegEnding } from '../../gen/baton/v1/router_pb.ts';
import { findBodyFault, scanBody } from '../core/body-limits.ts';
import { BatonError, isErrorReason } from '../core/errors.ts';
import { type Api, type BodyFacts, readFacts } from '../core/facts.ts';
import { readIdentity } from '../core/identity.ts';
import type { ObjectScan } from '../core/json-scan.ts';
import { LinkedRequest, type LinkRules, linkRequest } from '../core/link.ts';
import { prefixMarks } from '../core/prefix-marks.ts';
import { unprovenMembers } from '../core/prompt-members.ts';
import { acceptedRequestId, forwardedHeaders, THROUGH, throughNext } from '../core/request-headers.ts';
import { buildAccessRecord } from '../obs/access-log.ts';
import { errorFields, type Logger } from '../obs/log.ts';
import type { LogLimit } from '../obs/log-limit.ts';
import type { Metrics } from '../obs/metrics.ts';
import type { Tracer } from '../obs/tracer.ts';
import { toMs } from '../services/durations.ts';
import { type GenerateRequest, type HandOverDeps, type HandOverReport, handOver } from '../services/hand-over.ts';
import { refusalOf } from '../services/leg.ts';
import { legName } from '../services/leg-book.ts';
import { endingName, modeName } from '../services/plan-message.ts';
import { Timeline } from '../services/timeline.ts';
import { renderRefusal, toRefusal } from './errors.ts';
import { ReplySink } from './reply-sink.ts';

/** What the two generating routes work with. */
export interface GenerateDeps {
  readonly handOver: HandOverDeps;
  readonly metrics: Metrics;
  readonly log: Logger;
  /** Undefined where no traces are wanted. */
  readonly tracer: Tracer | undefined;
  readonly clientKvTransferParams: 'refuse' | 'drop';
  readonly identityHeaders: readonly string[];
  /** Limits the warning about turns that name no conversation; undefined where they are linked without a name. */
  readonly unnamedTurns: LogLimit | undefined;
  readonly clientStallMs: number;
  /** Replies that are under way, for the end of the process. */
  readonly replies: Set<ReplySink>;
  /** A policy compares the beginnings of prompts. */
  readonly marksPrefixes: boolean;
  readonly linkRules: LinkRules;
  /** Extra headers on every reply, e.g. `x-baton-sim`. */
  readonly replyHeaders: Readonly<Record<string, string>>;
  /** Names this facade to the facades that its requests may come to. */
  readonly name: string;
}

type Scan = Extract<ObjectScan, { readonly kind: 'object' }>;

/** Serves one generating request to its end; never throws. */
export async function serveGenerate(
  deps: GenerateDeps,
  api: Api,
  request: FastifyRequest,
  reply: FastifyReply,
): Promise<void> {
  const { metrics, log } = deps;
  const { now } = deps.handOver;
  const startedAt = now();
  const requestId = acceptedRequestId(request.headers['x-request-id']) ?? randomUUID();
  metrics.requestStarted(api);
  const { traceparent, tracestate } = request.headers;
  const callers = { traceparent: oneOf(traceparent), tracestate: oneOf(tracestate) };
  const details = { 'baton.request_id': requestId, 'baton.api': api };
  const span = deps.tracer?.begin(`POST ${request.routeOptions.url}`, callers, startedAt, details);
  const timeline = new Timeline(now, startedAt, span);
  reply.hijack();
  const sink = new ReplySink(reply.raw, {
    stallMs: deps.clientStallMs,
    onBytes: (bytes) => metrics.streamed(bytes),
  });
  deps.replies.add(sink);
  for (const [name, value] of Object.entries(reply.getHeaders())) reply.raw.setHeader(name, value ?? '');
  for (const [name, value] of Object.entries(deps.replyHeaders)) reply.raw.setHeader(name, value);
  let facts: BodyFacts | undefined;
  let report: HandOverReport | undefined;
  let refusal = undefined as HandOverReport['refusal'];
  try {
    const parsed = readBody(deps, api, request);
    facts = parsed.facts;
    request.admission?.reserve(parsed.body.byteLength / BYTES_PER_TOKEN);
    if (facts.continues && facts.conversationId === '') warnUnnamed(deps);
    report = await handOver(deps.handOver, toGenerateRequest(deps, api, request, requestId, parsed, timeline), sink);
    refusal = report.refusal;
  } catch (error) {
    refusal = toRefusal(error);
    if (!(error instanceof BatonError)) log.error({ request_id: requestId, ...errorFields(error) }, 'request failed');
    else if (error.httpStatus >= 500) log.error({ request_id: requestId, reason: error.reason }, 'request failed');
  }
  deps.replies.delete(sink);
  const stopped = sink.cut === 'stopped';
  if (stopped) refusal = refusalOf(SHUTTING_DOWN);
  // A reply that began and then met a fault of baton's own cannot be ended well; it must not look as if it were.
  if (refusal !== undefined && sink.status !== 0) sink.endBroken(refusal.error);
  else if (refusal !== undefined && (stopped || !sink.signal.aborted)) {
    const { headers, body } = renderRefusal(refusal);
    sink.start(refusal.status, {
      ...headers,
      'content-length': String(Buffer.byteLength(body)),
      'x-request-id': requestId,
    });
    sink.write(body);
    sink.end();
  }
  request.admission?.settle(tokensOf(request, report, sink));
  record(deps, { api, tenant: request.tenant, requestId, timeline, facts, report, refusal, sink });
}

/** Bytes of a body that count as a token as long as no engine has said how many there are. */
const BYTES_PER_TOKEN = 4;

/** Tokens that a request has used, none if it failed. A stream that tells no usage, or whose client left, has one an event. */
function tokensOf({ body }: FastifyRequest, report: HandOverReport | undefined, sink: ReplySink): number {
  if (report === undefined || report.legs.length === 0 || (sink.status !== 200 && sink.status !== 0)) return 0;
  const usage = report.reply?.usage;
  const prompt = usage?.promptTokens ?? (body instanceof Uint8Array ? body.byteLength : 0) / BYTES_PER_TOKEN;
  return prompt + (usage?.completionTokens ?? sink.pieces);
}

const SHUTTING_DOWN = new BatonError({
  reason: 'SHUTTING_DOWN',
  message: 'This server is shutting down.',
  retryAfterMs: 1000,
});

interface ParsedBody {
  readonly body: Uint8Array;
  readonly scan: Scan;
  readonly facts: BodyFacts;
}

function readBody(deps: GenerateDeps, api: Api, request: FastifyRequest): ParsedBody {
  const encoding = request.headers['content-encoding'];
  if (encoding !== undefined && encoding.toLowerCase() !== 'identity') {
    throw new BatonError({
      reason: 'CONTENT_ENCODING_UNSUPPORTED',
      message: 'Send the body without content-encoding.',
    });
  }
  const body = request.body instanceof Uint8Array ? request.body : new Uint8Array();
  if (body.byteLength === 0)
    throw new BatonError({ reason: 'BODY_EMPTY', message: 'The body is empty; send a JSON object.' });
  const scan = scanBody(body);
  if (scan.kind === 'over-limit') {
    throw new BatonError({ reason: 'INVALID_ARGUMENT', message: `The body has ${scan.message}.`, param: scan.key });
  }
  if (scan.kind === 'invalid' || !isUtf8(body)) {
    const where = scan.kind === 'invalid' ? scan.message : 'not UTF-8';
    throw new BatonError({ reason: 'BODY_INVALID_JSON', message: `The body is no valid JSON: ${where}.` });
  }
  if (scan.kind === 'not-object') {
    throw new BatonError({ reason: 'BODY_NOT_OBJECT', message: `The body must be a JSON object, not ${scan.type}.` });
  }
  const fault = findBodyFault(body, scan);
  if (fault !== undefined) throw new BatonError({ reason: 'INVALID_ARGUMENT', ...fault });
  const identity = readIdentity(deps.identityHeaders, request.headers, body, scan);
  if (identity.kind === 'invalid') {
    throw new BatonError({ reason: 'INVALID_ARGUMENT', message: identity.message, param: 'conversation_id' });
  }
  const facts = readFacts(api, body, scan, identity.kind === 'named' ? identity.conversationId : '');
  const [refused] = facts.refused;
  if (refused !== undefined && deps.clientKvTransferParams === 'refuse') {
    throw new BatonError({
      reason: 'KV_TRANSFER_PARAMS_REFUSED',
      message: `\`${refused}\` is set by baton alone; leave it out.`,
      param: refused,
    });
  }
  return { body, scan, facts };
}

function toGenerateRequest(
  deps: GenerateDeps,
  api: Api,
  request: FastifyRequest,
  requestId: string,
  { body, scan, facts }: ParsedBody,
  timeline: Timeline,
): GenerateRequest {
  const newHash = () => createHash('sha256');
  const unproven = unprovenMembers(api, body, scan);
  const headers = forwardedHeaders(request.headers);
  headers[THROUGH] = through(request, deps.name);
  return {
    requestId,
    api,
    path: enginePath(request),
    body,
    scan,
    facts,
    ...linkRequest(deps.linkRules, facts.conversationId, new LinkedRequest(api, body, scan, newHash), unproven),
    unprovenMembers: unproven,
    ...(deps.marksPrefixes ? { prefix: prefixMarks(api, body, scan, newHash) } : {}),
    tenant: request.tenant,
    headers,
    authorization: request.headers.authorization,
    debug: request.headers['x-baton-debug'] === '1',
    timeline,
  };
}

/** An engine that is this very facade would be asked, by the request that it is asked for, until no connection is left. */
function through({ headers }: FastifyRequest, name: string): string {
  const next = throughNext(headers[THROUGH], name);
  if (next !== undefined) return next;
  throw new BatonError({
    reason: 'REQUEST_LOOP',
    message: 'This request has been here before: an engine of this server is the server itself, or leads back to it.',
  });
}

/** The route as engines spell it: a trailing slash is a redirect to them. The client's query string is kept. */
function enginePath({ routeOptions, raw }: FastifyRequest): string {
  const url = raw.url ?? '';
  const query = url.indexOf('?');
  return `${routeOptions.url ?? ''}${query < 0 ? '' : url.slice(query)}`;
}

function warnUnnamed({ unnamedTurns, identityHeaders, log }: GenerateDeps): void {
  const heldBack = unnamedTurns?.pass();
  if (heldBack === undefined) return;
  log.warn(
    { headers: identityHeaders, field: 'conversation_id', held_back: heldBack },
    'a request continues a conversation that it does not name, so its KV cannot be reused: send one of these headers or ' +
      "this body field (vLLM's multi-turn benchmark: --send-conversation-id)",
  );
}

interface Finished {
  readonly api: Api;
  readonly tenant: string;
  readonly requestId: string;
  readonly timeline: Timeline;
  readonly facts: BodyFacts | undefined;
  readonly report: HandOverReport | undefined;
  readonly refusal: HandOverReport['refusal'];
  readonly sink: ReplySink;
}

/** One access-log line and the counters of a request: ids and numbers, never text. */
function record(deps: GenerateDeps, finished: Finished): void {
  const { metrics, log } = deps;
  const { api, tenant, requestId, timeline, facts, report, refusal, sink } = finished;
  const { startedAt } = timeline;
  const endedAt = deps.handOver.now();
  const durationMs = endedAt - startedAt;
  const gone = sink.signal.aborted && sink.cut !== 'stopped';
  const status = sink.status === 0 ? 499 : sink.status;
  const model = facts?.model ?? '';
  const mode = report?.plan === undefined ? undefined : modeName(report.plan.mode);
  const usage = report?.reply?.usage;
  const contentAt = report?.reply?.contentAt ?? 0;
  const ttftMs = contentAt > 0 ? contentAt - startedAt : undefined;
  const tokens = {
    promptTokens: usage?.promptTokens,
    completionTokens: usage?.completionTokens,
    cachedTokens: usage?.cachedTokens,
  };
  metrics.requestFinished({ api, tenant, model, mode, status, durationMs, ...tokens });
  timeline.stop(contentAt > 0 ? contentAt : endedAt);
  if (ttftMs !== undefined) metrics.firstContent(model, ttftMs, timeline.parts);
  if (report?.prefillMs !== undefined) metrics.prefillFinished(model, report.prefillMs);
  if (report?.noHandle !== undefined) metrics.handleRejected('prefill', report.noHandle);
  for (const reason of report?.retries ?? []) metrics.retried(reason);
  for (const leg of report?.legs ?? []) {
    metrics.legEnded(legName(leg.leg), endingName(leg.ending));
  }
  recordReuse(metrics, report);
  if (gone) metrics.clientAborted(phaseOf(sink));
  else if (typeof refusal?.error.code === 'string' && isErrorReason(refusal.error.code.toUpperCase())) {
    metrics.failed(refusal.error.code);
  }
  const error = gone ? undefined : errorWord(refusal);
  const ending = sink.cut === 'stopped' ? 'stopped' : gone ? `client_${phaseOf(sink)}` : (report?.ending ?? 'refused');
  timeline.span?.end(endedAt, {
    attributes: {
      'http.response.status_code': status,
      'baton.model': metrics.modelLabel(model),
      'baton.mode': mode,
      'baton.plan_reason': report?.plan?.reason,
      'baton.reuse': report?.outcome,
      'baton.retries': report?.retries.length,
      'baton.error': error,
      'baton.ending': ending,
    },
    ...(status < 500 && ending === 'ok' ? {} : { failure: ending }),
  });
  const line = buildAccessRecord({
    requestId,
    api,
    tenant,
    model: metrics.modelLabel(model),
    stream: facts?.stream ?? false,
    mode,
    planReason: report?.plan?.reason,
    prefillInstance: report?.prefillId,
    decodeInstance: report?.decodeId,
    status,
    prefillMs: report?.prefillMs,
    ttftMs,
    durationMs,
    ...tokens,
    reuse: report?.outcome,
    matchedTokens: report?.plan?.prefillHandle?.matchedTokens,
    blocks: report?.plan?.prefillHandle?.params?.remoteBlockIds?.groups[0]?.ids.length,
    entryAgeMs: report?.plan?.prefillHandle?.age === undefined ? undefined : toMs(report.plan.prefillHandle.age),
    conversation: facts === undefined || facts.conversationId === '' ? undefined : shortHash(facts.conversationId),
    retries: report?.retries.length ?? 0,
    error,
    failedLeg: failedLegOf(report),
    noHandle: report?.noHandle,
    ending,
  });
  log.info(line, 'request');
}

function recordReuse(metrics: Metrics, report: HandOverReport | undefined): void {
  if (report === undefined || report.outcome === 'none') return;
  metrics.reuseEnded(report.outcome);
  const { plan, reply, outcome } = report;
  const used = outcome === 'hit' || outcome === 'hit_cut' ? (plan?.prefillHandle?.matchedTokens ?? 0) : 0;
  const prompt = reply?.usage?.promptTokens ?? reply?.promptTokenIds?.length ?? used;
  metrics.reuseTokens(Math.min(used, prompt), prompt - Math.min(used, prompt));
}

function oneOf(header: string | readonly string[] | undefined): string | undefined {
  return typeof header === 'string' ? header : undefined;
}

/** Conversations are named in logs so that turns can be matched, and not so that they can be used. */
function shortHash(conversationId: string): string {
  return createHash('sha256').update(conversationId).digest('hex').slice(0, 16);
}

/** The code of a refusal as far as it is a number or a word of baton's: an engine's own text stays out of the log. */
function errorWord(refusal: HandOverReport['refusal']): string | undefined {
  if (refusal === undefined) return undefined;
  const { code } = refusal.error;
  if (typeof code === 'number') return String(code);
  return code !== null && isErrorReason(code.toUpperCase()) ? code : 'engine_error';
}

/** Which leg went wrong last, and how; a leg that ended well or with the client says nothing. */
function failedLegOf(report: HandOverReport | undefined): string | undefined {
  const failed = report?.legs.findLast(({ ending }) => ending !== LegEnding.OK && ending !== LegEnding.ABORTED);
  if (failed === undefined) return undefined;
  return `${legName(failed.leg)}:${endingName(failed.ending)}`;
}

function phaseOf(sink: ReplySink): string {
  return sink.cut ?? 'closed';
}
