/** Header that carries the id of a request from process to process, and from the facade to the engines. */
export const REQUEST_ID_HEADER = 'x-request-id';

/** Longest deadline that gRPC can tell in milliseconds (eight digits), 27.7 hours. */
const MAX_TIMEOUT_MS = 99_999_999;

/** What every asynchronous port takes as its last argument. */
export interface CallContext {
  /** Aborts when the caller gave up; check it before the first await. */
  readonly signal: AbortSignal;
  /** Time that is left, milliseconds; absent without a deadline. */
  readonly timeoutMs?: number;
  /** Id of the client request; empty for work that no request asked for. */
  readonly requestId: string;
}

/** Options of a client call; the part of Connect's CallOptions that a context fills. */
export interface ContextCallOptions {
  signal: AbortSignal;
  timeoutMs?: number;
  headers?: Record<string, string>;
}

/** What a service implementation gets beside the request; the part of Connect's HandlerContext that makes a context. */
export interface ServedCall {
  readonly signal: AbortSignal;
  readonly timeoutMs: () => number | undefined;
  readonly requestHeader: { get(name: string): string | null };
}

/** The context of a call as options for a client of another service. */
export function callOptions(context: CallContext): ContextCallOptions {
  return {
    signal: context.signal,
    ...(context.timeoutMs === undefined ? {} : { timeoutMs: wireTimeout(context.timeoutMs) }),
    ...(context.requestId === '' ? {} : { headers: { [REQUEST_ID_HEADER]: context.requestId } }),
  };
}

/** The context of a call that a service implementation serves; its signal aborts also when the call is over. */
export function callContext(call: ServedCall): CallContext {
  const timeoutMs = call.timeoutMs();
  return {
    signal: call.signal,
    ...(timeoutMs === undefined ? {} : { timeoutMs }),
    requestId: call.requestHeader.get(REQUEST_ID_HEADER) ?? '',
  };
}

/** Connect takes 0 as no deadline and refuses fractions. */
function wireTimeout(timeoutMs: number): number {
  return Math.min(Math.max(Math.ceil(timeoutMs), 1), MAX_TIMEOUT_MS);
}
