import type { Clock } from '../clock.ts';

interface Lease {
  readonly ms: number;
  readonly cancel: () => void;
}

/** The leases of registered instances by id; each ends once, unless it is renewed or revoked before. */
export class Leases implements Disposable {
  readonly #clock: Clock;
  readonly #onEnd: (id: string) => void;
  readonly #leases = new Map<string, Lease>();

  constructor(clock: Clock, onEnd: (id: string) => void) {
    this.#clock = clock;
    this.#onEnd = onEnd;
  }

  /** Grants a lease of so many milliseconds, in place of an earlier one. */
  grant(id: string, ms: number): void {
    this.revoke(id);
    const cancel = this.#clock.setTimer(() => {
      this.#leases.delete(id);
      this.#onEnd(id);
    }, ms);
    this.#leases.set(id, { ms, cancel });
  }

  /** Begins the lease anew; its milliseconds, undefined for an instance that needs none. */
  renew(id: string): number | undefined {
    const ms = this.lengthOf(id);
    if (ms !== undefined) this.grant(id, ms);
    return ms;
  }

  /** Milliseconds of the lease, undefined without one. */
  lengthOf(id: string): number | undefined {
    return this.#leases.get(id)?.ms;
  }

  revoke(id: string): void {
    this.#leases.get(id)?.cancel();
    this.#leases.delete(id);
  }

  [Symbol.dispose](): void {
    for (const { cancel } of this.#leases.values()) cancel();
    this.#leases.clear();
  }
}
