import { MissReason } from '../../../gen/baton/v1/kv_cache_store_pb.ts';
import { type Choice, chooseSlot } from '../choose-entry.ts';
import { reasonOf } from '../miss-reason.ts';
import { idempotencyKeyReused, revisionMismatch } from '../refusals.ts';
import type { AtRevision, CallId, TakeCall, TakeResult } from '../store.ts';
import type { Reply } from './reply.ts';
import { givenOf, type LiveRow, liveRowOf, takenOf } from './rows.ts';
import type { Argument } from './script-call.ts';

/** What a step of a take answers for good; undefined where the take goes on. */
export function takeAnswer(reply: Reply, id: CallId, choice: Choice<LiveRow> | undefined): TakeResult | undefined {
  switch (reply.text(0)) {
    case 'given':
      return choice?.kind === 'given' ? { kind: 'taken', taken: givenOf(reply, choice) } : undefined;
    case 'reused':
      throw idempotencyKeyReused(id.key);
    case 'taken':
      return { kind: 'taken', taken: takenOf(reply.list(3), reply.number(1)) };
    case 'miss': {
      const [reason, matched] = reply.text(3).slice(1).split('|');
      return { kind: 'miss', reason: reasonOf(Number(reason)), matchedTokens: Number(matched) };
    }
    case 'gone':
      // Once the claim was put back the handle is somebody else's to take.
      return { kind: 'miss', reason: MissReason.TAKEN, matchedTokens: 0 };
    default:
      return undefined;
  }
}

/** What to give, or why nothing and what goes; `looked` is the answer of a look. */
export function choose(call: TakeCall, looked: Reply): Choice<LiveRow> {
  const live = looked.list(3).lists().map(liveRowOf);
  const candidates = call.precondition === undefined ? live : [rowAt(live, call.precondition)];
  const why = looked.list(4);
  const dead = why.length === 0 ? undefined : { seq: why.number(0), reason: reasonOf(why.number(1)) };
  return chooseSlot(candidates, call, dead, ({ chain }) => chain);
}

/** The choice as the claim is told it; `guessed` is the key of one without a look, and whether chains are wanted. */
export function claimArguments(
  choice: Choice<LiveRow>,
  guessed: readonly [string, string | number],
): readonly Argument[] {
  if (choice.kind === 'given') {
    const { entryId, revision } = choice.slot.row;
    return [entryId, String(revision), choice.matchedTokens, 0, ...guessed];
  }
  const leaving = choice.mismatched.flatMap(({ row }) => [row.entryId, String(row.revision)]);
  return ['', '', choice.matchedTokens, choice.reason, ...guessed, ...leaving];
}

function rowAt(live: readonly LiveRow[], wanted: AtRevision): LiveRow {
  const found = live.find(({ row }) => row.entryId === wanted.entryId);
  if (found === undefined || found.state !== 'idle' || found.row.revision !== wanted.revision) {
    throw revisionMismatch(wanted.entryId, found?.row.revision);
  }
  return found;
}
