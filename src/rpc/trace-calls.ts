import type { DescService } from '@bufbuild/protobuf';
import type { HandlerContext, Interceptor } from '@connectrpc/connect';
import type { Tracer } from '../obs/tracer.ts';

/** The service with a span around each of its calls with a single answer; the same object where no traces are wanted. */
export function traceCalls<T extends object>(service: DescService, impl: T, tracer: Tracer | undefined): T {
  if (tracer === undefined) return impl;
  const names = new Map(
    service.methods
      .filter(({ methodKind }) => methodKind === 'unary')
      .map(({ localName, name }) => [localName, `${service.typeName}/${name}`]),
  );
  return new Proxy(impl, {
    get(target, key) {
      const member: unknown = Reflect.get(target, key, target);
      if (typeof member !== 'function') return member;
      const name = typeof key === 'string' ? names.get(key) : undefined;
      // Private members are the target's own.
      if (name === undefined) return member.bind(target);
      return (request: unknown, context: HandlerContext) => {
        const header = (key: string) => context.requestHeader.get(key) ?? undefined;
        const headers = { traceparent: header('traceparent'), tracestate: header('tracestate') };
        return tracer.serve(name, headers, async () => {
          const answer: unknown = await Reflect.apply(member, target, [request, context]);
          return answer;
        });
      };
    },
  });
}

/** Sends the headers of the call that is being served along with the calls that it makes. */
export function traceInterceptor(tracer: Tracer): Interceptor {
  return (next) => (request) => {
    for (const [name, value] of Object.entries(tracer.headers)) {
      if (!request.header.has(name)) request.header.set(name, value);
    }
    return next(request);
  };
}
