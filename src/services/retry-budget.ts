/** Keeps retries a share of the requests, so that a sick pool is not finished off by its own retries. */
export class RetryBudget {
  readonly #share: number;
  #tokens = RESERVE;

  /** @param percent retries per hundred requests */
  constructor(percent: number) {
    this.#share = percent / 100;
  }

  /** Counts a request. */
  earn(): void {
    this.#tokens = Math.min(RESERVE, this.#tokens + this.#share);
  }

  /** Takes one retry; false when the budget is spent. */
  take(): boolean {
    if (this.#tokens < 1) return false;
    this.#tokens -= 1;
    return true;
  }
}

/** Retries a quiet router may still make at once. */
const RESERVE = 10;
