import type { RequestFacts, ReuseOutcome } from '../../gen/baton/v1/router_pb.ts';
import { lookupIds, mayBeFirst } from './conversation-keys.ts';

/** What a router remembers of the last turn of a conversation. */
export interface RememberedTurn {
  readonly prefillId: string | undefined;
  readonly decodeId: string | undefined;
  /** Why the turn left no handle; undefined if it left one. */
  readonly noHandle: ReuseOutcome | undefined;
  /** Its handle is found under its very messages alone. Default false. */
  readonly hasMedia?: boolean;
}

/** Last turns by conversation, least recently used first out; only hints: losing one costs speed, never rightness. */
export class ConversationMemory {
  readonly #limit: number;
  readonly #turns = new Map<string, RememberedTurn>();

  constructor(limit = 100_000) {
    this.#limit = limit;
  }

  /** The turn before, as far as this router saw it. */
  get(facts: RequestFacts): RememberedTurn | undefined {
    if (mayBeFirst(facts)) return undefined;
    for (const id of lookupIds(facts)) {
      const key = keyOf(facts, id);
      const turn = this.#turns.get(key);
      if (turn === undefined) continue;
      this.#turns.delete(key);
      this.#turns.set(key, turn);
      return turn;
    }
    return undefined;
  }

  /** The last turn of the conversation that the facts name. */
  set(facts: RequestFacts, turn: RememberedTurn): void {
    const key = keyOf(facts, facts.conversationId);
    this.#turns.delete(key);
    this.#turns.set(key, turn);
    if (this.#turns.size <= this.#limit) return;
    for (const oldest of this.#turns.keys()) {
      this.#turns.delete(oldest);
      return;
    }
  }
}

function keyOf({ tenant, model, cacheSalt }: RequestFacts, conversationId: string): string {
  return JSON.stringify([tenant, model, cacheSalt, conversationId]);
}
