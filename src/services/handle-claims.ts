import type { Client } from '@connectrpc/connect';
import type {
  EntryKey,
  GetEntryResponse,
  KVCacheStore,
  TakeEntryRequest,
  TakeEntryResponse,
} from '../../gen/baton/v1/kv_cache_store_pb.ts';

/** Longest time for asking after a claim, off every client's path, and for the last words at a stop. */
const GIVE_BACK_MS = 2000;

/**
 * The claims of one router on stored handles, from the look before a take to their end. Disposing waits a moment until the
 * store has heard of the ends: a handle that was to be put back would else stay claimed until its deadline.
 */
export class HandleClaims implements AsyncDisposable {
  readonly #store: Client<typeof KVCacheStore>;
  readonly #settings: { readonly storeMs: number };
  /** What the store is being told of ends. */
  readonly #ends = new Set<Promise<unknown>>();

  /** @param settings longest wait for the store on a client's path, milliseconds, 0 = none; read when it is used */
  constructor(store: Client<typeof KVCacheStore>, settings: { readonly storeMs: number }) {
    this.#store = store;
    this.#settings = settings;
  }

  /** What is kept under a key, with nothing claimed; undefined where the store does not answer. */
  async peek(key: EntryKey, signal: AbortSignal): Promise<GetEntryResponse | undefined> {
    return this.#store.getEntry({ selector: { case: 'key', value: key } }, this.#budget(signal)).catch(() => undefined);
  }

  /** Claims an entry; undefined where the store does not answer, and then nothing stays claimed. */
  async take(message: TakeEntryRequest, signal: AbortSignal): Promise<TakeEntryResponse | undefined> {
    try {
      return await this.#store.takeEntry(message, this.#budget(signal));
    } catch {
      this.#giveBack(message);
      return undefined;
    }
  }

  /** Ends a claim whose handle was used or must not be; the deadline ends it if the store does not hear this. */
  commit(claimId: string): void {
    this.#tell(this.#store.commitClaim({ claimId }));
  }

  /** Puts a handle back that provably never reached an engine. */
  release(claimId: string, reason: string): void {
    this.#tell(this.#store.releaseClaim({ claimId, reason }));
  }

  /** A take whose answer got lost may have happened: its repeat tells the claim, which would else stay open. */
  #giveBack(message: TakeEntryRequest): void {
    const repeated = this.#store.takeEntry(message, { timeoutMs: GIVE_BACK_MS });
    this.#tell(
      repeated.then(({ result }) => {
        if (result.case === 'taken') this.release(result.value.claimId, 'answer_lost');
      }),
    );
  }

  async [Symbol.asyncDispose](): Promise<void> {
    const limit = Promise.withResolvers<void>();
    const timer = setTimeout(limit.resolve, GIVE_BACK_MS);
    await Promise.race([this.#allTold(), limit.promise]);
    clearTimeout(timer);
  }

  /** A repeated take that is answered has its claim put back then. */
  async #allTold(): Promise<void> {
    while (this.#ends.size > 0) await Promise.all(this.#ends);
  }

  #tell(end: Promise<unknown>): void {
    const told = end.catch(() => undefined).finally(() => this.#ends.delete(told));
    this.#ends.add(told);
  }

  #budget(signal: AbortSignal): { signal: AbortSignal; timeoutMs?: number } {
    const { storeMs } = this.#settings;
    return storeMs === 0 ? { signal } : { signal, timeoutMs: storeMs };
  }
}
