import { pause } from './pause.ts';

/** How a router in another process is asked; times in milliseconds. */
export interface RouterCheckOptions {
  /** Resolves with whether it serves; rejects where it does not answer. */
  readonly ask: (signal: AbortSignal) => Promise<boolean>;
  /** Told of each question that got no answer. */
  readonly onFailure: (error: unknown) => void;
  readonly now: () => number;
  /** Between two questions. Default 1,000. */
  readonly everyMs?: number;
  /** For an answer. */
  readonly timeoutMs: number;
}

/** Knows whether the router of this process answers: one that is stopped keeps its connections, and answers nothing. */
export class RouterCheck implements AsyncDisposable {
  readonly #options: RouterCheckOptions;
  readonly #stop = new AbortController();
  readonly #running: Promise<void>;
  #wait = new AbortController();
  #isAway = true;
  #answeredAt = Number.NEGATIVE_INFINITY;

  constructor(options: RouterCheckOptions) {
    this.#options = options;
    this.#running = this.#run();
  }

  /** True until the first answer, and whenever the last question got none, or the answer that it serves no more. */
  get isAway(): boolean {
    return this.#isAway;
  }

  /** When it answered last. */
  get answeredAt(): number {
    return this.#answeredAt;
  }

  /** A call to it failed: asks at once. */
  askNow(): void {
    this.#wait.abort();
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.#stop.abort();
    this.#wait.abort();
    await this.#running;
  }

  async #run(): Promise<void> {
    const { ask, everyMs = 1000, now, onFailure, timeoutMs } = this.#options;
    const { signal } = this.#stop;
    while (!signal.aborted) {
      const limit = AbortSignal.timeout(timeoutMs);
      try {
        this.#isAway = !(await ask(AbortSignal.any([signal, limit])));
        this.#answeredAt = now();
      } catch (error) {
        this.#isAway = true;
        if (!signal.aborted) onFailure(error);
      }
      this.#wait = new AbortController();
      if (!signal.aborted) await pause(this.#isAway ? everyMs / 4 : everyMs, this.#wait.signal);
    }
  }
}
