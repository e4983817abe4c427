import { errors, type JWTPayload, jwtVerify } from 'jose';
import { BatonError } from '../core/errors.ts';
import { claimTenant } from '../core/tenant.ts';
import { sha256Hex } from '../services/credential.ts';
import type { TokenKeys } from './key-cache.ts';

/** What a token has to be to count. */
export interface TokenRules {
  readonly issuer: string;
  /** One of them has to be the token's. */
  readonly audience: readonly string[];
  /** Signatures that count. */
  readonly algorithms: readonly string[];
  /** Claim that holds the tenant. */
  readonly tenantClaim: string;
  /** How wrong clocks may be, milliseconds. */
  readonly clockToleranceMs: number;
}

/** Checks a JSON Web Token; its tenant, or why it does not count. */
export type CheckToken = (token: string) => Promise<string | BatonError>;

/** Whether a text has the form of a signed, or of an unsigned, JSON Web Token. */
export function looksLikeToken(text: string): boolean {
  return /^[\w-]+\.[\w-]+\.[\w-]*$/.test(text);
}

/** Makes the check of tokens by the keys of `cache`. */
export function createCheckToken(rules: TokenRules, cache: TokenKeys): CheckToken {
  const options = {
    issuer: rules.issuer,
    audience: [...rules.audience],
    algorithms: [...rules.algorithms],
    clockTolerance: rules.clockToleranceMs / 1000,
    requiredClaims: ['exp'],
  };
  const verify = async (token: string): Promise<JWTPayload | undefined> => {
    const keys = await cache.current();
    return keys === undefined ? undefined : (await jwtVerify(token, keys, options)).payload;
  };
  return async (token) => {
    try {
      const payload = await verify(token).catch(async (error: unknown) => {
        // The issuer may sign with a new key.
        if (error instanceof errors.JWKSNoMatchingKey && (await cache.lookAgain())) return verify(token);
        throw error;
      });
      if (payload === undefined) return NO_KEYS;
      const name = payload[rules.tenantClaim];
      if (typeof name === 'string' && name !== '') return claimTenant(name, sha256Hex);
      return refused(`it has no tenant (claim ${rules.tenantClaim})`);
    } catch (error) {
      return refused(whyRefused(error));
    }
  };
}

const NO_KEYS = new BatonError({
  reason: 'AUTH_UNAVAILABLE',
  message: 'Tokens cannot be checked at the moment.',
  retryAfterMs: 5_000,
});

function refused(why: string): BatonError {
  return new BatonError({ reason: 'CREDENTIAL_REQUIRED', message: `The token is not valid: ${why}.` });
}

/** By jose's codes; what a claim is has been left out, because the token is not to be believed. */
const REASONS: Readonly<Record<string, string>> = {
  ERR_JWT_EXPIRED: 'it has expired',
  ERR_JWS_SIGNATURE_VERIFICATION_FAILED: 'its signature is not that of the issuer',
  ERR_JOSE_ALG_NOT_ALLOWED: 'it is not signed, or not in a way that is accepted',
  ERR_JWKS_NO_MATCHING_KEY: 'it is signed with a key that the issuer does not have',
  ERR_JWKS_MULTIPLE_MATCHING_KEYS: 'it does not say with which key of the issuer it is signed (kid)',
};

const CLAIMS: Readonly<Record<string, string>> = {
  iss: 'it is of another issuer',
  aud: 'it is for another audience',
  exp: 'it has no time at which it expires',
  nbf: 'its time has not come yet',
};

function whyRefused(error: unknown): string {
  if (error instanceof errors.JWTClaimValidationFailed) return CLAIMS[error.claim] ?? 'one of its claims is wrong';
  const code = error instanceof errors.JOSEError ? error.code : '';
  return REASONS[code] ?? 'it cannot be read';
}
