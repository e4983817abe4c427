import { createServer as createHttp1Server, type RequestListener, type Server } from 'node:http';
import { createServer as createHttp2Server, type ServerHttp2Session } from 'node:http2';
import { createServer as createHttpsServer, type Server as HttpsServer } from 'node:https';
import type { AddressInfo, Socket } from 'node:net';
import type { ConnectError } from '@connectrpc/connect';
import { BatonError } from '../core/errors.ts';
import { contextOf, type ServerTls } from '../core/server-tls.ts';
import type { FaultSink } from './bind.ts';
import type { CallerOf } from './caller.ts';
import { connectErrorFromBaton } from './errors.ts';
import { RpcHandler } from './handler.ts';
import { sniffProtocol } from './protocol-sniff.ts';
import type { RpcServices } from './routes.ts';
import type { CallTimer } from './time-calls.ts';
import { clearSocketPath, forOwnerAlone } from './unix-socket.ts';

/** What {@link startRpcListener} needs. */
export interface RpcListenerOptions {
  readonly host: string;
  /** 0 takes any free port, `off` opens none. */
  readonly port: number | 'off';
  /** TLS of the port. Default: it speaks cleartext. */
  readonly tls?: ServerTls;
  /** Path of a unix socket that serves the same, in cleartext and for the owner of this process alone. Default none. */
  readonly socketPath?: string;
  readonly services: RpcServices;
  readonly callerOf: CallerOf;
  /** Gets every fault of an implementation and of the listener. */
  readonly onFault: FaultSink;
  /** Told of each call with a single answer that came as far as its implementation; must not throw. */
  readonly onCall?: CallTimer;
  /** A socket that says too little to tell its protocol is closed after this time, milliseconds. Default 10,000. */
  readonly silentMs?: number;
  /** Connections of the port at a time; one more is closed at once. Default no limit. */
  readonly maxConnections?: number;
}

/** A listening RPC port. Disposing closes it at once. */
export interface RpcListener extends AsyncDisposable {
  readonly host: string;
  /** 0 where the port is off. */
  readonly port: number;
  /** Later connections get these certificates; throws on some that do not fit, and keeps the old ones. */
  useTls(tls: ServerTls): void;
  /**
   * Stops accepting, ends open streams with UNAVAILABLE and SHUTTING_DOWN, and lets unary calls finish for at most
   * `drainMs`; then aborts the rest. Resolves when every connection is closed, whether or not peers close theirs.
   */
  close(drainMs: number): Promise<void>;
}

/**
 * Serves Connect, gRPC and gRPC-Web over HTTP/1.1 and HTTP/2, on a port and on a unix socket. A listening socket belongs
 * to an `http.Server` or `https.Server`, so that their time limits hold for HTTP/1.1; connections with HTTP/2, told by
 * their first bytes or by ALPN, go to an `http2.Server`.
 */
export async function startRpcListener(options: RpcListenerOptions): Promise<RpcListener> {
  const silentMs = options.silentMs ?? 10_000;
  const streamStop = new AbortController();
  const callStop = new AbortController();
  // A request that is cut off in its body must not be waited for at a stop either.
  const requestMs = REQUEST_SILENCES * silentMs;
  const stops = { streamStop: streamStop.signal, callStop: callStop.signal };
  const handler = new RpcHandler({ ...options, ...stops, requestMs });
  const sessions = new Set<ServerHttp2Session>();
  const sockets: Sockets = { open: new Set(), undecided: new Set() };
  let draining = false;

  const limits = {
    headersTimeout: silentMs,
    requestTimeout: requestMs,
    connectionsCheckingInterval: Math.min(silentMs, 5_000),
    keepAliveTimeout: 65_000,
  };
  const servers: Server[] = [];
  const onHttp1Request: RequestListener = (request, response) => {
    if (draining) response.setHeader('connection', 'close');
    // A connection that was busy when draining began is idle from here on, and nothing else would close it.
    response.once('close', () => {
      if (draining) setImmediate(() => servers.forEach((server) => void server.closeIdleConnections()));
    });
    handler.handle(request, response);
  };
  const http2Server = createHttp2Server(HTTP2_LIMITS, handler.handle);
  http2Server.on('session', (session) => {
    sessions.add(session);
    const timer = setTimeout(() => session.destroy(), silentMs);
    session.once('remoteSettings', () => clearTimeout(timer));
    session.once('close', () => {
      clearTimeout(timer);
      sessions.delete(session);
    });
    if (draining) session.close();
  });
  const toHttp2 = (socket: Socket) => {
    // An HTTP server keeps its sockets half open; an HTTP/2 session would never hear that its peer has died.
    socket.allowHalfOpen = false;
    http2Server.emit('connection', socket);
  };

  let secure: HttpsServer | undefined;
  const openCleartext = () => {
    const server = createHttp1Server(limits, onHttp1Request);
    sniffConnections(server, silentMs, sockets, toHttp2);
    return server;
  };
  const openSecure = (tls: ServerTls) => {
    const clients = { requestCert: tls.clientCa !== undefined, rejectUnauthorized: true };
    const protocols = { ALPNProtocols: ['h2', 'http/1.1'], handshakeTimeout: silentMs };
    secure = createHttpsServer({ ...limits, ...contextOf(tls), ...clients, ...protocols }, onHttp1Request);
    splitByAlpn(secure, sockets, toHttp2);
    return secure;
  };
  let address: AddressInfo | undefined;
  try {
    if (options.port !== 'off') {
      const { host, port } = options;
      const server = options.tls === undefined ? openCleartext() : openSecure(options.tls);
      if (options.maxConnections !== undefined) server.maxConnections = options.maxConnections;
      await listening(server, () => server.listen(port, host));
      servers.push(server);
      address = addressOf(server);
    }
    const { socketPath } = options;
    if (socketPath !== undefined) {
      await clearSocketPath(socketPath);
      const server = openCleartext();
      await listening(server, () => forOwnerAlone(() => void server.listen(socketPath)));
      servers.push(server);
    }
  } catch (error) {
    for (const server of servers) server.close();
    handler[Symbol.dispose]();
    throw error;
  }

  const close = async (drainMs: number) => {
    draining = true;
    streamStop.abort(shuttingDown());
    const closed = Promise.all(servers.map((server) => new Promise<void>((done) => server.close(() => done()))));
    for (const session of sessions) session.close();
    for (const socket of sockets.undecided) socket.destroy();
    const timeUp = setTimeout(() => callStop.abort(shuttingDown()), drainMs);
    const answered = Promise.race([handler.idle(), aborted(callStop.signal)]);
    // A peer may leave the end of its side, or the end of a stream, out for ever.
    const lastWords = answered.then(() => {
      clearTimeout(timeUp);
      return after(callStop.signal.aborted ? ABORTED_MS : Math.max(ABORTED_MS, Math.min(LINGER_MS, drainMs)), closed);
    });
    await Promise.race([closed, lastWords]);
    clearTimeout(timeUp);
    for (const socket of sockets.open) socket.destroy();
    await closed;
    handler[Symbol.dispose]();
  };
  let closing: Promise<void> | undefined;
  return {
    host: address?.address ?? options.host,
    port: address?.port ?? 0,
    useTls: (tls) => secure?.setSecureContext(contextOf(tls)),
    close: (drainMs) => (closing ??= close(drainMs)),
    [Symbol.asyncDispose]: () => (closing ??= close(0)),
  };
}

