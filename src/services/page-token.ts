import { BatonError } from '../core/errors.ts';

const PREFIX = 'after:';

/** Opaque token of the page behind the element `lastId`. */
export function encodePageToken(lastId: string): string {
  return Buffer.from(`${PREFIX}${lastId}`).toString('base64url');
}

/** Id behind which the page begins, undefined for the first; throws INVALID_ARGUMENT for a foreign token. */
export function decodePageToken(token: string): string | undefined {
  if (token === '') return undefined;
  const text = Buffer.from(token, 'base64url').toString();
  // Decoding skips what is not base64url; only a token that encodes to itself was given out.
  if (!text.startsWith(PREFIX) || encodePageToken(text.slice(PREFIX.length)) !== token) {
    throw new BatonError({ reason: 'PAGE_TOKEN_INVALID', message: 'not a page token of this service' });
  }
  return text.slice(PREFIX.length);
}

/** Page size to use for the requested one: 0 means 100, more than 1,000 means 1,000. */
export function clampPageSize(requested: number): number {
  return requested === 0 ? 100 : Math.min(requested, 1000);
}
