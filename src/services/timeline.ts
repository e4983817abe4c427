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
  #isOver = false;

  /** Begins with the phase `plan`; `now` is a clock in milliseconds. */
  constructor(now: () => number, startedAt: number, span: Span | undefined) {
    this.#now = now;
    this.span = span;
    this.startedAt = startedAt;
    this.#since = startedAt;
    this.#phaseSpan = span?.child('plan', 'internal', startedAt);
  }

  /** Milliseconds of each phase so far, the present one not included. */
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
    const plan = this.#parts.plan ?? 0;
    // The router's clock may run a little differently.
    const queued = Math.min(milliseconds, plan);
    this.#parts.plan = plan - queued;
    this.#parts.queue = (this.#parts.queue ?? 0) + queued;
  }

  /** The client gets its first content at this moment, or nothing any more; later calls change nothing. */
  stop(at: number): void {
    if (this.#isOver) return;
    this.#close(at);
    this.#isOver = true;
  }

  #close(at: number): void {
    this.#parts[this.#phase] = (this.#parts[this.#phase] ?? 0) + Math.max(0, at - this.#since);
    this.#phaseSpan?.end(at);
  }
}

const NO_HEADERS: Readonly<Record<string, string>> = {};