/** A session that runs out of its memory budget refuses streams; the default does not hold one full message. */
const HTTP2_LIMITS = { maxSessionMemory: 64, settings: { maxConcurrentStreams: 1000, maxHeaderListSize: 32_768 } };

/** A whole request has to come within so many times the time that a silent connection has. */
const REQUEST_SILENCES = 3;

/** How long calls that are aborted at the end of a drain have to tell their callers, milliseconds. */
const ABORTED_MS = 50;

/** How long answers and the ends of streams have to reach their callers after the last call, milliseconds. */
const LINGER_MS = 500;

interface Sockets {
  readonly open: Set<Socket>;
  /** Those of cleartext listeners whose protocol is not known yet. */
  readonly undecided: Set<Socket>;
}

/** Puts the protocol sniffer before the connection listener that the HTTP/1.1 server has installed on itself. */
function sniffConnections(server: Server, silentMs: number, sockets: Sockets, http2: (socket: Socket) => void): void {
  const http1 = takeListeners(server, 'connection');
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
      else http1(socket);
    });
  });
}

/** Does after the handshake what {@link sniffConnections} does without one. */
function splitByAlpn(server: HttpsServer, sockets: Sockets, http2: (socket: Socket) => void): void {
  // The connection itself, so that one without a handshake ends too; it must not count as undecided after that.
  server.prependListener('connection', (socket: Socket) => {
    sockets.open.add(socket);
    socket.once('close', () => sockets.open.delete(socket));
  });
  const http1 = takeListeners(server, 'secureConnection');
  server.on('secureConnection', (socket) => {
    if (socket.alpnProtocol === 'h2') http2(socket);
    else http1(socket);
  });
}

function takeListeners(server: Server | HttpsServer, event: string): (socket: Socket) => void {
  const listeners = server.listeners(event);
  server.removeAllListeners(event);
  return (socket) => {
    for (const listener of listeners) Reflect.apply(listener, server, [socket]);
  };
}

function listening(server: Server, listen: () => void): Promise<void> {
  return new Promise((resolve, reject) => {
    server.once('error', reject);
    server.once('listening', () => {
      server.off('error', reject);
      resolve();
    });
    listen();
  });
}

function addressOf(server: Server): AddressInfo {
  const address = server.address();
  if (address === null || typeof address === 'string') throw new TypeError('an RPC port is a TCP port');
  return address;
}

function aborted(signal: AbortSignal): Promise<void> {
  return new Promise((resolve) => signal.addEventListener('abort', () => resolve(), { once: true }));
}

/** Resolves after a time, or when `earlier` does. */
function after(ms: number, earlier: Promise<unknown>): Promise<void> {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    void earlier.then(() => clearTimeout(timer));
  });
}

function shuttingDown(): ConnectError {
  return connectErrorFromBaton(new BatonError({ reason: 'SHUTTING_DOWN', message: 'this process is shutting down' }));
}
