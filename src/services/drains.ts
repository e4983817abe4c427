import type { Target } from '../../gen/baton/v1/router_pb.ts';
import { type Edits, spliceObject } from '../core/json-scan.ts';
import type { NoticeWaiter } from './first-token-deps.ts';
import type { GenerateRequest } from './hand-over.ts';
import { type OneTokenDeps, runOneTokenLeg } from './one-token-leg.ts';

/** KV on its way from one P to one D. */
export interface Transfer {
  readonly waiter: NoticeWaiter;
  readonly decode: Target;
  readonly request: GenerateRequest;
  /** Edits of a request that takes the KV out of D's buffer, once P's first token is known or given up. */
  readonly drainEdits: () => Edits;
  /** P has answered well: it has probably written, whether or not its notices come. */
  readonly isAnswered: () => boolean;
  /** Gives D's slots back. */
  readonly release: () => void;
}

/** What became of KV that nobody came for: `nothing_sent` where there is no sign that P has written any. */
export type DrainResult = 'sent' | 'failed' | 'nothing_sent';

/** What {@link Drains} works with. */
export interface DrainDeps extends OneTokenDeps {
  /** How long room in D's buffer is kept for a transfer of which nothing is heard, milliseconds. */
  readonly roomMs: number;
  /** How long its notices are waited for, milliseconds. */
  readonly lateMs: number;
  readonly observe: (result: DrainResult) => void;
}

/** Longest time for one drain; it is a request for one token. */
const DRAIN_MS = 30_000;
const ATTEMPTS = 2;

/**
 * Takes KV out of decode engines' buffers when no request came for it: such a buffer is emptied only by a request that
 * retrieves. Works in the background; what it cannot reach stays in the engine until that restarts.
 */
export class Drains implements AsyncDisposable {
  readonly #deps: DrainDeps;
  readonly #stop = new AbortController();
  readonly #running = new Set<Promise<void>>();

  constructor(deps: DrainDeps) {
    this.#deps = deps;
  }

  /** Ends legs and drains when the process stops; a prefill leg goes on under it when its client has left. */
  get signal(): AbortSignal {
    return this.#stop.signal;
  }

  /** Transfers that are still looked after. */
  get pending(): number {
    return this.#running.size;
  }

  /** D has read the KV, or none was written. */
  settle({ waiter, release }: Transfer): void {
    waiter.cancel();
    release();
  }

  /** Nobody comes for the KV: frees it when it should be there; `after` is P's leg where that still runs. */
  free(transfer: Transfer, after: Promise<unknown> = Promise.resolve()): void {
    this.#run(transfer, async () => {
      await after;
      const room = setTimeout(transfer.release, this.#deps.roomMs);
      room.unref();
      const isThere = await this.#notices(transfer.waiter);
      if (isThere || (transfer.isAnswered() && !this.#stop.signal.aborted)) await this.#drain(transfer);
      else this.#deps.observe('nothing_sent');
      clearTimeout(room);
    });
  }

  /** D was asked before the notices came and has taken what was there: frees only what comes afterwards. */
  freeLate(transfer: Transfer): void {
    transfer.release();
    this.#run(transfer, async () => {
      if (await this.#notices(transfer.waiter)) await this.#drain(transfer);
    });
  }

  #run(transfer: Transfer, act: () => Promise<void>): void {
    const work = act().finally(() => {
      this.settle(transfer);
      this.#running.delete(work);
    });
    this.#running.add(work);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.#stop.abort();
    await Promise.all(this.#running);
  }

  async #drain(transfer: Transfer): Promise<void> {
    for (let attempt = 1; attempt <= ATTEMPTS && !this.#stop.signal.aborted; attempt++) {
      const result = await this.#send(transfer);
      if (result) return this.#deps.observe('sent');
    }
    this.#deps.observe('failed');
  }

  #notices(waiter: NoticeWaiter): Promise<boolean> {
    if (waiter.isComplete) return Promise.resolve(true);
    const { signal } = this.#stop;
    return new Promise((resolve) => {
      const settle = () => {
        clearTimeout(timer);
        signal.removeEventListener('abort', settle);
        resolve(waiter.isComplete);
      };
      const timer = setTimeout(settle, this.#deps.lateMs);
      timer.unref();
      if (signal.aborted) settle();
      else signal.addEventListener('abort', settle, { once: true });
      void waiter.arrived.then(settle);
    });
  }

  #send({ decode: { instanceId, url }, request, drainEdits }: Transfer): Promise<boolean> {
    const { authorization, body, scan } = request;
    return runOneTokenLeg(this.#deps, {
      instanceId,
      url,
      authorization,
      name: 'baton-drain',
      body: spliceObject(body, scan, drainEdits()),
      timeoutMs: DRAIN_MS,
      signal: this.#stop.signal,
    });
  }
}
