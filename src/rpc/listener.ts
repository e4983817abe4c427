import {
  createServer as createHttp1Server,
  type IncomingMessage,
  type RequestListener,
  type Server,
  type ServerResponse,
} from 'node:http';
import {
  createServer as createHttp2Server,
  type Http2ServerRequest,
  type Http2ServerResponse,
  type ServerHttp2Session,
} from 'node:http2';
import type { AddressInfo, Socket } from 'node:net';
import { Code, ConnectError, createConnectRouter } from '@connectrpc/connect';
import {
  compressionGzip,
  universalRequestFromNodeRequest,
  universalResponseToNodeResponse,
} from '@connectrpc/connect-node';
import { REQUEST_ID_HEADER } from '../call.ts';
import { BatonError } from '../core/errors.ts';
import type { FaultSink } from './bind.ts';
import { connectErrorFromBaton } from './errors.ts';
import { RPC_MAX_MESSAGE_BYTES, RPC_MAX_TIMEOUT_MS } from './limits.ts';
import { sniffProtocol } from './protocol-sniff.ts';
import { createRpcRoutes, type RpcServices } from './routes.ts';

/** What {@link startRpcListener} needs. */
export interface RpcListenerOptions {
  readonly host: string;
  /** 0 takes any free port. */
  readonly port: number;
  readonly services: RpcServices;
  /** Gets every fault of an implementation and of the listener. */
  readonly onFault: FaultSink;
  /** A socket that says too little to tell its protocol is closed after this time, milliseconds. Default 10,000. */
  readonly silentMs?: number;
}

/** A listening RPC port. Disposing closes it at once. */
export interface RpcListener extends AsyncDisposable {
  readonly host: string;
  readonly port: number;
  /**
   * Stops accepting, ends open streams with UNAVAILABLE and SHUTTING_DOWN, and lets unary calls finish for at most
   * `drainMs`; then aborts the rest. Resolves when every connection is closed.
   */
  close(drainMs: number): Promise<void>;
}

/**
 * Serves Connect, gRPC and gRPC-Web on one port, over HTTP/1.1 and HTTP/2 without TLS. The port belongs to an
 * `http.Server`, so that its time limits hold for HTTP/1.1; sockets that begin as HTTP/2 go to an `http2.Server`.
 */
export async function startRpcListener(options: RpcListenerOptions): Promise<RpcListener> {
  const silentMs = options.silentMs ?? 10_000;
  const streamStop = new AbortController();
  const callStop = new AbortController();
  const handle = createHandler(options, streamStop.signal, callStop.signal);
  const sessions = new Set<ServerHttp2Session>();
  const sockets: Sockets = { open: new Set(), undecided: new Set() };
  let draining = false;

  const onHttp1Request: RequestListener = (request, response) => {
    if (draining) response.setHeader('connection', 'close');
    // A connection that was busy when draining began is idle from here on, and nothing else would close it.
    response.once('close', () => draining && setImmediate(() => server.closeIdleConnections()));
    handle(request, response);
  };
  const server = createHttp1Server(
    { headersTimeout: silentMs, connectionsCheckingInterval: Math.min(silentMs, 5_000), keepAliveTimeout: 65_000 },
    onHttp1Request,
  );
  // A session that runs out of its memory budget refuses streams; the default does not hold one full message.
  const http2Server = createHttp2Server({ maxSessionMemory: 64 }, handle);
  http2Server.on('session', (session) => {
    sessions.add(session);
    session.once('close', () => sessions.delete(session));
    if (draining) session.close();
  });
  sniffConnections(server, silentMs, sockets, (socket) => http2Server.emit('connection', socket));

  await listen(server, options);
  const address = addressOf(server);
  const close = async (drainMs: number) => {
    draining = true;
    streamStop.abort(shuttingDown());
    const closed = new Promise<void>((resolve) => server.close(() => resolve()));
    for (const session of sessions) session.close();
    for (const socket of sockets.undecided) socket.destroy();
    let timer = setTimeout(() => {
      callStop.abort(shuttingDown());
      timer = setTimeout(() => {
        for (const socket of sockets.open) socket.destroy();
      }, ANSWER_MS);
    }, drainMs);
    await closed;
    clearTimeout(timer);
  };
  let closing: Promise<void> | undefined;
  return {
    host: address.address,
    port: address.port,
    close: (drainMs) => (closing ??= close(drainMs)),
    [Symbol.asyncDispose]: () => (closing ??= close(0)),
  };
}

