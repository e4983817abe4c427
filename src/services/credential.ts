import { createHash } from 'node:crypto';
import { BatonError } from '../core/errors.ts';
import { ANONYMOUS, credentialTenant, presentedCredential } from '../core/tenant.ts';

/** SHA-256 of a key in lower-case hex; the key as Node gives headers, each byte one character. */
export function hashCredential(key: string): string {
  return createHash('sha256').update(key, 'latin1').digest('hex');
}

/** SHA-256 of a text in lower-case hex. */
export function sha256Hex(text: string): string {
  return createHash('sha256').update(text).digest('hex');
}

/** Tenant of a caller that needs no key: told apart by what it shows. */
export function presentedTenant(authorization: string | undefined): string {
  const credential = presentedCredential(authorization);
  return credential === undefined ? ANONYMOUS : credentialTenant(hashCredential(credential));
}

/** The refusal of a method, by its full name, that an ordinary caller may not call. */
export function operatorRequired(method: string): BatonError {
  return new BatonError({
    reason: 'OPERATOR_REQUIRED',
    message: 'the method needs an operator credential',
    metadata: { method },
  });
}
