import type { ReuseOutcome } from '../../gen/baton/v1/router_pb.ts';

/** What a router remembers of the last turn of a conversation. */
export interface RememberedTurn {
  readonly prefillId: string | undefined;
  readonly decodeId: string | undefined;
  /** Why the turn left no handle; undefined if it left one. */
  readonly noHandle: ReuseOutcome | undefined;
}

/** Last turns by conversation, least recently used first out; only hints: losing one costs speed, never rightness. */
export class ConversationMemory {
  readonly #limit: number;
  readonly #turns = new Map<string, RememberedTurn>();

  constructor(limit = 100_000) {
    this.#limit = limit;
  }

  get(key: string): RememberedTurn | undefined {
    const turn = this.#turns.get(key);
    if (turn !== undefined) {
      this.#turns.delete(key);
      this.#turns.set(key, turn);
    }
    return turn;
  }

  set(key: string, turn: RememberedTurn): void {
    this.#turns.delete(key);
    this.#turns.set(key, turn);
    if (this.#turns.size <= this.#limit) return;
    for (const oldest of this.#turns.keys()) {
      this.#turns.delete(oldest);
      return;
    }
  }
}
