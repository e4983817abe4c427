import type { ClientSink } from './client-sink.ts';

/** A sink whose reply has begun already: a later start is not sent, and what a leg adds is noticed. */
export class StartedSink implements ClientSink {
  readonly #sink: ClientSink;
  readonly #isStarted: boolean;
  #wrote = false;

  constructor(sink: ClientSink, isStarted: boolean) {
    this.#sink = sink;
    this.#isStarted = isStarted;
  }

  /** Something of the leg went to the client. */
  get wrote(): boolean {
    return this.#wrote;
  }

  get signal(): AbortSignal {
    return this.#sink.signal;
  }

  start(status: number, headers: Readonly<Record<string, string>>): void {
    if (!this.#isStarted) this.#sink.start(status, headers);
  }

  write(bytes: Uint8Array | string, pieces = 1): void {
    this.#wrote = true;
    this.#sink.write(bytes, pieces);
  }

  end(): void {
    this.#sink.end();
  }

  bufferedBytes(): number {
    return this.#sink.bufferedBytes();
  }

  onceDrained(callback: () => void): void {
    this.#sink.onceDrained(callback);
  }
}
