import type { PackedChain } from '../../core/chain.ts';
import type { Candidate } from '../choose-entry.ts';
import type { EntryView, Taken } from '../store.ts';
import { decodeChain, decodeFacts, type Facts } from './codec.ts';
import type { Reply } from './reply.ts';

/** One entry as the scripts tell it, in the order of `view` in the prelude. */
export interface Row {
  readonly entryId: string;
  readonly revision: bigint;
  readonly storedAt: number;
  readonly expiresAt: number;
  readonly claimed: boolean;
  readonly state: string;
  readonly seq: number;
  readonly bytes: number;
  readonly facts: Facts;
}

/** Reads a row. */
export function rowOf(reply: Reply): Row {
  return {
    entryId: reply.text(0),
    revision: BigInt(reply.text(1)),
    storedAt: reply.number(2),
    expiresAt: reply.number(3),
    claimed: reply.number(4) === 1,
    state: reply.text(5),
    seq: reply.number(6),
    bytes: reply.number(7),
    facts: decodeFacts(reply.bytes(8)),
  };
}

/** The entry of a row at the time of the answer. */
export function viewOf(
  row: Pick<Row, 'entryId' | 'revision' | 'storedAt' | 'expiresAt' | 'claimed' | 'facts'>,
  now: number,
): EntryView {
  return {
    ...row.facts,
    entryId: row.entryId,
    claimed: row.claimed,
    revision: row.revision,
    remainingMs: Math.max(0, row.expiresAt - now),
    ageMs: Math.max(0, now - row.storedAt),
  };
}

/** A live entry for the choice of a take; its chain is read only if it is compared. */
export interface LiveRow extends Candidate {
  readonly row: Row;
  readonly chain: PackedChain | undefined;
}

/** Reads a live entry, which ends with its chain if that was asked for. */
export function liveRowOf(reply: Reply): LiveRow {
  const bytes = reply.length > 9 ? reply.bytes(9) : undefined;
  return {
    ...candidateOf(rowOf(reply)),
    get chain(): PackedChain | undefined {
      return bytes === undefined || bytes.length === 0 ? undefined : decodeChain(bytes);
    },
  };
}

/** A live entry for the choice of a take, but for its chain. */
export function candidateOf(row: Row): Omit<LiveRow, 'chain'> {
  return {
    row,
    seq: row.seq,
    state: row.state === 'i' ? 'idle' : 'claimed',
    storedTokens: row.facts.storedTokens,
    owner: row.facts.owner,
    hasChain: row.facts.hasChain,
    chainTokens: row.facts.chainTokens,
  };
}

/** Reads a claim as `told` in the prelude tells it. */
export function takenOf(reply: Reply, now: number): Taken {
  const row = reply.list(3);
  return {
    claimId: reply.text(0),
    claimRemainingMs: Math.max(0, reply.number(1) - now),
    matchedTokens: reply.number(2),
    entry: viewOf(rowOf(row), now),
    handle: row.bytes(9),
  };
}

/** Reads a claim that was just made on what was chosen: its id and deadline, the entry's revision and handle. */
export function givenOf(
  reply: Reply,
  { slot, matchedTokens }: { readonly slot: LiveRow; readonly matchedTokens: number },
): Taken {
  const now = reply.number(1);
  return {
    claimId: reply.text(3),
    claimRemainingMs: Math.max(0, reply.number(4) - now),
    matchedTokens,
    entry: viewOf({ ...slot.row, claimed: true, revision: BigInt(reply.text(5)) }, now),
    handle: reply.bytes(6),
  };
}
