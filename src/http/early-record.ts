import { randomUUID } from 'node:crypto';
import type { FastifyReply, FastifyRequest } from 'fastify';
import type { BatonError } from '../core/errors.ts';
import type { Api } from '../core/facts.ts';
import { acceptedRequestId } from '../core/request-headers.ts';
import { buildAccessRecord } from '../obs/access-log.ts';
import type { Logger } from '../obs/log.ts';
import type { Metrics } from '../obs/metrics.ts';
import type { BrokenRequest, SentAnswer } from './broken-request.ts';

/** Where refusals before the route are told. */
export interface EarlyRecords {
  readonly metrics: Metrics;
  readonly log: Logger;
}

/** What a request that ends before its route is refused with. */
export interface EarlyEnd {
  readonly error: BatonError;
  /** What its client got already; default: it gets the error. */
  readonly sent?: SentAnswer | undefined;
}

/** One access-log line, the counts and the id of a generating request that ends before its route. */
export function recordEarly(
  { metrics, log }: EarlyRecords,
  api: Api,
  request: FastifyRequest,
  reply: FastifyReply,
  { error, sent }: EarlyEnd,
): void {
  const requestId = sent?.requestId ?? acceptedRequestId(request.headers['x-request-id']) ?? randomUUID();
  reply.header('x-request-id', requestId);
  const { tenant } = request;
  const gone = sent === undefined && request.raw.socket.destroyed;
  const status = gone ? 499 : (sent?.status ?? error.httpStatus);
  const durationMs = reply.elapsedTime;
  if (gone) metrics.clientAborted('closed');
  else metrics.failed(error.reason);
  metrics.requestStarted(api);
  metrics.requestFinished({ api, tenant, model: '', mode: undefined, status, durationMs });
  const line = buildAccessRecord({
    requestId,
    api,
    tenant,
    model: metrics.modelLabel(''),
    stream: false,
    status,
    durationMs,
    retries: 0,
    error: gone ? undefined : error.reason.toLowerCase(),
    ending: gone ? 'client_closed' : 'refused',
  });
  log.info(line, 'request');
}

/** One line and the count of what is no request: nobody knows its path, and nothing of it is told. */
export function recordBroken({ metrics, log }: EarlyRecords, { requestId, status, error, cause }: BrokenRequest): void {
  metrics.failed(error.reason);
  log.info({ request_id: requestId, status, error: error.reason.toLowerCase(), cause, ending: 'refused' }, 'request');
}
