import { Code, ConnectError, type Interceptor } from '@connectrpc/connect';
import { ErrorInfoSchema } from '../../gen/google/rpc/error_details_pb.ts';

/** Settings of a {@link Breaker}; times in milliseconds. */
export interface BreakerOptions {
  /** Failures in a row that open it. Default 5. */
  readonly failures?: number;
  /** Time without calls after it opened, doubled with each probe that fails, up to eight times as long. Default 500. */
  readonly openMs?: number;
  /** Monotonic. Default the process's. */
  readonly now?: () => number;
  /** Told of each failed call, and whenever the breaker opens or closes; must not throw. */
  readonly onChange?: (event: 'failure' | 'open' | 'closed') => void;
}

const LONGEST = 8;

/**
 * Keeps a server that does not answer from costing every caller its patience: after some failures in a row it is not
 * asked for a while, and then by one call at a time until one is answered.
 */
export class Breaker {
  readonly #options: BreakerOptions;
  readonly #now: () => number;
  #failed = 0;
  #openMs = 0;
  #openUntil = Number.NEGATIVE_INFINITY;
  #probing = false;

  constructor(options: BreakerOptions = {}) {
    this.#options = options;
    this.#now = options.now ?? (() => performance.now());
  }

  get isOpen(): boolean {
    return this.#openMs > 0;
  }

  /** Whether a call may be made; a true answer is followed by {@link note}. */
  admit(): boolean {
    if (!this.isOpen) return true;
    if (this.#probing || this.#now() < this.#openUntil) return false;
    this.#probing = true;
    return true;
  }

  /** How an admitted call went; `neither` where it says nothing of the server. */
  note(outcome: 'answered' | 'failed' | 'neither'): void {
    const { failures = 5, openMs = 500, onChange } = this.#options;
    this.#probing = false;
    if (outcome === 'neither') return;
    if (outcome === 'answered') {
      this.#failed = 0;
      if (!this.isOpen) return;
      this.#openMs = 0;
      onChange?.('closed');
      return;
    }
    this.#failed += 1;
    onChange?.('failure');
    if (this.#failed < failures) return;
    const wasOpen = this.isOpen;
    this.#openMs = wasOpen ? Math.min(2 * this.#openMs, LONGEST * openMs) : openMs;
    this.#openUntil = this.#now() + this.#openMs;
    if (!wasOpen) onChange?.('open');
  }
}

/** Calls that somebody waits for; what ends claims or stores handles is always tried. */
const GATED: ReadonlySet<string> = new Set(['GetEntry', 'TakeEntry']);

/** Puts a breaker before the calls of a KVCacheStore client that requests wait for. */
export function breakerInterceptor(breaker: Breaker): Interceptor {
  return (next) => async (request) => {
    if (!GATED.has(request.method.name)) return next(request);
    if (!breaker.admit()) throw new ConnectError('the store did not answer and is not asked', Code.Unavailable);
    try {
      const response = await next(request);
      breaker.note('answered');
      return response;
    } catch (error) {
      breaker.note(outcomeOf(ConnectError.from(error)));
      throw error;
    }
  };
}

const NO_ANSWER: ReadonlySet<Code> = new Set([Code.Unavailable, Code.DeadlineExceeded, Code.Internal, Code.Unknown]);

function outcomeOf(error: ConnectError): 'answered' | 'failed' | 'neither' {
  if (error.code === Code.Canceled) return 'neither';
  // A store whose own server is away answers, and is no more use than one that does not.
  if (error.code !== Code.Unavailable && error.findDetails(ErrorInfoSchema).length > 0) return 'answered';
  return NO_ANSWER.has(error.code) ? 'failed' : 'answered';
}
