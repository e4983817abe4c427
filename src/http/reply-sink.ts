import type { ServerResponse } from 'node:http';
import { DONE_EVENT, errorEvent, type OpenAiError } from '../core/openai-error.ts';
import type { ClientSink } from '../services/client-sink.ts';

/** Settings of {@link ReplySink}. */
export interface ReplySinkOptions {
  /** How long a client may take no byte while some wait for it, milliseconds; 0: for ever. */
  readonly stallMs: number;
  /** Told of every body byte written. */
  readonly onBytes: (bytes: number) => void;
}

const ENDINGS = {
  closed: 'the client closed the connection',
  stalled: 'the client took no byte for too long',
  stopped: 'baton is shutting down',
} as const;

/** Why a reply ended early, the `reason` of the sink's signal. */
export class ReplyCut extends Error {
  override readonly name = 'ReplyCut';
  readonly phase: keyof typeof ENDINGS;

  constructor(phase: keyof typeof ENDINGS) {
    super(ENDINGS[phase]);
    this.phase = phase;
  }
}

/** A client's HTTP reply as a sink: notices when the client leaves or stops reading. */
export class ReplySink implements ClientSink {
  readonly #response: ServerResponse;
  readonly #options: ReplySinkOptions;
  readonly #left = new AbortController();
  #status = 0;
  #isStream = false;
  #pieces = 0;

  constructor(response: ServerResponse, options: ReplySinkOptions) {
    this.#response = response;
    this.#options = options;
    // Node counts a socket as active as long as its write queue shrinks, however slowly.
    if (options.stallMs > 0) response.setTimeout(options.stallMs, () => this.#onSilence());
    response.once('close', () => {
      if (!response.writableFinished) this.#left.abort(new ReplyCut('closed'));
    });
    // A socket error is followed by close; without a listener it would end the process.
    response.on('error', () => undefined);
  }

  get signal(): AbortSignal {
    return this.#left.signal;
  }

  /** Why the reply ended early; undefined while it goes on. */
  get cut(): ReplyCut['phase'] | undefined {
    const reason: unknown = this.#left.signal.reason;
    return reason instanceof ReplyCut ? reason.phase : undefined;
  }

  /** Ends the legs of a reply that would outlive the process; the client is still to be told. */
  stop(): void {
    this.#left.abort(new ReplyCut('stopped'));
  }

  /** Status that was sent; 0 before. */
  get status(): number {
    return this.#status;
  }

  /** In how many pieces the reply came. */
  get pieces(): number {
    return this.#pieces;
  }

  start(status: number, headers: Readonly<Record<string, string>>): void {
    this.#status = status;
    this.#isStream = /^text\/event-stream\b/i.test(headers['content-type'] ?? '');
    if (!this.#response.destroyed) this.#response.writeHead(status, headers);
  }

  write(bytes: Uint8Array | string, pieces = 1): void {
    if (this.#response.destroyed || bytes.length === 0) return;
    this.#options.onBytes(bytes.length);
    this.#pieces += pieces;
    this.#response.write(bytes);
  }

  end(): void {
    if (!this.#response.destroyed) this.#response.end();
  }

  /** Ends a reply that has begun and cannot be completed: in words in a stream, else by a broken connection. */
  endBroken(error: OpenAiError): void {
    if (!this.#isStream) {
      this.#response.destroy();
      return;
    }
    this.write(errorEvent(error));
    this.write(DONE_EVENT);
    this.end();
  }

  bufferedBytes(): number {
    return this.#response.writableLength;
  }

  onceDrained(callback: () => void): void {
    // `drain` follows only a write that filled the socket's own buffer, which may be larger than what baton allows.
    this.#response.write('', callback);
  }

  /** Nothing moved for a while: fine when nothing waits for the client, else it has stopped reading. */
  #onSilence(): void {
    if (this.#response.writableLength === 0) return;
    this.#left.abort(new ReplyCut('stalled'));
    this.#response.destroy();
  }
}
