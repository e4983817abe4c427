import type { IncomingHttpHeaders } from 'node:http';
import { type BatonError, ERROR_REASONS, type ErrorReasonName } from '../core/errors.ts';
import { type OpenAiError, readEngineError, saysNoRoute } from '../core/openai-error.ts';
import type { EngineClient, LegControl, LegFailure, LegRequest } from '../engine/client.ts';

/** A reply that goes to the client as it is: status and the OpenAI error. */
export interface Refusal {
  readonly status: number;
  readonly error: OpenAiError;
  readonly retryAfterSeconds?: number;
}

/** How a leg went wrong before anything of it was shown. */
export interface FailedLeg {
  readonly kind: 'failed';
  /**
   * `not_sent`: the engine never saw the request. `late`: nor here, because the hand-over had run out by then. `stale`: reset on a reused connection before a reply byte.
   * `started`: tokens may have been produced (a reply was cut). `status`: the engine said so itself. `route_missing`: it
   * has no such route, so it is no engine or its URL is wrong. `other_prompt`: it used other tokens than those of the KV
   * that it was given.
   */
  readonly cause:
    | 'not_sent'
    | 'late'
    | 'stale'
    | 'reset'
    | 'started'
    | 'timeout'
    | 'status'
    | 'route_missing'
    | 'other_prompt'
    | 'unhealthy';
  readonly refusal: Refusal;
}

/** The engine refuses the request itself (4xx): no other engine would take it. */
export interface RefusedLeg {
  readonly kind: 'refused';
  readonly refusal: Refusal;
}

/** The client left while the leg ran. */
export interface GoneLeg {
  readonly kind: 'gone';
}

/** Whose credential a leg carried: decides what a 401 means. */
export type LegAuth = 'own' | 'client' | 'none';

/** A whole reply, collected. */
export interface WholeReply {
  readonly kind: 'reply';
  readonly status: number;
  readonly headers: IncomingHttpHeaders;
  readonly body: Uint8Array;
  /** When the first reply byte arrived, on the caller's clock. */
  readonly startedAt: number;
}

/** How often a silent leg's engine is looked at. */
export const HEALTH_LOOK_MS = 1000;

/** How a whole leg is run; times in milliseconds. */
export interface WholeLegOptions {
  /** 0: no limit. */
  readonly timeoutMs: number;
  readonly signal: AbortSignal;
  /** True when the engine has failed its health checks for so long that waiting for it is hopeless. Default never. */
  readonly isHopeless?: () => boolean;
  readonly now: () => number;
}

/** How many bytes of a whole reply are collected; a larger one is a fault of the engine. */
export const MAX_WHOLE_REPLY = 512 * 1024 * 1024;

/** Runs a leg whose reply is wanted whole. */
export function runWholeLeg(
  engines: EngineClient,
  request: LegRequest,
  options: WholeLegOptions,
): Promise<WholeReply | FailedLeg | GoneLeg> {
  const { signal, timeoutMs, isHopeless, now } = options;
  if (signal.aborted) return Promise.resolve({ kind: 'gone' });
  return new Promise((resolve) => {
    const chunks: Uint8Array[] = [];
    let size = 0;
    let status = 0;
    let startedAt = 0;
    let headers: IncomingHttpHeaders = {};
    let givenUp: 'timeout' | 'unhealthy' | undefined;
    let timer: NodeJS.Timeout | undefined;
    let health: NodeJS.Timeout | undefined;
    let control: LegControl | undefined;
    let settled = false;
    const leave = () => control?.abort(new Error('the client left'));
    const settle = (result: WholeReply | FailedLeg | GoneLeg) => {
      settled = true;
      clearTimeout(timer);
      clearInterval(health);
      signal.removeEventListener('abort', leave);
      resolve(result);
    };
    control = engines.send(request, {
      head(replyStatus, replyHeaders) {
        status = replyStatus;
        headers = replyHeaders;
        startedAt = now();
      },
      data(chunk) {
        size += chunk.byteLength;
        if (size > MAX_WHOLE_REPLY) control?.abort(new Error('the reply is too large'));
        else chunks.push(chunk);
      },
      end() {
        settle({ kind: 'reply', status, headers, body: concat(chunks, size), startedAt });
      },
      fail(failure) {
        if (signal.aborted) settle({ kind: 'gone' });
        else settle(givenUp === undefined ? connectionFailure(failure) : { ...timeoutFailure(), cause: givenUp });
      },
    });
    // The client library may have failed the leg while it took it.
    if (settled) return;
    signal.addEventListener('abort', leave, { once: true });
    const giveUp = (why: 'timeout' | 'unhealthy') => {
      givenUp = why;
      control.abort(new Error(`leg given up: ${why}`));
    };
    if (isHopeless !== undefined) {
      health = setInterval(() => {
        if (status === 0 && isHopeless()) giveUp('unhealthy');
      }, HEALTH_LOOK_MS);
    }
    if (timeoutMs > 0) timer = setTimeout(() => giveUp('timeout'), timeoutMs);
  });
}

