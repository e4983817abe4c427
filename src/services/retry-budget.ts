/** Keeps retries a share of the requests, so that a sick pool is not finished off by its own retries. */
export class RetryBudget {
  readonly #percent: number;
  /** In hundredths of a retry: whole numbers add up exactly. */
  #hundredths: number;

  /** @param percent retries per hundred requests; 0: none at all */
  constructor(percent: number) {
    this.#percent = percent;
    this.#hundredths = percent > 0 ? RESERVE : 0;
  }

  /** Counts a request. */
  earn(): void {
    this.#hundredths = Math.min(RESERVE, this.#hundredths + this.#percent);
  }

  /** Takes one retry; false when the budget is spent. */
  take(): boolean {
    if (this.#hundredths < 100) return false;
    this.#hundredths -= 100;
    return true;
  }
}

/** Retries that a quiet process may make at once, in hundredths. */
const RESERVE = 1000;
