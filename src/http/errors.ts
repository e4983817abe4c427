import type { FastifyError, FastifyReply } from 'fastify';
import { BatonError } from '../core/errors.ts';
import { errorEnvelope } from '../core/openai-error.ts';
import { type Refusal, refusalOf } from '../services/leg.ts';

/** Headers and body of an error reply in the OpenAI envelope. */
export function renderRefusal(refusal: Refusal): { headers: Record<string, string>; body: string } {
  const { retryAfterSeconds, error } = refusal;
  const needsKey = error.code === 'credential_required';
  return {
    headers: {
      'content-type': 'application/json',
      ...(needsKey ? { 'www-authenticate': 'Bearer' } : {}),
      ...(retryAfterSeconds === undefined ? {} : { 'retry-after': String(Math.ceil(retryAfterSeconds)) }),
    },
    // The word that OpenAI's clients know.
    body: errorEnvelope(needsKey ? { ...error, code: 'invalid_api_key' } : error),
  };
}

/** What Fastify and Node throw while a request is read, as baton's own errors. */
export function toRequestError(error: FastifyError | Error, bodyLimit: number): BatonError {
  if (error instanceof BatonError) return error;
  const code = 'code' in error ? error.code : '';
  const cause = { cause: error };
  switch (code) {
    case 'FST_ERR_CTP_BODY_TOO_LARGE':
      return new BatonError(
        { reason: 'BODY_TOO_LARGE', message: `The body is larger than ${bodyLimit} bytes (facade.body_limit).` },
        cause,
      );
    case 'FST_ERR_CTP_EMPTY_JSON_BODY':
    case 'FST_ERR_CTP_INVALID_CONTENT_LENGTH':
    case 'ECONNRESET':
      return new BatonError(
        { reason: 'BODY_INCOMPLETE', message: 'The body is shorter or longer than its Content-Length.' },
        cause,
      );
    default:
      return new BatonError({ reason: 'INTERNAL', message: 'Internal error.' }, cause);
  }
}

/** Any error as a refusal; unknown ones say nothing about the inside. */
export function toRefusal(error: unknown): Refusal {
  if (error instanceof BatonError) return refusalOf(error);
  return refusalOf(new BatonError({ reason: 'INTERNAL', message: 'Internal error.' }, { cause: error }));
}

/** For requests that fail before their route runs. */
export function refuseEarly(error: BatonError, reply: FastifyReply): FastifyReply {
  const refusal = refusalOf(error);
  const { headers, body } = renderRefusal(refusal);
  return reply.code(refusal.status).headers(headers).send(body);
}
