import { ConnectError, type Interceptor } from '@connectrpc/connect';
import type { EndedCall } from '../obs/metrics.ts';
import type { BoundMethod } from './bind.ts';
import { codeWord } from './errors.ts';

/** Told of each call with a single answer once it has ended; must not throw. */
export type CallTimer = (call: EndedCall) => void;

/** The method, with each of its calls timed if it has a single answer. */
export function timeMethod(bound: BoundMethod, tell: CallTimer): BoundMethod {
  if (bound.kind !== 'unary') return bound;
  const { call, method } = bound;
  return { ...bound, call: (request, context) => timed(method.name, tell, () => call(request, context)) };
}

/** Times the calls of a client of another process. */
export function timeInterceptor(tell: CallTimer): Interceptor {
  return (next) => (request) =>
    request.stream ? next(request) : timed(request.method.name, tell, () => next(request));
}

async function timed<T>(method: string, tell: CallTimer, call: () => T | Promise<T>): Promise<T> {
  const startedAt = performance.now();
  let outcome = 'ok';
  try {
    return await call();
  } catch (error) {
    outcome = codeWord(ConnectError.from(error).code);
    throw error;
  } finally {
    tell({ method, outcome, milliseconds: performance.now() - startedAt });
  }
}
