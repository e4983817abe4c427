import type { DescMethod, DescService } from '@bufbuild/protobuf';
import { type ContextValues, createContextValues, type HandlerContext } from '@connectrpc/connect';
import { deadlineError } from './errors.ts';

/** Why the signal of a call aborts that has its answer. One for all: its stack would be most of what the end costs. */
const ANSWERED = new DOMException('the call has ended', 'AbortError');

/** Context of one call. What calls rarely look at is made when it is first looked at, because a call is cheap. */
export abstract class LazyContext implements HandlerContext {
  abstract readonly protocolName: string;
  abstract readonly url: string;
  readonly method: DescMethod;
  readonly requestMethod = 'POST';
  readonly #deadline: number | undefined;
  #timer: NodeJS.Timeout | undefined;
  #controller: AbortController | undefined;
  #ended = false;
  #endReason: unknown;
  #requestHeader: Headers | undefined;
  #responseHeader: Headers | undefined;
  #responseTrailer: Headers | undefined;
  #values: ContextValues | undefined;

  /** `timeoutMs` is the time that the call has, at most RPC_MAX_TIMEOUT_MS; absent without a deadline. */
  constructor(method: DescMethod, timeoutMs: number | undefined) {
    this.method = method;
    this.#deadline = timeoutMs === undefined ? undefined : performance.now() + timeoutMs;
  }

  get service(): DescService {
    return this.method.parent;
  }

  get signal(): AbortSignal {
    if (this.#controller === undefined) {
      this.#controller = new AbortController();
      if (this.#ended) this.#controller.abort(this.#endReason ?? ANSWERED);
      else this.watchForEnd();
    }
    return this.#controller.signal;
  }

  get requestHeader(): Headers {
    this.#requestHeader ??= this.readRequestHeader();
    return this.#requestHeader;
  }

  get responseHeader(): Headers {
    this.#responseHeader ??= new Headers();
    return this.#responseHeader;
  }

  get responseTrailer(): Headers {
    this.#responseTrailer ??= new Headers();
    return this.#responseTrailer;
  }

  get values(): ContextValues {
    this.#values ??= createContextValues();
    return this.#values;
  }

  get hasEnded(): boolean {
    return this.#ended;
  }

  /** Whether the implementation has looked at the headers of its answer, and may have set some. */
  get hasAnswerHeaders(): boolean {
    return this.#responseHeader !== undefined || this.#responseTrailer !== undefined;
  }

  readonly timeoutMs = (): number | undefined =>
    this.#deadline === undefined ? undefined : this.#deadline - performance.now();

  /** Ends the call for whatever still runs in its name, with a reason if it ends early. */
  end(reason?: Error): void {
    if (this.#ended) return;
    this.#ended = true;
    this.#endReason = reason;
    clearTimeout(this.#timer);
    this.#controller?.abort(reason ?? ANSWERED);
  }

  protected abstract readRequestHeader(): Headers;

  /** Called when somebody wants to know of an early end. */
  protected watchForEnd(): void {
    const timeoutMs = this.timeoutMs();
    if (this.#ended || timeoutMs === undefined || this.#timer !== undefined) return;
    if (timeoutMs <= 0) this.end(deadlineError());
    else this.#timer = setTimeout(() => this.end(deadlineError()), timeoutMs);
  }
}
