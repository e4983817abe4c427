import { create } from '@bufbuild/protobuf';
import { afterEach, beforeEach, expect, test, vi } from 'vitest';
import {
  KVCacheStore,
  ReleaseClaimResponseSchema,
  TakeEntryRequestSchema,
  TakeEntryResponseSchema,
} from '../../gen/baton/v1/kv_cache_store_pb.ts';
import { createDirectClient } from '../../src/rpc/direct-client.ts';
import { HandleClaims } from '../../src/services/handle-claims.ts';

beforeEach(() => {
  vi.useFakeTimers();
});
afterEach(() => {
  vi.useRealTimers();
});

/** Claims at a store that answers a take, and what is given back, so many milliseconds later; and what it was told by when. */
function claimsAt(delays: { readonly take: number; readonly release: number }) {
  const told: string[] = [];
  const later = (ms: number) => new Promise<void>((resolve) => setTimeout(resolve, ms));
  const store = createDirectClient(KVCacheStore, {
    takeEntry: async () => {
      await later(delays.take);
      return create(TakeEntryResponseSchema, { result: { case: 'taken', value: { claimId: 'claim' } } });
    },
    releaseClaim: async ({ claimId, reason }) => {
      await later(delays.release);
      told.push(`${claimId} ${reason}`);
      return create(ReleaseClaimResponseSchema);
    },
  });
  const claims = new HandleClaims(store, { storeMs: 20 });
  const stop = () => claims[Symbol.asyncDispose]().then(() => void told.push('stopped'));
  return { told, claims, stop };
}

test('a stop waits until the store has heard what is given back', async () => {
  const { told, claims, stop } = claimsAt({ take: 0, release: 300 });
  claims.release('one', 'not_sent');
  const stopped = stop();
  await vi.advanceTimersByTimeAsync(300);
  await stopped;
  expect(told).toEqual(['one not_sent', 'stopped']);
});

test('it waits for a take too whose answer came too late, and puts that claim back', async () => {
  const { told, claims, stop } = claimsAt({ take: 100, release: 100 });
  const taken = claims.take(create(TakeEntryRequestSchema), new AbortController().signal);
  await vi.advanceTimersByTimeAsync(20);
  expect(await taken).toBeUndefined();
  const stopped = stop();
  await vi.advanceTimersByTimeAsync(200);
  await stopped;
  expect(told).toEqual(['claim answer_lost', 'stopped']);
});

test('a store that is silent does not hold a stop up for long, and nothing to tell not at all', async () => {
  const { told, claims, stop } = claimsAt({ take: 0, release: 3_600_000 });
  await stop();
  claims.release('one', 'not_sent');
  const stopped = stop();
  await vi.advanceTimersByTimeAsync(5000);
  await stopped;
  expect(told).toEqual(['stopped', 'stopped']);
});
