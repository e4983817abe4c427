/** When a {@link Breaker} opens, and for how long; times in milliseconds. */
export interface BreakerRules {
  /** Failures in a row that open it; 0: it never opens. */
  readonly failures: number;
  /** Time without calls after it opened, doubled with each trial that fails, up to eight times as long. */
  readonly openMs: number;
}

/** `due`: one call may try whether it works again; `trying`: that call is under way. */
export type BreakerState = 'closed' | 'open' | 'due' | 'trying';

/** How a call went; `neither` where it says nothing of the one that was called. */
export type CallOutcome = 'answered' | 'failed' | 'neither';

const LONGEST = 8;

/**
 * Keeps what does not answer from costing every caller its patience: after some failures in a row it is left alone for a
 * while, and then tried by one call at a time until one is answered. Has no clock: `now` is the caller's, monotonic.
 */
export class Breaker {
  readonly #rules: BreakerRules;
  #failed = 0;
  /** Length of the current opening; 0 while closed. */
  #openMs = 0;
  #openUntil = 0;
  #trying = false;
  #tryUntil = 0;

  constructor(rules: BreakerRules) {
    this.#rules = rules;
  }

  get isOpen(): boolean {
    return this.#openMs > 0;
  }

  /** No failure is remembered: it need not be kept. */
  get isClear(): boolean {
    return !this.isOpen && this.#failed === 0;
  }

  state(now: number): BreakerState {
    if (!this.isOpen) return 'closed';
    // A trial that takes long, as a long reply does, must not keep others from trying.
    if (this.#trying && now < this.#tryUntil) return 'trying';
    return now < this.#openUntil ? 'open' : 'due';
  }

  /** Whether a call may be made; true makes a call to an open one its trial. A true answer is followed by {@link note}. */
  admit(now: number): boolean {
    const state = this.state(now);
    if (state === 'due') this.#try(now);
    return state === 'closed' || state === 'due';
  }

  /** A call is made in any case, because there is nobody else: it counts as a trial. */
  force(now: number): void {
    if (this.isOpen) this.#try(now);
  }

  /** How a call went; tells when that opened or closed it. Of calls to an open one only trials count. */
  note(outcome: CallOutcome, now: number): 'opened' | 'closed' | undefined {
    if (this.isOpen) return this.#noteTrial(outcome, now);
    if (outcome === 'answered') this.#failed = 0;
    if (outcome !== 'failed' || this.#rules.failures === 0) return undefined;
    this.#failed += 1;
    if (this.#failed < this.#rules.failures) return undefined;
    this.#open(this.#rules.openMs, now);
    return 'opened';
  }

  #noteTrial(outcome: CallOutcome, now: number): 'closed' | undefined {
    if (!this.#trying) return undefined;
    this.#trying = false;
    if (outcome === 'failed') this.#open(Math.min(2 * this.#openMs, LONGEST * this.#rules.openMs), now);
    if (outcome !== 'answered') return undefined;
    this.#failed = 0;
    this.#openMs = 0;
    return 'closed';
  }

  #open(ms: number, now: number): void {
    this.#openMs = Math.max(1, ms);
    this.#openUntil = now + ms;
  }

  #try(now: number): void {
    this.#trying = true;
    this.#tryUntil = now + this.#openMs;
  }
}
