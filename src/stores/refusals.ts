import { BatonError } from '../core/errors.ts';

/** The entry of a precondition has another revision, or with undefined is not there. */
export function revisionMismatch(entryId: string, revision: bigint | undefined): BatonError {
  return new BatonError({
    reason: 'REVISION_MISMATCH',
    message: revision === undefined ? 'the entry is not there' : 'the entry is claimed or has another revision',
    metadata: { entry_id: entryId, ...(revision === undefined ? {} : { revision: String(revision) }) },
  });
}

/** The precondition wants a key without a live entry. */
export function entryExists(entryId: string): BatonError {
  return new BatonError({
    reason: 'ENTRY_EXISTS',
    message: 'the key has a live entry',
    metadata: { entry_id: entryId },
  });
}

/** The entry cannot go while its claim is open. */
export function entryClaimed(entryId: string): BatonError {
  return new BatonError({
    reason: 'ENTRY_CLAIMED',
    message: 'the entry has an open claim',
    metadata: { entry_id: entryId },
  });
}

/** The claim is not there, or not there for this caller. */
export function claimNotFound(claimId: string): BatonError {
  return new BatonError({
    reason: 'CLAIM_NOT_FOUND',
    message: 'the store does not know the claim',
    metadata: { claim_id: claimId },
  });
}

/** The handle of the claim was used, or may have been. */
export function claimSpent(claimId: string): BatonError {
  return new BatonError({
    reason: 'CLAIM_SPENT',
    message: 'the claim was committed or its deadline has passed',
    metadata: { claim_id: claimId },
  });
}

/** A limit of the contract, named as in StoreLimits, would be passed. */
export function limitExceeded(limit: string, max: number): BatonError {
  return new BatonError({
    reason: 'LIMIT_EXCEEDED',
    message: `the limit ${limit} would be passed`,
    metadata: { limit, max: String(max) },
  });
}

/** The tenant has used up its share, named as in StoreLimits. */
export function quotaExceeded(quota: string, max: number): BatonError {
  return new BatonError({
    reason: 'QUOTA_EXCEEDED',
    message: `the tenant has used up its ${quota}`,
    metadata: { quota, max: String(max) },
  });
}

/** The key of a call came with another request before. */
export function idempotencyKeyReused(key: string): BatonError {
  return new BatonError({
    reason: 'IDEMPOTENCY_KEY_REUSED',
    message: 'the idempotency key came with another request before',
    metadata: { idempotency_key: key },
  });
}

/** The server behind the store does not answer, or not in time. */
export function storeUnavailable(message: string, cause?: unknown): BatonError {
  return new BatonError({ reason: 'STORE_UNAVAILABLE', message }, { cause });
}

/** The page token is not one of this run. */
export function pageTokenInvalid(): BatonError {
  return new BatonError({ reason: 'PAGE_TOKEN_INVALID', message: 'not a page token of this run of the store' });
}
