import { describe, expect, test } from 'vitest';
import { ErrorReason } from '../../gen/baton/v1/error_reason_pb.ts';
import { BatonError, ERROR_REASONS, type ErrorReasonName, isErrorReason } from '../../src/core/errors.ts';
import { renderRefusal, toRefusal, toRequestError } from '../../src/http/errors.ts';
import { refusalOf } from '../../src/services/leg.ts';

// That each reason of the contract has the code its comment names is shown by test/contract/rpc-reasons.test.ts.

const NAMES = Object.keys(ERROR_REASONS).filter(isErrorReason);

/** Status that each canonical code stands for, where an error of ours has it without a reason to differ. */
const FAMILIES: Readonly<Record<string, readonly number[]>> = {
  invalid_argument: [400, 415],
  failed_precondition: [400, 409, 412],
  not_found: [404],
  unauthenticated: [401],
  permission_denied: [403, 502],
  aborted: [409],
  resource_exhausted: [413, 429, 431, 503],
  unimplemented: [405, 501],
  unavailable: [502, 503],
  deadline_exceeded: [504],
  canceled: [499],
  internal: [500, 502, 508],
};

describe('the table of reasons', () => {
  test('has every reason of the contract', () => {
    const contract = Object.keys(ErrorReason).filter((name) => name !== 'UNSPECIFIED');
    expect(contract.filter((name) => !isErrorReason(name))).toEqual([]);
  });

  test.each(NAMES)('%s: code, status and type fit each other', (name) => {
    const { code, httpStatus, type } = ERROR_REASONS[name];
    expect(FAMILIES[code]).toContain(httpStatus);
    if (httpStatus < 500) expect(type).not.toMatch(/^(internal|upstream|service_unavailable)_error$/);
    else expect(type).toMatch(/^(internal|upstream|service_unavailable)_error$/);
  });

  test('knows no names that objects have by themselves', () => {
    for (const name of ['constructor', 'toString', '__proto__', '', 'internal'])
      expect(isErrorReason(name)).toBe(false);
  });
});

describe('an error of baton as an HTTP reply', () => {
  test.each(NAMES)('%s', (reason) => {
    const { status, error } = refusalOf(new BatonError({ reason, message: 'why', param: 'p' }));
    expect(status).toBe(ERROR_REASONS[reason].httpStatus);
    expect(error).toEqual({ message: 'why', type: ERROR_REASONS[reason].type, param: 'p', code: reason.toLowerCase() });
  });

  test.each([
    ['NO_ROUTABLE_PAIR', 1, '1'],
    ['NO_ROUTABLE_PAIR', 999, '1'],
    ['NO_ROUTABLE_PAIR', 1001, '2'],
    ['NO_ROUTABLE_PAIR', undefined, '1'],
    ['INVALID_ARGUMENT', undefined, undefined],
  ] as const)('%s with a delay of %s ms has Retry-After: %s', (reason, ms, header) => {
    const error = new BatonError({
      reason,
      message: 'why',
      ...(ms === undefined ? {} : { retryAfterMs: ms }),
    });
    expect(renderRefusal(refusalOf(error)).headers['retry-after']).toBe(header);
  });

  test('an unknown error says nothing of itself', () => {
    for (const thrown of [new TypeError('secret'), 'secret', undefined, { message: 'secret' }]) {
      const { body } = renderRefusal(toRefusal(thrown));
      expect(JSON.parse(body)).toEqual({
        error: { message: 'Internal error.', type: 'internal_error', param: null, code: 'internal' },
      });
    }
  });
});

describe('what Fastify and Node throw', () => {
  test.each<[string, ErrorReasonName]>([
    ['FST_ERR_CTP_BODY_TOO_LARGE', 'BODY_TOO_LARGE'],
    ['FST_ERR_CTP_INVALID_CONTENT_LENGTH', 'BODY_INCOMPLETE'],
    ['ECONNRESET', 'BODY_INCOMPLETE'],
    ['ELSE', 'INTERNAL'],
  ])('%s is %s', (code, reason) => {
    const error = toRequestError(Object.assign(new Error('secret'), { code }), 1024);
    expect(error.reason).toBe(reason);
    expect(error.message).not.toContain('secret');
  });

  test('one of ours stays as it is', () => {
    const error = new BatonError({ reason: 'BODY_EMPTY', message: 'x' });
    expect(toRequestError(error, 1)).toBe(error);
  });
});
