import { Agent as HttpAgent } from 'node:http';
import { Agent as HttpsAgent } from 'node:https';
import { connect as connectSocket } from 'node:net';
import { type Client, Code, ConnectError, createClient, type Interceptor, type Transport } from '@connectrpc/connect';
import {
  createConnectTransport,
  createGrpcTransport,
  createGrpcWebTransport,
  Http2SessionManager,
} from '@connectrpc/connect-node';
import { KVCacheStore } from '../../gen/baton/v1/kv_cache_store_pb.ts';
import { PoolRegistry } from '../../gen/baton/v1/pool_registry_pb.ts';
import { Router } from '../../gen/baton/v1/router_pb.ts';
import { Health } from '../../gen/grpc/health/v1/health_pb.ts';
import type { Tracer } from '../obs/tracer.ts';
import { breakerInterceptor, type ServerBreaker } from './breaker.ts';
import { RPC_MAX_MESSAGE_BYTES } from './limits.ts';
import { type CallTimer, timeInterceptor } from './time-calls.ts';
import { traceInterceptor } from './trace-calls.ts';

/** Where another process serves RPC, and how to speak with it. */
export interface RemoteOptions {
  /** Base URL, `http(s)://host[:port][/prefix]`, or `unix:/path` of a socket, which is spoken to without TLS. */
  readonly url: string;
  /** Default `connect`. */
  readonly protocol?: 'connect' | 'grpc' | 'grpc-web';
  /** Default `2`; over http:// that is HTTP/2 without TLS and with prior knowledge. gRPC needs `2`. */
  readonly httpVersion?: '1.1' | '2';
  /** Time after which an attempt to connect fails with UNAVAILABLE, HTTP/2 only. Default 3,000. */
  readonly connectTimeoutMs?: number;
  /**
   * Sent as `Authorization: Bearer TOKEN` with each call that has no such header of its own; a function is asked anew for
   * each call. Default none.
   */
  readonly token?: string | (() => string | undefined);
  /** Before the store's calls that requests wait for. Default none. */
  readonly breaker?: ServerBreaker;
  /** Told how each call with a single answer ended: undefined if it was answered. Must not throw. */
  readonly onEnd?: (error: unknown) => void;
  /** Told how long each call with a single answer took; of none that a breaker held back. Must not throw. */
  readonly onCall?: CallTimer;
  /** Gives the calls that are made while another is served the headers of its trace. Default none. */
  readonly tracer?: Tracer;
  /** For `https:` URLs. Default: the authorities that Node trusts, and no certificate of one's own. */
  readonly tls?: ClientTls;
}

/** TLS of a client; each member as PEM. With HTTP/2 they are read anew for each connection. */
export interface ClientTls {
  /** Authorities whose certificates are believed, instead of those that Node trusts. */
  readonly ca?: string;
  /** Certificate that the client shows, with its chain; goes with `key`. */
  readonly cert?: string;
  readonly key?: string;
}

/** Clients of the services of another process. Disposing closes the connection, with the calls that are open. */
export interface RemoteServices extends Disposable {
  readonly router: Client<typeof Router>;
  readonly poolRegistry: Client<typeof PoolRegistry>;
  readonly kvCacheStore: Client<typeof KVCacheStore>;
  readonly health: Client<typeof Health>;
}

/** Makes clients for another process; connects at the first call, and again whenever the connection is lost. */
export function connectRemote(options: RemoteOptions): RemoteServices {
  const { transport, close } = createTransport(options);
  return {
    router: createClient(Router, transport),
    poolRegistry: createClient(PoolRegistry, transport),
    kvCacheStore: createClient(KVCacheStore, transport),
    health: createClient(Health, transport),
    [Symbol.dispose]: close,
  };
}

