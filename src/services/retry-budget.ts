/** Settings of a {@link RetryBudget}, read when they are used. */
export interface RetrySettings {
  /** Retries per hundred requests; 0: none at all. */
  readonly budgetPercent: number;
}

/** Keeps retries a share of the requests, so that a sick pool is not finished off by its own retries. */
export class RetryBudget {
  readonly #settings: RetrySettings;
  readonly #now: () => number;
  /** In hundredths of a retry: whole numbers add up exactly. */
  #hundredths = RESERVE;
  /** Earned in the running window and in the one before. */
  #earned = 0;
  #earnedBefore = 0;
  #windowEnd = 0;

  constructor(settings: RetrySettings, now: () => number) {
    this.#settings = settings;
    this.#now = now;
  }

  /** Counts a request. */
  earn(): void {
    this.#turn();
    const { budgetPercent } = this.#settings;
    this.#earned += budgetPercent;
    // What is saved grows with the traffic: an engine that dies takes its share of it along at once.
    const most = Math.max(RESERVE, this.#earned + this.#earnedBefore);
    this.#hundredths = Math.min(most, this.#hundredths + budgetPercent);
  }

  /** Takes one retry; false when the budget is spent. */
  take(): boolean {
    if (this.#settings.budgetPercent === 0 || this.#hundredths < 100) return false;
    this.#hundredths -= 100;
    return true;
  }

  #turn(): void {
    const now = this.#now();
    if (now < this.#windowEnd) return;
    this.#earnedBefore = now < this.#windowEnd + WINDOW_MS ? this.#earned : 0;
    this.#earned = 0;
    this.#windowEnd = now + WINDOW_MS;
  }
}

/** Retries that a quiet process may make at once, in hundredths. */
const RESERVE = 1000;
/** A busy one may save what it earned in this time, twice at most. */
const WINDOW_MS = 10_000;
