import { BatonError } from '../core/errors.ts';

/** How far a process is: it starts, runs with a `T`, and stops. */
export class Life<T> {
  readonly #running = Promise.withResolvers<T>();
  #current: T | undefined;
  #isStopping = false;

  constructor() {
    // Nobody may wait when a start fails.
    this.#running.promise.catch(() => {});
  }

  /** Undefined while the process starts. */
  get current(): T | undefined {
    return this.#current;
  }

  /** Resolves when the process runs; rejects when its start has failed. */
  get running(): Promise<T> {
    return this.#running.promise;
  }

  /** Everything still runs, and nothing more is wanted. */
  get isStopping(): boolean {
    return this.#isStopping;
  }

  run(current: T): void {
    this.#current = current;
    this.#running.resolve(current);
  }

  /** Refuses who waits for the start; does nothing after {@link run}. */
  fail(): void {
    this.#running.reject(new BatonError({ reason: 'SHUTTING_DOWN', message: 'baton could not start.' }));
  }

  stop(): void {
    this.#isStopping = true;
  }
}
