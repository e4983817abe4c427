import type { CallOptions, HandlerContext } from '@connectrpc/connect';

/** Header that carries the id of a request from process to process, and from the facade to the engines. */
export const REQUEST_ID_HEADER = 'x-request-id';

/** What every asynchronous port takes as its last argument. */
export interface CallContext {
  /** Aborts when the caller gave up; check it before the first await. */
  readonly signal: AbortSignal;
  /** Time that is left, milliseconds; absent without a deadline. */
  readonly timeoutMs?: number;
  /** Id of the client request; empty for work that no request asked for. */
  readonly requestId: string;
}

/** The context of a call as options for a client of another service. */
export function callOptions(context: CallContext): CallOptions {
  return {
    signal: context.signal,
    ...(context.timeoutMs === undefined ? {} : { timeoutMs: context.timeoutMs }),
    ...(context.requestId === '' ? {} : { headers: { [REQUEST_ID_HEADER]: context.requestId } }),
  };
}

/** The context of a call as a service implementation sees it; `signal` aborts also when the call is over. */
export function callContext(context: Pick<HandlerContext, 'signal' | 'timeoutMs' | 'requestHeader'>): CallContext {
  const timeoutMs = context.timeoutMs();
  return {
    signal: context.signal,
    ...(timeoutMs === undefined ? {} : { timeoutMs }),
    requestId: context.requestHeader.get(REQUEST_ID_HEADER) ?? '',
  };
}
