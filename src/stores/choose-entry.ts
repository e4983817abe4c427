import { MissReason } from '../../gen/baton/v1/kv_cache_store_pb.ts';
import type { PackedChain } from '../core/chain.ts';
import type { TakeCall } from './store.ts';

/** What the choice looks at of a live entry; `seq` is the order of the puts. */
export interface Candidate {
  readonly seq: number;
  readonly state: string;
  readonly storedTokens: number;
  readonly owner: { readonly compatGroup: string };
  readonly hasChain: boolean;
  readonly chainTokens: number;
}

/** What a take gives, or why it gives nothing and which entries its prompt has ruled out for good. */
export type Choice<S> =
  | { readonly kind: 'given'; readonly slot: S; readonly matchedTokens: number }
  | {
      readonly kind: 'miss';
      readonly reason: MissReason;
      readonly matchedTokens: number;
      readonly mismatched: readonly S[];
    };

/**
 * Chooses among the live entries of a key (oldest first): the longest proven prefix, among equals the entry with the
 * fewest tokens beyond it, then the newest. Without a prompt the newest that is long enough. Entries of another compat
 * group, and in a verified take those without a chain, count as not there. Changes nothing.
 */
export function chooseSlot<S extends Candidate>(
  live: readonly S[],
  call: Pick<TakeCall, 'prove' | 'minTokens' | 'keepTokens' | 'compatGroup'>,
  newestDead: { readonly seq: number; readonly reason: MissReason } | undefined,
  chainOf: (slot: S) => PackedChain | undefined,
): Choice<S> {
  const keepTokens = call.keepTokens ?? call.minTokens;
  const mismatched: S[] = [];
  let best: { slot: S; matched: number } | undefined;
  let bestMismatch: number | undefined;
  let newest = newestDead;
  const note = (slot: S, reason: MissReason): void => {
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
    if (call.prove === undefined) return { kind: 'given', slot, matchedTokens: 0 };
    // An entry that cannot beat the best is not worth the hashing.
    if (best !== undefined && tokens < best.matched) continue;
    const chain = chainOf(slot);
    const matched = chain === undefined ? 0 : call.prove(chain, tokens);
    if (matched < call.minTokens) {
      if (matched < keepTokens) mismatched.push(slot);
      bestMismatch = Math.max(bestMismatch ?? 0, matched);
    } else if (
      best === undefined ||
      matched > best.matched ||
      (matched === best.matched && isTighter(slot, best.slot))
    ) {
      best = { slot, matched };
    }
  }
  if (best !== undefined) return { kind: 'given', slot: best.slot, matchedTokens: best.matched };
  if (bestMismatch !== undefined) {
    return { kind: 'miss', reason: MissReason.PREFIX_MISMATCH, matchedTokens: bestMismatch, mismatched };
  }
  const reason = newest?.reason ?? MissReason.NEVER_STORED;
  return { kind: 'miss', reason, matchedTokens: 0, mismatched };
}

function isReadableBy(slot: Candidate, compatGroup: string): boolean {
  const own = slot.owner.compatGroup;
  return compatGroup === '' || own === '' || own === compatGroup;
}

function provableTokens(slot: Candidate, verified: boolean): number {
  return verified ? Math.min(slot.storedTokens, slot.chainTokens) : slot.storedTokens;
}

function isTighter(slot: Candidate, than: Candidate): boolean {
  return slot.storedTokens < than.storedTokens;
}