function createTransport(options: RemoteOptions): { transport: Transport; close: () => void } {
  let closed = false;
  const protocol = options.protocol ?? 'connect';
  const socketPath = options.url.startsWith(UNIX) ? options.url.slice(UNIX.length) : undefined;
  const baseUrl = socketPath === undefined ? options.url : 'http://localhost';
  const common = {
    baseUrl,
    readMaxBytes: RPC_MAX_MESSAGE_BYTES,
    writeMaxBytes: RPC_MAX_MESSAGE_BYTES,
    // Processes of one deployment are near each other: compressing costs more than it saves.
    acceptCompression: [],
    interceptors: [
      ...(options.breaker === undefined ? [] : [breakerInterceptor(options.breaker)]),
      ...(options.onEnd === undefined ? [] : [tellEnd(options.onEnd)]),
      ...(options.onCall === undefined ? [] : [timeInterceptor(options.onCall)]),
      ...(options.token === undefined ? [] : [bearer(options.token)]),
      ...(options.tracer === undefined ? [] : [traceInterceptor(options.tracer)]),
      asUnavailable(() => closed),
    ],
  };
  const closing = (close: () => void) => () => {
    closed = true;
    close();
  };
  if (options.httpVersion === '1.1') {
    if (protocol === 'grpc') throw new TypeError('gRPC needs HTTP/2');
    const agent = baseUrl.startsWith('https:')
      ? new HttpsAgent({ keepAlive: true, ...options.tls })
      : new HttpAgent({ keepAlive: true });
    const nodeOptions = { agent, ...(socketPath === undefined ? {} : { socketPath }) };
    const http1 = { ...common, httpVersion: '1.1' as const, nodeOptions };
    const transport = protocol === 'connect' ? createConnectTransport(http1) : createGrpcWebTransport(http1);
    return { transport, close: closing(() => agent.destroy()) };
  }
  // The pings find a peer that vanished under an open watch; nothing else would.
  const sessionManager = new Http2SessionManager(
    baseUrl,
    { pingIntervalMs: 20_000, pingTimeoutMs: 5_000, connectTimeoutMs: options.connectTimeoutMs ?? 3_000 },
    socketPath === undefined ? (options.tls ?? {}) : { createConnection: () => connectSocket(socketPath) },
  );
  const http2 = { ...common, httpVersion: '2' as const, sessionManager };
  const transport =
    protocol === 'grpc'
      ? createGrpcTransport({ ...common, sessionManager })
      : protocol === 'connect'
        ? createConnectTransport(http2)
        : createGrpcWebTransport(http2);
  return { transport, close: closing(() => sessionManager.abort()) };
}

const UNIX = 'unix:';

/**
 * Makes the end of a connection UNAVAILABLE, as gRPC has it: connect-node calls a call CANCELED or ABORTED whose connection
 * broke, and INTERNAL one to the path of a socket where nobody listens.
 */
function asUnavailable(isClosed: () => boolean): Interceptor {
  const mapped = (error: unknown, signal: AbortSignal): unknown => {
    if (!(error instanceof ConnectError) || error.code === Code.Unavailable) return error;
    const broken = error.cause instanceof Error && ('syscall' in error.cause || isReset(error.cause));
    const lost = error.code === Code.Canceled && !signal.aborted && !isClosed();
    if (!broken && !lost) return error;
    const message = broken ? error.rawMessage : 'the connection was lost';
    return new ConnectError(message, Code.Unavailable, undefined, undefined, error.cause);
  };
  return (next) => async (request) => {
    try {
      const response = await next(request);
      if (!response.stream) return response;
      return { ...response, message: mapErrors(response.message, (error) => mapped(error, request.signal)) };
    } catch (error) {
      throw mapped(error, request.signal);
    }
  };
}

function isReset(error: Error): boolean {
  return 'code' in error && error.code === 'ECONNRESET';
}

async function* mapErrors<T>(source: AsyncIterable<T>, mapped: (error: unknown) => unknown): AsyncGenerator<T> {
  try {
    yield* source;
  } catch (error) {
    throw mapped(error);
  }
}

function tellEnd(tell: (error: unknown) => void): Interceptor {
  return (next) => async (request) => {
    try {
      const response = await next(request);
      if (!response.stream) tell(undefined);
      return response;
    } catch (error) {
      tell(error);
      throw error;
    }
  };
}

function bearer(token: string | (() => string | undefined)): Interceptor {
  return (next) => (request) => {
    const value = typeof token === 'string' ? token : token();
    if (value !== undefined && !request.header.has('authorization')) {
      request.header.set('authorization', `Bearer ${value}`);
    }
    return next(request);
  };
}
