import type { TtftParts, TtftPhase } from '../obs/metrics.ts';
import type { Span } from '../obs/tracer.ts';

/**
 * Where the time of a request goes until its first content: it is in one phase after the other, so that these add up to
 * the time to the first content. A phase may come again, after a failure.
 */
export class Timeline {
  /** Of the whole request; undefined where no traces are wanted. */
  readonly span: Span | undefined;
  readonly startedAt: number;
  readonly #now: () => number;
  readonly #parts: Partial<Record<TtftPhase, number>> = {};
  #phase: TtftPhase = 'plan';
  #since: number;
  #phaseSpan: Span | undefined;
  #queuedMs = 0;
  #isOver = false;

  /** Begins with the phase `plan`; `now` is a clock in milliseconds. */
  constructor(now: () => number, startedAt: number, span: Span | undefined) {
    this.#now = now;
    this.span = span;
    this.startedAt = startedAt;
    this.#since = startedAt;
    this.#phaseSpan = span?.child('plan', 'internal', startedAt);
  }

  /** Milliseconds of each phase that is over; whole after {@link stop}. */
  get parts(): TtftParts {
    return this.#parts;
  }

  /** W3C headers for what is asked of others in this phase. */
  get headers(): Readonly<Record<string, string>> {
    return (this.#isOver ? this.span : this.#phaseSpan)?.headers ?? NO_HEADERS;
  }

  /** The phase that was ends here, and this one begins. */
  enter(phase: TtftPhase): void {
    if (this.#isOver || phase === this.#phase) return;
    const at = this.#now();
    this.#close(at);
    this.#phase = phase;
    this.#since = at;
    this.#phaseSpan = this.span?.child(phase, 'internal', at);
  }

  /** So much of the planning was a wait in the router's queue. */
  queued(milliseconds: number): void {
    this.#queuedMs += milliseconds;
  }

  /** The client gets its first content at this moment, or nothing any more; later calls change nothing. */
  stop(at: number): void {
    if (this.#isOver) return;
    this.#close(at);
    this.#isOver = true;
    const { plan = 0, queue = 0 } = this.#parts;
    // The router tells full milliseconds, by a clock of its own.
    const queuedMs = Math.min(this.#queuedMs, plan);
    this.#parts.plan = plan - queuedMs;
    this.#parts.queue = queue + queuedMs;
  }

  #close(at: number): void {
    this.#parts[this.#phase] = (this.#parts[this.#phase] ?? 0) + Math.max(0, at - this.#since);
    this.#phaseSpan?.end(at);
  }
}

const NO_HEADERS: Readonly<Record<string, string>> = {};