/** Reads the status of a whole reply; undefined for a success. */
export function classifyStatus(
  status: number,
  headers: IncomingHttpHeaders,
  body: Uint8Array,
  auth: LegAuth,
): FailedLeg | RefusedLeg | undefined {
  if (status >= 200 && status < 300) return undefined;
  if ((status === 401 || status === 403) && auth === 'own') {
    return { kind: 'refused', refusal: ownRefusal('ENGINE_AUTH', "The engine refused baton's own credential.") };
  }
  if (status < 400 || status >= 600) {
    return {
      kind: 'failed',
      cause: 'status',
      refusal: ownRefusal('ENGINE_REPLY_INVALID', `The engine answered with status ${status}.`),
    };
  }
  const text = new TextDecoder().decode(body.subarray(0, 64 * 1024));
  if (status === 405 || (status === 404 && saysNoRoute(text))) {
    const message = `The engine has no route for this request, it answered with status ${status}.`;
    return { kind: 'failed', cause: 'route_missing', refusal: ownRefusal('ENGINE_REPLY_INVALID', message) };
  }
  const error = readEngineError(status, text);
  // Seconds; the other form of the header, a date, would have to be compared with the engine's clock.
  const retryAfter = /^\d{1,6}$/.test(headers['retry-after'] ?? '') ? Number(headers['retry-after']) : 1;
  return classifyError(status, error, Math.max(1, retryAfter));
}

/** An error that an engine told: the request's own fault (4xx but 429), or one that another engine may not have. */
export function classifyError(status: number, error: OpenAiError, retryAfterSeconds: number): FailedLeg | RefusedLeg {
  if (status < 500 && status !== 429) return { kind: 'refused', refusal: { status, error } };
  const busy = status === 429 || status === 503;
  return { kind: 'failed', cause: 'status', refusal: { status, error, ...(busy ? { retryAfterSeconds } : {}) } };
}

/** A connection that failed, as a leg's result. */
export function connectionFailure(failure: LegFailure): FailedLeg {
  if (failure.kind === 'not_sent') {
    const refusal = ownRefusal('ENGINE_UNREACHABLE', 'No engine could be reached for this request.');
    return { kind: 'failed', cause: 'not_sent', refusal: { ...refusal, retryAfterSeconds: 1 } };
  }
  if (failure.kind === 'too_late') return { ...timeoutFailure(), cause: 'late' };
  const cause = failure.replied ? 'started' : failure.reused ? 'stale' : 'reset';
  return {
    kind: 'failed',
    cause,
    refusal: ownRefusal('ENGINE_CONNECTION_LOST', 'The connection to the engine broke before its reply was whole.'),
  };
}

/** A leg that hit its deadline. */
export function timeoutFailure(): FailedLeg {
  return {
    kind: 'failed',
    cause: 'timeout',
    refusal: ownRefusal('ENGINE_TIMEOUT', 'The engine did not answer in time.'),
  };
}

/** A refusal in baton's own words. */
export function ownRefusal(reason: ErrorReasonName, message: string): Refusal {
  const row = ERROR_REASONS[reason];
  return { status: row.httpStatus, error: { message, type: row.type, param: null, code: reason.toLowerCase() } };
}

/** One of baton's errors as a refusal. */
export function refusalOf(error: BatonError): Refusal {
  const { httpStatus: status, message, type, param } = error;
  // A client that is told to come back must be told when.
  const retryAfterMs = error.retryAfterMs ?? (status === 503 || status === 429 ? 1000 : undefined);
  return {
    status,
    error: { message, type, param, code: error.reason.toLowerCase() },
    ...(retryAfterMs === undefined ? {} : { retryAfterSeconds: Math.max(1, Math.ceil(retryAfterMs / 1000)) }),
  };
}

/** Joins collected pieces; one piece is not copied. */
export function concat(chunks: readonly Uint8Array[], size: number): Uint8Array {
  const [only] = chunks;
  if (chunks.length === 1 && only !== undefined) return only;
  return Buffer.concat(chunks, size);
}
