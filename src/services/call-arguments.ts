import { BatonError } from '../core/errors.ts';

const MAX_CALL_KEY_BYTES = 128;

/** INVALID_ARGUMENT for one field, named by its path in the request. */
export function invalidField(field: string, what: string): BatonError {
  return new BatonError({ reason: 'INVALID_ARGUMENT', message: `${field} ${what}`, param: field, metadata: { field } });
}

/** LIMIT_EXCEEDED for a limit of the contract, named as in StoreLimits. */
export function overLimit(limit: string, max: number): BatonError {
  return new BatonError({
    reason: 'LIMIT_EXCEEDED',
    message: `the limit ${limit} would be passed`,
    metadata: { limit, max: String(max) },
  });
}

/** The required idempotency key. */
export function requireCallKey(text: string): string {
  if (text === '') throw invalidField('idempotency_key', 'is required');
  return checkSize('idempotency_key', text, MAX_CALL_KEY_BYTES);
}

/** A reason in the caller's words; empty is allowed. */
export function checkReasonWord(reason: string): void {
  if (reason !== '' && !/^[a-z][a-z0-9_]{0,63}$/.test(reason)) throw invalidField('reason', 'is not a snake_case word');
}

/** The text, if it is not longer than so many bytes. */
export function checkSize(field: string, text: string, maxBytes: number): string {
  // Encoded, half a surrogate pair is the same as any other: two keys would be one.
  if (!text.isWellFormed()) throw invalidField(field, 'is not well-formed Unicode');
  // A UTF-16 unit is at most three bytes of UTF-8, so most texts need no count.
  if (text.length * 3 > maxBytes && Buffer.byteLength(text) > maxBytes) {
    throw invalidField(field, `is longer than ${maxBytes} bytes`);
  }
  return text;
}
