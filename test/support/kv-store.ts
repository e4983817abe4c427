import { createHash } from 'node:crypto';
import { buildChain, matchChain, packChain, promptOfIds } from '../../src/core/chain.ts';
import { sha256 } from '../../src/services/sha256.ts';
import type { CallId, NewEntry, Prove, StoreKey, StoreLimits } from '../../src/stores/store.ts';
import { STORE_LIMITS } from '../../src/stores/store.ts';

/** Time that only the test moves, milliseconds. */
export interface TestTime {
  now: number;
}

export const KEY: StoreKey = { tenant: 't', model: 'm', adapter: '', cacheSalt: '', conversationId: 'c' };

/** The limits of the contract but for some. */
export function limits(some: Partial<StoreLimits> = {}): StoreLimits {
  return { ...STORE_LIMITS, ...some };
}

/** Ids 0, 1, 2, …; a different `from` gives ids that differ from the first on. */
export function ids(length: number, from = 0): number[] {
  return Array.from({ length }, (_, index) => from + index);
}

let calls = 0;

/** A call id; the fingerprint stands for `request`. */
export function callId(key = `call-${++calls}`, request: unknown = key, scope = 's'): CallId {
  return { scope, key, fingerprint: createHash('sha256').update(JSON.stringify(request)).digest() };
}

/** What {@link newEntry} makes an entry from; the chain covers `tokens` unless they are null. */
export interface EntryParts {
  readonly key?: Partial<StoreKey>;
  readonly tokens?: readonly number[] | null;
  readonly storedTokens?: number;
  readonly instanceId?: string;
  readonly generation?: number;
  readonly compatGroup?: string;
  readonly handle?: Uint8Array;
  readonly ttlMs?: number;
  readonly afterHit?: boolean;
}

/** An entry of 200 tokens on instance d for 450 s, unless the parts say otherwise. */
export function newEntry(parts: EntryParts = {}): NewEntry {
  const key = { ...KEY, ...parts.key };
  const tokens = parts.tokens === undefined ? ids(200) : parts.tokens;
  const storedTokens = parts.storedTokens ?? tokens?.length ?? 200;
  return {
    key,
    owner: {
      instanceId: parts.instanceId ?? 'd',
      engineId: 'engine_dp0',
      life: { processStartSeconds: undefined, engineId: 'engine', generation: parts.generation ?? 1 },
      compatGroup: parts.compatGroup ?? '',
    },
    connector: 'nixl',
    handle: parts.handle ?? Uint8Array.of(1, 2, 3),
    storedTokens,
    ...(tokens === null ? {} : { chain: packChain(buildChain(tokens, key, sha256)) }),
    engineBlockSize: 16,
    blocks: Math.ceil(storedTokens / 16),
    ttlMs: parts.ttlMs ?? 450_000,
    ...(parts.afterHit === true ? { afterHit: true } : {}),
  };
}

/** Proof against a prompt of these ids under a key. */
export function proofOf(tokens: readonly number[], key: StoreKey = KEY): Prove {
  const prompt = promptOfIds(tokens, key, sha256);
  return (chain, limit) => matchChain(prompt, chain, limit);
}
