import type { IncomingHttpHeaders } from 'node:http';
import { BatonError } from '../core/errors.ts';
import { type ApiKeys, bearerKey } from '../core/tenant.ts';
import { hashCredential, presentedTenant } from '../services/credential.ts';

/** Whom a request belongs to, or why it is refused. */
export type Authentication =
  | { readonly kind: 'ok'; readonly tenant: string }
  | { readonly kind: 'refused'; readonly error: BatonError };

/** Decides from the headers alone whom a request belongs to. */
export type Authenticate = (headers: IncomingHttpHeaders) => Authentication | Promise<Authentication>;

/** Checks signed tokens of clients. */
export interface TokenCheck {
  readonly looksLikeToken: (text: string) => boolean;
  /** The token's tenant, or why it does not count. */
  readonly check: (token: string) => Promise<string | BatonError>;
}

/**
 * Makes the check of clients' credentials. `keys` is asked for every request; while it gives undefined, and there are no
 * tokens, nobody is refused, and the tenant is a hash of the credential, or `anonymous`.
 */
export function createAuthenticate(keys: () => ApiKeys | undefined, tokens?: TokenCheck): Authenticate {
  return ({ authorization }) => {
    const known = keys();
    if (known === undefined && tokens === undefined) return { kind: 'ok', tenant: presentedTenant(authorization) };
    const key = bearerKey(authorization);
    // Looked up by its hash: how long that takes tells nothing about the keys.
    const tenant = key === undefined ? undefined : known?.get(hashCredential(key));
    if (tenant !== undefined) return { kind: 'ok', tenant };
    if (key !== undefined && tokens?.looksLikeToken(key) === true) return tokens.check(key).then(resultOf);
    const message =
      authorization === undefined
        ? 'An API key is needed: send it as `Authorization: Bearer KEY`.'
        : 'The API key is not valid.';
    return { kind: 'refused', error: new BatonError({ reason: 'CREDENTIAL_REQUIRED', message }) };
  };
}

function resultOf(checked: string | BatonError): Authentication {
  return checked instanceof BatonError ? { kind: 'refused', error: checked } : { kind: 'ok', tenant: checked };
}
