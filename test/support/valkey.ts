import { expect } from 'vitest';
import type { MissReason } from '../../gen/baton/v1/kv_cache_store_pb.ts';
import { STORES } from '../../src/stores/index.ts';
import type { KvStore, StoreNotice, TakeCall, TakeResult, ValkeyOptions } from '../../src/stores/store.ts';
import { callId, ids, KEY, limits, newEntry, proofOf } from './kv-store.ts';
import type { RedisServer } from './redis.ts';
import { valkeyOn } from './store-backends.ts';

let prefixes = 0;
/** For what a loaded machine, or a server's own timers, may delay. */
export const SLOW = { timeout: 20_000 };

/** A prefix that no other test of the file uses. */
export function nextPrefix(): string {
  return `v${++prefixes}`;
}

/** A store on a server, with what it told its operator; also in `notices`, for one that does not open. */
export async function openOn(
  on: Pick<RedisServer, 'url'>,
  rest: Partial<ValkeyOptions> = {},
  notices: StoreNotice[] = [],
) {
  const store = await STORES.valkey({
    now: () => performance.now(),
    limits: limits(),
    valkey: { ...valkeyOn(on, nextPrefix()), ...rest },
    onNotice: (notice) => void notices.push(notice),
  });
  return { store, notices, [Symbol.asyncDispose]: () => store[Symbol.asyncDispose]() };
}

/** A take of what {@link put} stores. */
export function takeCall(rest: Partial<TakeCall> = {}): TakeCall {
  return {
    id: callId(),
    key: KEY,
    prove: proofOf(ids(300)),
    minTokens: 64,
    compatGroup: '',
    deadlineMs: 60_000,
    ...rest,
  };
}

/** Stores one entry. */
export const put = (store: KvStore, parts: Parameters<typeof newEntry>[0] = {}) =>
  store.put({ id: callId(), entry: newEntry(parts), derivedKey: false });

/** A take that gives nothing. */
export const miss = (reason: MissReason): TakeResult => ({ kind: 'miss', reason, matchedTokens: 0 });

/** What a take answers once the server is back. */
export async function takenOnceBack(store: KvStore): Promise<TakeResult> {
  let result: TakeResult | undefined;
  await expect
    .poll(async () => {
      result = await store.take(takeCall()).catch(() => undefined);
      return result !== undefined;
    }, SLOW)
    .toBe(true);
  if (result === undefined) throw new Error('no answer');
  return result;
}