/** How long calls that are aborted at the end of a drain have to tell their callers, milliseconds. */
const ANSWER_MS = 50;

interface Sockets {
  readonly open: Set<Socket>;
  /** Those whose protocol is not known yet. */
  readonly undecided: Set<Socket>;
}

type NodeRequest = IncomingMessage | Http2ServerRequest;
type NodeResponse = ServerResponse | Http2ServerResponse;

function createHandler(
  options: RpcListenerOptions,
  streamStop: AbortSignal,
  callStop: AbortSignal,
): (request: NodeRequest, response: NodeResponse) => void {
  const router = createConnectRouter({
    acceptCompression: [compressionGzip],
    readMaxBytes: RPC_MAX_MESSAGE_BYTES,
    writeMaxBytes: RPC_MAX_MESSAGE_BYTES,
    maxTimeoutMs: RPC_MAX_TIMEOUT_MS,
    shutdownSignal: callStop,
  });
  createRpcRoutes(options.services, { onFault: options.onFault, streamStop })(router);
  const handlers = new Map(router.handlers.map((handler) => [handler.requestPath, handler]));
  // The adapter of connect-node is not used: it throws out of the request event on a malformed authority, and writes
  // faults to the console.
  return (request, response) => {
    const path = (request.url ?? '').split('?', 1)[0] ?? '';
    const handler = handlers.get(path);
    if (handler === undefined) {
      respond(response, 404);
      return;
    }
    const universalRequest = parseRequest(request, response);
    if (universalRequest === undefined) {
      respond(response, 400);
      return;
    }
    handler(universalRequest)
      .then((universalResponse) => universalResponseToNodeResponse(universalResponse, response))
      .catch((error: unknown) => {
        // ABORTED here means that the peer went away while the answer was written.
        if (ConnectError.from(error).code === Code.Aborted) return;
        const requestId = universalRequest.header.get(REQUEST_ID_HEADER) ?? '';
        options.onFault({ method: path.slice(1), requestId, error });
        response.destroy();
      });
  };
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

/** Puts the protocol sniffer before the connection listener that the HTTP/1.1 server has installed on itself. */
function sniffConnections(server: Server, silentMs: number, sockets: Sockets, http2: (socket: Socket) => void): void {
  const http1Listeners = server.listeners('connection');
  server.removeAllListeners('connection');
  server.on('connection', (socket: Socket) => {
    sockets.open.add(socket);
    sockets.undecided.add(socket);
    socket.once('close', () => {
      sockets.open.delete(socket);
      sockets.undecided.delete(socket);
    });
    sniffProtocol(socket, silentMs, (protocol) => {
      sockets.undecided.delete(socket);
      if (protocol === 'http2') http2(socket);
      else for (const listener of http1Listeners) Reflect.apply(listener, server, [socket]);
    });
  });
}

function listen(server: Server, options: RpcListenerOptions): Promise<void> {
  return new Promise((resolve, reject) => {
    server.once('error', reject);
    server.listen(options.port, options.host, () => {
      server.off('error', reject);
      resolve();
    });
  });
}

function addressOf(server: Server): AddressInfo {
  const address = server.address();
  if (address === null || typeof address === 'string') throw new TypeError('an RPC port is a TCP port');
  return address;
}

function shuttingDown(): ConnectError {
  return connectErrorFromBaton(new BatonError({ reason: 'SHUTTING_DOWN', message: 'this process is shutting down' }));
}
