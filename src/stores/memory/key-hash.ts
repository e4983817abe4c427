import { randomBytes } from 'node:crypto';
import type { StoreKey } from '../store.ts';

/** Other ones in each process, so that nobody can choose keys that all meet. */
const [SEED, FACTOR] = [randomBytes(4).readInt32LE(), randomBytes(4).readInt32LE() | 1];

/** A 32-bit number for a key; different keys may share one. */
export function hashOf(key: StoreKey): number {
  let hash = SEED;
  for (const part of [key.tenant, key.model, key.adapter, key.cacheSalt, key.conversationId]) {
    for (let at = 0; at < part.length; at++) {
      hash = Math.imul(hash ^ part.charCodeAt(at), FACTOR);
      hash ^= hash >>> 15;
    }
    hash = Math.imul(hash ^ part.length, 0x9e3779b1);
    hash ^= hash >>> 13;
  }
  return hash;
}
