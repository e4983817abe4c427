import { Code, ConnectError, type Interceptor } from '@connectrpc/connect';
import { ErrorInfoSchema } from '../../gen/google/rpc/error_details_pb.ts';
import { Breaker, type CallOutcome } from '../core/breaker.ts';

/** Settings of a {@link ServerBreaker}; times in milliseconds. */
export interface ServerBreakerOptions {
  /** Failures in a row that open it. Default 5. */
  readonly failures?: number;
  /** Time without calls after it opened, doubled with each probe that fails, up to eight times as long. Default 500. */
  readonly openMs?: number;
  /** Monotonic. Default the process's. */
  readonly now?: () => number;
  /** Told of each failed call, and whenever the breaker opens or closes; must not throw. */
  readonly onChange?: (event: 'failure' | 'open' | 'closed') => void;
}

/** The breaker before a server of another process, on the clock of this one. */
export class ServerBreaker {
  readonly #breaker: Breaker;
  readonly #now: () => number;
  readonly #onChange: (event: 'failure' | 'open' | 'closed') => void;

  constructor(options: ServerBreakerOptions = {}) {
    const { failures = 5, openMs = 500, now = () => performance.now(), onChange = () => {} } = options;
    this.#breaker = new Breaker({ failures, openMs });
    this.#now = now;
    this.#onChange = onChange;
  }

  get isOpen(): boolean {
    return this.#breaker.isOpen;
  }

  /** Whether a call may be made; a true answer is followed by {@link note}. */
  admit(): boolean {
    return this.#breaker.admit(this.#now());
  }

  /** How an admitted call went. */
  note(outcome: CallOutcome): void {
    if (outcome === 'failed') this.#onChange('failure');
    const change = this.#breaker.note(outcome, this.#now());
    if (change !== undefined) this.#onChange(change === 'opened' ? 'open' : 'closed');
  }
}

/** Calls that somebody waits for; what ends claims or stores handles is always tried. */
const GATED: ReadonlySet<string> = new Set(['GetEntry', 'TakeEntry']);

/** Puts a breaker before the calls of a KVCacheStore client that requests wait for. */
export function breakerInterceptor(breaker: ServerBreaker): Interceptor {
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

function outcomeOf(error: ConnectError): CallOutcome {
  if (error.code === Code.Canceled) return 'neither';
  // A store whose own server is away answers, and is no more use than one that does not.
  if (error.code !== Code.Unavailable && error.findDetails(ErrorInfoSchema).length > 0) return 'answered';
  return NO_ANSWER.has(error.code) ? 'failed' : 'answered';
}
