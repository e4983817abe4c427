import { MissReason } from '../../gen/baton/v1/kv_cache_store_pb.ts';
import type { Slot } from './memory-slots.ts';
import type { TakeCall } from './store.ts';

/** What a take gives, or why it gives nothing and which entries its prompt has ruled out. */
export type Choice =
  | { readonly kind: 'given'; readonly slot: Slot; readonly matchedTokens: number }
  | {
      readonly kind: 'miss';
      readonly reason: MissReason;
      readonly matchedTokens: number;
      readonly mismatched: readonly Slot[];
    };

/**
 * Chooses among the live entries of a key (oldest first): the longest proven prefix, among equals the entry with the
 * fewest tokens beyond it, then the newest. Without a prompt the newest that is long enough. Entries of another compat
 * group, and in a verified take those without a chain, count as not there. Changes nothing.
 */
export function chooseSlot(
  live: readonly Slot[],
  call: Pick<TakeCall, 'prove' | 'minTokens' | 'compatGroup'>,
  newestDead: { readonly seq: number; readonly reason: MissReason } | undefined,
): Choice {
  const mismatched: Slot[] = [];
  let best: { slot: Slot; matched: number } | undefined;
  let bestMismatch = 0;
  let newest = newestDead;
  const note = (slot: Slot, reason: MissReason): void => {
    if (newest === undefined || slot.seq > newest.seq) newest = { seq: slot.seq, reason };
  };
  for (const slot of live.toReversed()) {
    if (!isReadableBy(slot, call.compatGroup)) continue;
    if (call.prove !== undefined && !slot.hasChain) continue;
    if (slot.state !== 'idle') {
      note(slot, MissReason.TAKEN);
      continue;
    }
    const tokens = provableTokens(slot, call.prove !== undefined);
    if (tokens < call.minTokens) {
      note(slot, MissReason.TOO_SMALL);
      continue;
    }
    if (call.prove === undefined || slot.chain === undefined) return { kind: 'given', slot, matchedTokens: 0 };
    // An entry that cannot beat the best is not worth the hashing.
    if (best !== undefined && tokens < best.matched) continue;
    const matched = call.prove(slot.chain, tokens);
    if (matched < call.minTokens) {
      mismatched.push(slot);
      bestMismatch = Math.max(bestMismatch, matched);
    } else if (
      best === undefined ||
      matched > best.matched ||
      (matched === best.matched && isTighter(slot, best.slot))
    ) {
      best = { slot, matched };
    }
  }
  if (best !== undefined) return { kind: 'given', slot: best.slot, matchedTokens: best.matched };
  if (mismatched.length > 0) {
    return { kind: 'miss', reason: MissReason.PREFIX_MISMATCH, matchedTokens: bestMismatch, mismatched };
  }
  const reason = newest?.reason ?? MissReason.NEVER_STORED;
  return { kind: 'miss', reason, matchedTokens: 0, mismatched };
}

function isReadableBy(slot: Slot, compatGroup: string): boolean {
  const own = slot.about.owner.compatGroup;
  return compatGroup === '' || own === '' || own === compatGroup;
}

function provableTokens(slot: Slot, verified: boolean): number {
  return verified ? Math.min(slot.about.storedTokens, slot.chainTokens) : slot.about.storedTokens;
}

function isTighter(slot: Slot, than: Slot): boolean {
  return slot.about.storedTokens < than.about.storedTokens;
}
