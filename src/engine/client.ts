import { subscribe } from 'node:diagnostics_channel';
import type { IncomingHttpHeaders } from 'node:http';
import type { Socket } from 'node:net';
import type { Transform } from 'node:stream';
import { createBrotliDecompress, createGunzip, createInflate } from 'node:zlib';
import { Client, type Dispatcher, Pool } from 'undici';

/** One HTTP call to an engine. */
export interface LegRequest {
  /** Base URL of the instance, path prefix included. */
  readonly url: string;
  readonly method: 'GET' | 'POST';
  /** Path below the base URL, with a leading slash. */
  readonly path: string;
  readonly headers: Readonly<Record<string, string>>;
  readonly body: Uint8Array | null;
  /** True: a connection of its own, closed afterwards; for repeats after a reset of a reused connection. */
  readonly fresh?: boolean;
  /** Told when the connection is there, right before the first byte. */
  readonly onConnected?: () => void;
  /** Asked when the connection is there: true ends the leg before its first byte, as not sent. */
  readonly isTooLate?: () => boolean;
}

/** Why a leg ended without a whole reply. */
export interface LegFailure {
  /**
   * `not_sent`: connect, DNS or TLS error, no request byte was written; `too_late`: connected, and not sent because
   * `isTooLate` said so; `aborted`: this side gave up.
   */
  readonly kind: 'not_sent' | 'too_late' | 'reset' | 'aborted';
  /** The connection had served a request before. */
  readonly reused: boolean;
  /** A reply byte had arrived. */
  readonly replied: boolean;
  readonly cause: Error;
}

/** Receives a leg's reply. Exactly one of `end` and `fail` is called, last. */
export interface LegHandler {
  readonly head: (status: number, headers: IncomingHttpHeaders) => void;
  /** A piece of the (decoded) body; the bytes are the handler's to keep. */
  readonly data: (chunk: Uint8Array) => void;
  readonly end: () => void;
  readonly fail: (failure: LegFailure) => void;
}

/** Controls a running leg. Every method may be called at any time, also after the end. */
export interface LegControl {
  readonly pause: () => void;
  readonly resume: () => void;
  /** Closes the connection: the engine sees the client leave and stops generating. */
  readonly abort: (reason: Error) => void;
}

/** Timeouts of {@link EngineClient}, read for each leg; milliseconds. */
export interface EngineClientOptions {
  readonly connectMs: number;
  /** How long an idle connection is kept; below the engines' 5 s (uvicorn's default). 0: none is, each leg has its own. */
  readonly keepAliveMs: number;
}

/**
 * HTTP to engines: one connection pool per origin, bodies and replies as bytes, no timeout but the two of its options:
 * how long a leg may take is the caller's decision.
 */
export class EngineClient implements AsyncDisposable {
  readonly #options: EngineClientOptions;
  readonly #pools = new Map<string, OriginPool>();
  /** Those that are closed when their legs have ended. */
  readonly #ending = new Set<Dispatcher>();

  constructor(options: EngineClientOptions) {
    this.#options = options;
    watchSockets();
  }

  /** Starts a leg. */
  send(request: LegRequest, handler: LegHandler): LegControl {
    const { origin, pathname } = new URL(request.url);
    const leg = new Leg(handler, request);
    const fresh = request.fresh === true || this.#options.keepAliveMs === 0;
    const dispatcher = fresh ? this.#freshClient(origin, leg) : this.#pool(origin);
    dispatcher.dispatch(
      {
        path: pathname.replace(/\/$/, '') + request.path,
        method: request.method,
        headers: request.headers,
        body: request.body,
        headersTimeout: 0,
        bodyTimeout: 0,
        ...(fresh ? { reset: true } : {}),
      },
      leg,
    );
    return leg;
  }

