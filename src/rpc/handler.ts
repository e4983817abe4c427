import { Code, ConnectError, type ContextValues, createConnectRouter, createContextValues } from '@connectrpc/connect';
import type { UniversalHandler } from '@connectrpc/connect/protocol';
import {
  compressionGzip,
  universalRequestFromNodeRequest,
  universalResponseToNodeResponse,
} from '@connectrpc/connect-node';
import { Health } from '../../gen/grpc/health/v1/health_pb.ts';
import { REQUEST_ID_HEADER } from '../call.ts';
import type { FaultSink } from './bind.ts';
import { BodyDeadline } from './body-deadline.ts';
import { admitCaller, CALLER, type CallerOf } from './caller.ts';
import { HealthService } from './health.ts';
import { COMPRESS_MIN_BYTES, RPC_MAX_MESSAGE_BYTES, RPC_MAX_TIMEOUT_MS } from './limits.ts';
import { mountReflection } from './reflection.ts';
import { bindServices, type RpcServices, servedNames } from './routes.ts';
import { type CallTimer, timeMethod } from './time-calls.ts';
import { type NodeRequest, type NodeResponse, UnaryCalls } from './unary-calls.ts';
import { blameCaller, WAS_READ } from './unread-message.ts';

/** What an {@link RpcHandler} serves. */
export interface RpcHandlerOptions {
  readonly services: RpcServices;
  readonly callerOf: CallerOf;
  /** Gets every fault of an implementation and of the handler. */
  readonly onFault: FaultSink;
  /** Told of each call with a single answer that came as far as its implementation. */
  readonly onCall?: CallTimer;
  /** Ends open streams with its reason. */
  readonly streamStop: AbortSignal;
  /** Ends every open call with its reason. */
  readonly callStop: AbortSignal;
  /** Time that a whole request over HTTP/2 may take to come, milliseconds. */
  readonly requestMs: number;
}

/** Answers the requests of every listener of a process, in all three protocols. */
export class RpcHandler implements Disposable {
  readonly #onFault: FaultSink;
  readonly #handlers: ReadonlyMap<string, UniversalHandler>;
  readonly #unary: UnaryCalls;
  readonly #bodies: BodyDeadline;
  #unaryCalls = 0;
  #onIdle: (() => void) | undefined;

  constructor(options: RpcHandlerOptions) {
    const { callerOf, onFault, onCall, streamStop, callStop } = options;
    const router = createConnectRouter({
      acceptCompression: [compressionGzip],
      compressMinBytes: COMPRESS_MIN_BYTES,
      readMaxBytes: RPC_MAX_MESSAGE_BYTES,
      writeMaxBytes: RPC_MAX_MESSAGE_BYTES,
      maxTimeoutMs: RPC_MAX_TIMEOUT_MS,
      shutdownSignal: callStop,
      requestGate: ({ method, requestHeader, values }) => {
        const caller = admitCaller(callerOf, method, requestHeader.get('authorization') ?? undefined);
        if (caller !== undefined) values.set(CALLER, caller);
      },
    });
    const plain = bindServices(options.services, onFault);
    const methods = onCall === undefined ? plain : plain.map((bound) => timeMethod(bound, onCall));
    for (const bound of methods) {
      if (bound.kind === 'unary') {
        router.rpc(bound.method, (message, context) => {
          context.values.set(WAS_READ, true);
          return bound.call(message, context);
        });
      } else router.rpc(bound.method, bound.call, { shutdownSignal: streamStop });
    }
    const names = servedNames(options.services);
    router.service(Health, new HealthService(names, streamStop));
    mountReflection(router, names, streamStop);
    this.#unary = new UnaryCalls({ methods, callerOf, callStop });
    this.#bodies = new BodyDeadline(options.requestMs);
    this.#onFault = onFault;
    this.#handlers = new Map(router.handlers.map((handler) => [handler.requestPath, handler]));
  }

  [Symbol.dispose](): void {
    this.#bodies[Symbol.dispose]();
  }

  /** Resolves when no call with a single answer is being served. */
  idle(): Promise<void> {
    return new Promise((resolve) => {
      if (this.#unaryCalls === 0) resolve();
      else this.#onIdle = resolve;
    });
  }

  // The adapter of connect-node is not used: it throws out of the request event on a malformed authority, and writes
  // faults to the console.
  readonly handle = (request: NodeRequest, response: NodeResponse): void => {
    const path = (request.url ?? '').split('?', 1)[0] ?? '';
    const handler = this.#handlers.get(path);
    if (handler === undefined) {
      respond(response, 404);
      return;
    }
    if (handler.method.methodKind === 'unary') this.#count(response);
    if ('stream' in request) this.#bodies.watch(request);
    const served = this.#unary.serve(path, request, response) ?? this.#serve(handler, request, response);
    served.catch((error: unknown) => {
      // ABORTED here means that the peer went away while the answer was written.
      if (ConnectError.from(error).code === Code.Aborted) return;
      const requestId = request.headers[REQUEST_ID_HEADER]?.toString() ?? '';
      this.#onFault({ method: path.slice(1), requestId, error });
      response.destroy();
    });
  };

  async #serve(handler: UniversalHandler, request: NodeRequest, response: NodeResponse): Promise<void> {
    const values = createContextValues();
    const universalRequest = parseRequest(request, response, values);
    if (universalRequest === undefined) respond(response, 400);
    else {
      await universalResponseToNodeResponse(blameCaller(values, await handler(universalRequest)), response);
    }
  }

  /** A call is over when its answer is closed: the promise of connect-node waits for an `end` that answers never have. */
  #count(response: NodeResponse): void {
    this.#unaryCalls++;
    response.once('close', () => {
      if (--this.#unaryCalls === 0) this.#onIdle?.();
    });
  }
}

function parseRequest(request: NodeRequest, response: NodeResponse, values: ContextValues) {
  try {
    return universalRequestFromNodeRequest(request, response, undefined, values);
  } catch {
    return undefined;
  }
}

function respond(response: { writeHead(status: number): unknown; end(): unknown }, status: number): void {
  response.writeHead(status);
  response.end();
}
