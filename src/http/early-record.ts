import { randomUUID } from 'node:crypto';
import type { FastifyReply, FastifyRequest } from 'fastify';
import type { BatonError } from '../core/errors.ts';
import type { Api } from '../core/facts.ts';
import { acceptedRequestId } from '../core/request-headers.ts';
import { buildAccessRecord } from '../obs/access-log.ts';
import type { Logger } from '../obs/log.ts';
import type { Metrics } from '../obs/metrics.ts';

/** One access-log line, the counts and the id of a generating request that ends before its route; its body is not read. */
export function recordEarly(
  { metrics, log }: { readonly metrics: Metrics; readonly log: Logger },
  api: Api,
  request: FastifyRequest,
  reply: FastifyReply,
  { error, durationMs }: { readonly error: BatonError; readonly durationMs: number },
): void {
  const requestId = acceptedRequestId(request.headers['x-request-id']) ?? randomUUID();
  reply.header('x-request-id', requestId);
  const { tenant } = request;
  const status = error.httpStatus;
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
    error: error.reason.toLowerCase(),
    ending: 'refused',
  });
  log.info(line, 'request');
}
