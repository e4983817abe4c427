import { constants, type Http2ServerRequest } from 'node:http2';

/** Ends requests over HTTP/2 whose body does not come to its end; over HTTP/1.1 Node's `requestTimeout` does. */
export class BodyDeadline implements Disposable {
  /** Since when each is waited for; the oldest first. */
  readonly #waiting = new Map<Http2ServerRequest, number>();
  readonly #timer: NodeJS.Timeout;

  /** A whole request has to come within `limitMs`, give or take half of it. */
  constructor(limitMs: number) {
    this.#timer = setInterval(() => {
      const before = performance.now() - limitMs;
      for (const [request, since] of this.#waiting) {
        if (since > before) return;
        request.stream.close(constants.NGHTTP2_CANCEL);
      }
    }, limitMs / 2).unref();
  }

  [Symbol.dispose](): void {
    clearInterval(this.#timer);
  }

  watch(request: Http2ServerRequest): void {
    this.#waiting.set(request, performance.now());
    const done = () => void this.#waiting.delete(request);
    request.once('end', done);
    request.once('close', done);
  }
}
