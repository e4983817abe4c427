import type { IncomingMessage, ServerResponse } from 'node:http';
import type { Http2ServerRequest, Http2ServerResponse } from 'node:http2';
import { Code, ConnectError, createConnectRouter } from '@connectrpc/connect';
import {
  compressionGzip,
  universalRequestFromNodeRequest,
  universalResponseToNodeResponse,
} from '@connectrpc/connect-node';
import { Health } from '../../gen/grpc/health/v1/health_pb.ts';
import { REQUEST_ID_HEADER } from '../call.ts';
import type { FaultSink } from './bind.ts';
import { admitCaller, type CallerOf } from './caller.ts';
import { HealthService } from './health.ts';
import { RPC_MAX_MESSAGE_BYTES, RPC_MAX_TIMEOUT_MS } from './limits.ts';
import { mountReflection } from './reflection.ts';
import { createRpcRoutes, type RpcServices, servedNames } from './routes.ts';

/** What an {@link RpcHandler} serves. */
export interface RpcHandlerOptions {
  readonly services: RpcServices;
  readonly callerOf: CallerOf;
  /** Gets every fault of an implementation and of the handler. */
  readonly onFault: FaultSink;
  /** Ends open streams with its reason. */
  readonly streamStop: AbortSignal;
  /** Ends every open call with its reason. */
  readonly callStop: AbortSignal;
}

type NodeRequest = IncomingMessage | Http2ServerRequest;
type NodeResponse = ServerResponse | Http2ServerResponse;

/** Answers the requests of every listener of a process, in all three protocols. */
export class RpcHandler {
  readonly #onFault: FaultSink;
  readonly #handlers: ReadonlyMap<string, ReturnType<typeof createConnectRouter>['handlers'][number]>;
  #unaryCalls = 0;
  #onIdle: (() => void) | undefined;

  constructor(options: RpcHandlerOptions) {
    const { callerOf, onFault, streamStop, callStop } = options;
    const router = createConnectRouter({
      acceptCompression: [compressionGzip],
      readMaxBytes: RPC_MAX_MESSAGE_BYTES,
      writeMaxBytes: RPC_MAX_MESSAGE_BYTES,
      maxTimeoutMs: RPC_MAX_TIMEOUT_MS,
      shutdownSignal: callStop,
      requestGate: (context) => admitCaller(callerOf, context),
    });
    createRpcRoutes(options.services, { onFault, streamStop })(router);
    const names = servedNames(options.services);
    router.service(Health, new HealthService(names, streamStop));
    mountReflection(router, names, streamStop);
    this.#onFault = onFault;
    this.#handlers = new Map(router.handlers.map((handler) => [handler.requestPath, handler]));
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
    const universalRequest = parseRequest(request, response);
    if (universalRequest === undefined) {
      respond(response, 400);
      return;
    }
    const isUnary = handler.method.methodKind === 'unary';
    if (isUnary) this.#count(response);
    handler(universalRequest)
      .then((universalResponse) => universalResponseToNodeResponse(universalResponse, response))
      .catch((error: unknown) => {
        // ABORTED here means that the peer went away while the answer was written.
        if (ConnectError.from(error).code === Code.Aborted) return;
        const requestId = universalRequest.header.get(REQUEST_ID_HEADER) ?? '';
        this.#onFault({ method: path.slice(1), requestId, error });
        response.destroy();
      });
  };

  /** A call is over when its answer is closed: the promise of connect-node waits for an `end` that answers never have. */
  #count(response: NodeResponse): void {
    this.#unaryCalls++;
    response.once('close', () => {
      if (--this.#unaryCalls === 0) this.#onIdle?.();
    });
  }
}

function parseRequest(request: NodeRequest, response: NodeResponse) {
  try {
    return universalRequestFromNodeRequest(request, response, undefined, undefined);
  } catch {
    return undefined;
  }
}

function respond(response: { writeHead(status: number): unknown; end(): unknown }, status: number): void {
  response.writeHead(status);
  response.end();
}
