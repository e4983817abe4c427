import type { DescMethod, DescMethodServerStreaming, DescMethodUnary, DescService } from '@bufbuild/protobuf';
import type { HandlerContext, MethodImpl, ServiceImpl } from '@connectrpc/connect';
import { REQUEST_ID_HEADER } from '../call.ts';
import { BatonError } from '../core/errors.ts';
import { abortErrorOf, connectErrorFrom, isFault } from './errors.ts';

/** A call that ended because of a mistake in this process; the caller saw only INTERNAL. */
export interface RpcFault {
  /** Full name, for example `baton.v1.Router/PlanRoute`. */
  readonly method: string;
  readonly requestId: string;
  /** What was thrown. */
  readonly error: unknown;
}

/** Gets every fault, for the log; must not throw. */
export type FaultSink = (fault: RpcFault) => void;

type UnaryImpl = MethodImpl<DescMethodUnary>;
type StreamImpl = MethodImpl<DescMethodServerStreaming>;

/** One method of a service, bound to its implementation. */
export type BoundMethod =
  | { readonly kind: 'unary'; readonly method: DescMethodUnary; readonly call: UnaryImpl }
  | { readonly kind: 'server_streaming'; readonly method: DescMethodServerStreaming; readonly call: StreamImpl };

/**
 * Binds every method of a service. Whatever an implementation throws leaves as a ConnectError, a stream ends when its
 * signal does even if the implementation does not look at it, and a method without an implementation answers
 * UNIMPLEMENTED with NOT_IMPLEMENTED.
 */
export function bindService<Desc extends DescService>(
  service: Desc,
  impl: Partial<ServiceImpl<Desc>>,
  onFault: FaultSink,
): readonly BoundMethod[] {
  return service.methods.map((method) => bindMethod(method, impl, onFault));
}

/** Full name of a method as errors, logs and metrics write it. */
function methodName(method: DescMethod): string {
  return `${method.parent.typeName}/${method.name}`;
}

function bindMethod(method: DescMethod, impl: object, onFault: FaultSink): BoundMethod {
  const fn: unknown = Reflect.get(impl, method.localName);
  const fail = (thrown: unknown, context: HandlerContext) => {
    const error = connectErrorFrom(thrown, context.signal);
    if (error !== thrown && isFault(error)) {
      const requestId = context.requestHeader.get(REQUEST_ID_HEADER) ?? '';
      onFault({ method: methodName(method), requestId, error: error.cause });
    }
    return error;
  };
  if (isUnary(method)) {
    const target = isUnaryImpl(fn) ? fn.bind(impl) : () => Promise.reject(notImplemented(method));
    const call: UnaryImpl = async (request, context) => {
      try {
        return await target(request, context);
      } catch (thrown) {
        throw fail(thrown, context);
      }
    };
    return { kind: 'unary', method, call };
  }
  if (isServerStreaming(method)) {
    const target = isStreamImpl(fn) ? fn.bind(impl) : () => failingStream(notImplemented(method));
    const call: StreamImpl = async function* (request, context) {
      try {
        yield* untilAborted(target(request, context), context.signal);
      } catch (thrown) {
        throw fail(thrown, context);
      }
    };
    return { kind: 'server_streaming', method, call };
  }
  throw new TypeError(`${methodName(method)}: no contract of baton has streams from the client`);
}

function isUnary(method: DescMethod): method is DescMethodUnary {
  return method.methodKind === 'unary';
}

function isServerStreaming(method: DescMethod): method is DescMethodServerStreaming {
  return method.methodKind === 'server_streaming';
}

function notImplemented(method: DescMethod): BatonError {
  const name = methodName(method);
  return new BatonError({
    reason: 'NOT_IMPLEMENTED',
    message: `${name} is not served by this process`,
    metadata: { method: name },
  });
}

// biome-ignore lint/correctness/useYield: a stream that fails at its first read has nothing to yield.
async function* failingStream(error: Error): AsyncGenerator<never> {
  throw error;
}

/**
 * Passes a stream on until `signal` aborts, then throws its reason. The source is closed in any case, and not waited
 * for: it may be in the middle of something that does not end.
 */
export async function* untilAborted<T>(
  source: AsyncIterable<T>,
  signal: AbortSignal,
): AsyncGenerator<T, void, undefined> {
  const iterator = source[Symbol.asyncIterator]();
  // One listener for the whole stream: a race per message would keep a reaction for every message it ever passed on.
  let interrupt: ((error: Error) => void) | undefined;
  const onAbort = () => interrupt?.(abortErrorOf(signal));
  signal.addEventListener('abort', onAbort);
  try {
    for (;;) {
      const result = await new Promise<IteratorResult<T>>((resolve, reject) => {
        interrupt = reject;
        if (signal.aborted) onAbort();
        else iterator.next().then(resolve, reject);
      });
      if (result.done === true) return;
      yield result.value;
    }
  } finally {
    signal.removeEventListener('abort', onAbort);
    iterator.return?.().catch(() => undefined);
  }
}

// The generated types tie each method to its implementation; a method looked up by name has lost that tie.
function isUnaryImpl(value: unknown): value is UnaryImpl {
  return typeof value === 'function';
}

function isStreamImpl(value: unknown): value is StreamImpl {
  return typeof value === 'function';
}
