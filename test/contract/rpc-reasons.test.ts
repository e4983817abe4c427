import { readFileSync } from 'node:fs';
import { describe, expect, test } from 'vitest';
import { ErrorReason, ErrorReasonSchema } from '../../gen/baton/v1/error_reason_pb.ts';
import { ERROR_REASONS, isErrorReason } from '../../src/core/errors.ts';

/** Reasons that only HTTP clients of the facade see: no RPC fails with them. */
const FACADE_ONLY = [
  'BODY_EMPTY',
  'BODY_INVALID_JSON',
  'BODY_NOT_OBJECT',
  'BODY_TOO_LARGE',
  'HEADERS_TOO_LARGE',
  'BODY_INCOMPLETE',
  'CONTENT_ENCODING_UNSUPPORTED',
  'KV_TRANSFER_PARAMS_REFUSED',
  'METHOD_NOT_ALLOWED',
  'ROUTE_NOT_FOUND',
  'REQUEST_LOOP',
  'RATE_LIMIT_EXCEEDED',
  'AUTH_UNAVAILABLE',
  'ENGINE_UNREACHABLE',
  'ENGINE_CONNECTION_LOST',
  'ENGINE_REPLY_INVALID',
  'ENGINE_AUTH',
  'ENGINE_TIMEOUT',
  'ROUTER_UNAVAILABLE',
  'CLIENT_GONE',
];

const proto = readFileSync(new URL('../../proto/baton/v1/error_reason.proto', import.meta.url), 'utf8');
const reasons = ErrorReasonSchema.values.filter((value) => value.number !== ErrorReason.UNSPECIFIED);

describe('ErrorReason', () => {
  test.each(reasons.map((value) => [value.localName, value.name]))(
    '%s is documented as the code does it',
    (short, full) => {
      const comment = new RegExp(`((?: {2}//.*\\n)+) {2}${full} = `).exec(proto)?.[1] ?? '';
      const sample = JSON.parse(/\{.*\}/.exec(comment)?.[0] ?? 'null');
      expect(sample).toMatchObject({ reason: short, domain: 'baton', metadata: {} });
      expect(isErrorReason(short)).toBe(true);
      if (isErrorReason(short)) expect(comment).toContain(`code ${ERROR_REASONS[short].code.toUpperCase()}`);
    },
  );

  test('has every reason that an RPC can fail with', () => {
    const known = [...reasons.map((value) => value.localName), ...FACADE_ONLY];
    expect(Object.keys(ERROR_REASONS).toSorted()).toEqual(known.toSorted());
  });
});