  /** Closes every connection, running legs included. */
  async [Symbol.asyncDispose](): Promise<void> {
    const all = [...[...this.#pools.values()].map(({ pool }) => pool), ...this.#ending];
    this.#pools.clear();
    this.#ending.clear();
    await Promise.all(all.map((dispatcher) => dispatcher.destroy()));
  }

  #pool(origin: string): Pool {
    const { connectMs, keepAliveMs } = this.#options;
    const known = this.#pools.get(origin);
    if (known?.connectMs === connectMs && known.keepAliveMs === keepAliveMs) return known.pool;
    if (known !== undefined) this.#end(known.pool);
    const pool = new Pool(origin, this.#dispatcherOptions());
    this.#pools.set(origin, { pool, connectMs, keepAliveMs });
    return pool;
  }

  /** Lets the legs of a pool with other times end, and then closes its connections. */
  #end(pool: Pool): void {
    this.#ending.add(pool);
    void pool
      .close()
      .catch(() => undefined)
      .finally(() => this.#ending.delete(pool));
  }

  #freshClient(origin: string, leg: Leg): Client {
    const client = new Client(origin, this.#dispatcherOptions());
    this.#ending.add(client);
    leg.onSettled = () => {
      this.#ending.delete(client);
      void client.close().catch(() => undefined);
    };
    return client;
  }

  #dispatcherOptions() {
    const { connectMs, keepAliveMs } = this.#options;
    return {
      allowH2: false,
      pipelining: 1,
      headersTimeout: 0,
      bodyTimeout: 0,
      ...(keepAliveMs === 0 ? {} : { keepAliveTimeout: keepAliveMs, keepAliveMaxTimeout: keepAliveMs }),
      connect: { timeout: connectMs },
    };
  }
}

/** A pool with the times that it was made with. */
interface OriginPool extends EngineClientOptions {
  readonly pool: Pool;
}

type Starting = { leg: Leg | undefined };
const starting: Starting = { leg: undefined };
const served = new WeakSet<Socket>();
let watching = false;

/**
 * undici does not tell a handler which socket it got. It publishes `sendHeaders` with the socket in the same tick, right
 * after it called the handler's `onRequestStart`, which is enough to know whether the connection was reused.
 */
function watchSockets(): void {
  if (watching) return;
  watching = true;
  subscribe('undici:client:sendHeaders', (message) => {
    const { socket } = message as { readonly socket: Socket };
    const leg = starting.leg;
    starting.leg = undefined;
    if (leg !== undefined) leg.reused = served.has(socket);
    served.add(socket);
  });
}

const DECODERS: ReadonlyMap<string, () => Transform> = new Map<string, () => Transform>([
  ['gzip', createGunzip],
  ['x-gzip', createGunzip],
  ['deflate', createInflate],
  ['br', createBrotliDecompress],
]);

class Leg implements Dispatcher.DispatchHandler, LegControl {
  reused = false;
  onSettled: (() => void) | undefined;
  readonly #handler: LegHandler;
  readonly #request: Pick<LegRequest, 'isTooLate' | 'onConnected'>;
  #controller: Dispatcher.DispatchController | undefined;
  #aborted: Error | undefined;
  #tooLate = false;
  #replied = false;
  #settled = false;
  #paused = false;
  #decoder: Transform | undefined;

  constructor(handler: LegHandler, request: Pick<LegRequest, 'isTooLate' | 'onConnected'>) {
    this.#handler = handler;
    this.#request = request;
  }

  onRequestStart(controller: Dispatcher.DispatchController): void {
    this.#controller = controller;
    if (this.#aborted !== undefined) {
      controller.abort(this.#aborted);
      return;
    }
    if (this.#request.isTooLate?.() === true) {
      this.#tooLate = true;
      controller.abort(new Error('the connection took too long'));
      return;
    }
    this.#request.onConnected?.();
    starting.leg = this;
  }

  onResponseStart(_controller: Dispatcher.DispatchController, status: number, headers: IncomingHttpHeaders): void {
    if (status < 200 || this.#settled) return;
    this.#replied = true;
    const encoding = headers['content-encoding']?.trim().toLowerCase();
    const makeDecoder = encoding === undefined ? undefined : DECODERS.get(encoding);
    if (makeDecoder === undefined) {
      this.#handler.head(status, headers);
      return;
    }
    const { 'content-encoding': _encoding, ...rest } = headers;
    this.#decode(makeDecoder());
    this.#handler.head(status, rest);
  }

  onResponseData(controller: Dispatcher.DispatchController, chunk: Buffer): void {
    if (this.#settled) return;
    if (this.#decoder === undefined) {
      this.#handler.data(chunk);
    } else if (!this.#decoder.write(chunk)) {
      controller.pause();
      this.#decoder.once('drain', () => controller.resume());
    }
  }

  onResponseEnd(): void {
    if (this.#decoder === undefined) this.#settle(() => this.#handler.end());
    else this.#decoder.end();
  }

  onResponseError(_controller: Dispatcher.DispatchController | undefined, error: Error): void {
    if (this.#aborted !== undefined) this.#fail('aborted', error);
    else if (this.#tooLate) this.#fail('too_late', error);
    else this.#fail(this.#controller === undefined && !this.#replied ? 'not_sent' : 'reset', error);
  }

  pause(): void {
    this.#paused = true;
    if (this.#decoder === undefined) this.#controller?.pause();
    else this.#decoder.pause();
  }

  resume(): void {
    if (!this.#paused) return;
    this.#paused = false;
    if (this.#decoder === undefined) this.#controller?.resume();
    else this.#decoder.resume();
  }

  abort(reason: Error): void {
    if (this.#settled || this.#aborted !== undefined) return;
    this.#aborted = reason;
    if (this.#controller === undefined) this.#fail('aborted', reason);
    else this.#controller.abort(reason);
  }

  #decode(decoder: Transform): void {
    this.#decoder = decoder;
    decoder.on('data', (chunk: Buffer) => {
      if (!this.#settled) this.#handler.data(chunk);
    });
    decoder.on('end', () => this.#settle(() => this.#handler.end()));
    decoder.on('error', (error) => {
      this.#fail('reset', error);
      this.#controller?.abort(error);
    });
  }

  #fail(kind: LegFailure['kind'], cause: Error): void {
    this.#settle(() => this.#handler.fail({ kind, reused: this.reused, replied: this.#replied, cause }));
  }

  #settle(tell: () => void): void {
    if (this.#settled) return;
    this.#settled = true;
    this.#decoder?.destroy();
    tell();
    this.onSettled?.();
  }
}
