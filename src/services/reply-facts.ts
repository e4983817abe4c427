import type { EventFacts } from '../core/reply.ts';

/** What a relayed reply told besides its text. */
export interface ReplyFacts {
  readonly status: number;
  readonly usage: EventFacts['usage'];
  /** Raw JSON of the engine's handle for the next turn, if it gave one. */
  readonly kvTransferParams: Uint8Array | undefined;
  /** When the first content went to the client, on the caller's clock. */
  readonly contentAt: number;
  /** Token ids of the prompt and of the reply, as far as the engine told them; only where they were asked for. */
  readonly promptTokenIds: readonly number[] | undefined;
  readonly tokenIds: readonly number[];
  /** How long reading was paused for a slow client, milliseconds. */
  readonly pausedMs: number;
}

type Told = Pick<ReplyFacts, 'usage' | 'kvTransferParams' | 'promptTokenIds' | 'tokenIds'>;

/** Keeps what the events of a reply tell, one after the other, or a whole reply at once. */
export class ReplyNotes {
  readonly #captureTokens: boolean;
  /** Whether each choice that was seen is finished. */
  readonly #choices = new Map<number, boolean>();
  readonly #tokenIds: number[] = [];
  #usage: EventFacts['usage'];
  #kvTransferParams: Uint8Array | undefined;
  #promptTokenIds: readonly number[] | undefined;
  #isDone = false;

  /** @param captureTokens keep the token ids of prompt and reply */
  constructor(captureTokens: boolean) {
    this.#captureTokens = captureTokens;
  }

  /** The end marker has come. */
  get isDone(): boolean {
    return this.#isDone;
  }

  /** Something of the first choice was seen. */
  get hasBegun(): boolean {
    return this.#choices.has(0);
  }

  /** Every choice that began has its finish reason. */
  get hasFinished(): boolean {
    return this.#choices.size > 0 && [...this.#choices.values()].every((isFinished) => isFinished);
  }

  get told(): Told {
    return {
      usage: this.#usage,
      kvTransferParams: this.#kvTransferParams,
      promptTokenIds: this.#promptTokenIds,
      tokenIds: this.#tokenIds,
    };
  }

  note(facts: EventFacts): void {
    if (facts.done) this.#isDone = true;
    if (facts.usage !== undefined) this.#usage = facts.usage;
    // The event is a view of a buffer that is reused.
    if (facts.kvTransferParams !== undefined) this.#kvTransferParams = new Uint8Array(facts.kvTransferParams);
    this.#capture(facts);
    for (const index of facts.seen) if (!this.#choices.has(index)) this.#choices.set(index, false);
    for (const index of facts.finished) this.#choices.set(index, true);
  }

  noteWhole(reply: Pick<EventFacts, 'usage' | 'kvTransferParams' | 'promptTokenIds' | 'tokenIds'>): void {
    this.#usage = reply.usage;
    this.#kvTransferParams = reply.kvTransferParams;
    this.#capture(reply);
  }

  #capture({ promptTokenIds, tokenIds }: Pick<EventFacts, 'promptTokenIds' | 'tokenIds'>): void {
    if (!this.#captureTokens) return;
    this.#promptTokenIds ??= promptTokenIds;
    for (const id of tokenIds ?? []) this.#tokenIds.push(id);
  }
}
