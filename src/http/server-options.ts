import type { Socket } from 'node:net';
import process from 'node:process';
import Fastify, { type FastifyInstance, type FastifyServerOptions } from 'fastify';
import { contextOf, type ServerTls } from '../core/server-tls.ts';
import type { Logger } from '../obs/log.ts';
import { createLogLimit } from '../obs/log-limit.ts';

/** What connections and heads of requests may cost; times in milliseconds. */
export interface ServerLimits {
  /** Bytes of the head of a request. */
  readonly headerBytes: number;
  /** For the head of a request, from the first byte of a connection or request on. */
  readonly headerMs: number;
  /** Most at a time. */
  readonly connections: number;
}

/** Fastify's own. */
const KEEP_ALIVE_MS = 72_000;
/** Most time between two looks for connections that are over their time. */
const LOOK_MS = 5_000;

/** Makes Fastify with a server of its own, with TLS or without. */
export function openServer(
  { headerBytes, headerMs }: ServerLimits,
  tls: ServerTls | undefined,
  options: FastifyServerOptions,
): FastifyInstance {
  const http = {
    maxHeaderSize: headerBytes,
    headersTimeout: headerMs,
    ...(headerMs === 0 ? {} : { connectionsCheckingInterval: Math.min(headerMs, LOOK_MS) }),
  };
  if (tls === undefined) return Fastify({ ...options, http });
  const { keepAliveTimeout = KEEP_ALIVE_MS, requestTimeout = 0 } = options;
  const https = {
    ...http,
    ...contextOf(tls),
    keepAliveTimeout,
    requestTimeout,
    requestCert: tls.clientCa !== undefined,
    rejectUnauthorized: true,
    ALPNProtocols: ['http/1.1'],
    ...(headerMs === 0 ? {} : { handshakeTimeout: headerMs }),
  };
  // Opened only where TLS is wanted: a start without it is faster.
  const { createServer } = process.getBuiltinModule('node:https');
  // Of the addresses of a name (localhost) it listens on the first alone: a second server would keep its certificates.
  return Fastify({ ...options, serverFactory: (handler) => createServer(https, handler) });
}

/** Later connections get these certificates; throws on some that do not fit, and keeps the old ones. */
export function renewTls(app: FastifyInstance, tls: ServerTls): void {
  const { Server: TlsServer } = process.getBuiltinModule('node:tls');
  if (app.server instanceof TlsServer) app.server.setSecureContext(contextOf(tls));
}

/** Between two warnings about connections, milliseconds. */
const WARN_MS = 60_000;

/** Closes connections over the limit at once, and says in the log what became of those that never made a request. */
export function limitConnections(app: FastifyInstance, name: string, { connections }: ServerLimits, log: Logger): void {
  const now = () => performance.now();
  const dropped = createLogLimit(WARN_MS, now);
  const unshaken = createLogLimit(WARN_MS, now);
  app.server.maxConnections = connections;
  app.server.on('drop', () => {
    const heldBack = dropped.pass();
    if (heldBack === undefined) return;
    log.warn(
      { listener: name, connections, held_back: heldBack },
      'a connection was closed, because there are too many',
    );
  });
  app.server.on('tlsClientError', (error: Error & { readonly code?: string }, socket: Socket) => {
    socket.destroy();
    const heldBack = unshaken.pass();
    if (heldBack === undefined) return;
    log.warn(
      { listener: name, cause: error.code ?? 'unknown', held_back: heldBack },
      'a connection failed in its TLS handshake',
    );
  });
}
