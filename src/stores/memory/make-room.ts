import type { BatonError } from '../../core/errors.ts';
import { entryExists, limitExceeded, quotaExceeded } from '../refusals.ts';
import type { PutCall, StoreLimits } from '../store.ts';
import type { StoreCounters } from '../store-counters.ts';
import type { Lifecycle } from './life.ts';
import { type Slot, slotAt } from './slot.ts';

/** Most due entries and claims that a put clears away before it refuses. */
const QUOTA_SWEEP = 2048;

interface Room {
  readonly life: Lifecycle;
  readonly counters: StoreCounters;
  readonly limits: StoreLimits;
}

/**
 * Makes room for one more entry of `bytes`: what it replaces, what is too much for its key and what the byte bound costs
 * goes to the release queue. Returns the numbers of those of the entry's tenant. Where it refuses, nothing is changed.
 */
export function makeRoom(room: Room, call: PutCall, bytes: number, now: number): readonly number[] {
  const { life, counters, limits } = room;
  if (bytes > limits.entryBytes) throw limitExceeded('entry_bytes', limits.entryBytes);
  const { tenant } = call.entry.key;
  const live = life.liveOfKey(call.entry.key, now);
  const leaving = slotsToReplace(call, live);
  const evicted = tooManyOfKey(call, live, leaving, limits);
  checkQuota(room, tenant, bytes, [...leaving, ...evicted], now);
  const { totalBytes } = limits;
  while (life.table.claimedBytes + bytes > totalBytes && life.sweepOne(now));
  // Claimed entries stay whatever happens, so this is known before anything is changed.
  if (life.table.claimedBytes + bytes > totalBytes) throw limitExceeded('total_bytes', totalBytes);
  const displaced: number[] = [];
  const displace = (slot: Slot): void => {
    if (slot.tenant === tenant) displaced.push(slot.seq);
    life.enqueue(slot, now);
  };
  const evict = (slot: Slot): void => {
    counters.evicted(slot.tenant);
    displace(slot);
  };
  for (const slot of leaving) displace(slot);
  for (const slot of evicted) evict(slot);
  while (life.table.bytes + bytes > totalBytes) {
    // What is over by itself is no eviction.
    if (life.sweepOne(now)) continue;
    const next = life.table.nextToExpire('idle');
    if (next === undefined) break;
    if (life.alive(next, now) !== undefined) evict(next);
  }
  return displaced;
}

function slotsToReplace({ precondition }: PutCall, live: readonly Slot[]): readonly Slot[] {
  if (precondition === undefined) return [];
  if (precondition !== 'absent') return [slotAt(live, precondition)];
  const newest = live.at(-1);
  if (newest === undefined) return [];
  throw entryExists(newest.id);
}

/** The oldest idle entries of the key that have to go for one more. */
function tooManyOfKey(
  call: PutCall,
  live: readonly Slot[],
  leaving: readonly Slot[],
  limits: StoreLimits,
): readonly Slot[] {
  const perKey = call.derivedKey ? limits.entriesPerDerivedKey : limits.entriesPerKey;
  const tooMany = live.length - leaving.length + 1 - perKey;
  const idle = live.filter((slot) => slot.state === 'idle' && !leaving.includes(slot));
  if (tooMany > idle.length) {
    throw limitExceeded(call.derivedKey ? 'entries_per_derived_key' : 'entries_per_key', perKey);
  }
  return idle.slice(0, Math.max(0, tooMany));
}

/** Throws QUOTA_EXCEEDED where one more entry of the tenant, with `leaving` gone, would be over its share. */
function checkQuota(
  { life, limits }: Room,
  tenant: string,
  bytes: number,
  leaving: readonly Slot[],
  now: number,
): void {
  const { tenantEntries, tenantBytes } = limits;
  const freed = leaving.reduce((sum, slot) => sum + slot.bytes, 0);
  const excess = (): (() => BatonError) | undefined => {
    const held = life.table.tenant(tenant);
    if (held.entries - leaving.length + 1 > tenantEntries) return () => quotaExceeded('tenant_entries', tenantEntries);
    if (held.bytes - freed + bytes > tenantBytes) return () => quotaExceeded('tenant_bytes', tenantBytes);
    return undefined;
  };
  let refusal = excess();
  // What is over by itself counts no more; a call clears only so much.
  for (let left = QUOTA_SWEEP; refusal !== undefined && left > 0 && life.sweepOne(now); left--) refusal = excess();
  if (refusal !== undefined) throw refusal();
}
