import { createServer, type IncomingMessage, type Server, type ServerResponse } from 'node:http';
import type { Socket } from 'node:net';
import { isObject } from './json.ts';
import { type Leg, legOf } from './kv-params.ts';
import { portOf } from './port-of.ts';

/** A request as it arrived. */
export interface RecordedRequest {
  readonly method: string;
  readonly path: string;
  /** Name and value in turn, as received. */
  readonly rawHeaders: readonly string[];
  readonly headers: Readonly<Record<string, string | string[] | undefined>>;
  readonly body: Buffer;
  readonly leg: Leg;
  /** Number of the TCP connection, from 1, and of the request on it, from 1. */
  readonly connection: number;
  readonly onConnection: number;
}

/** One open HTTP exchange; `signal` aborts when the client leaves. */
export interface Exchange {
  readonly request: RecordedRequest;
  readonly parsed: unknown;
  readonly response: ServerResponse;
  readonly socket: Socket;
  readonly signal: AbortSignal;
  /** The 8 hex digits that tell its engine requests from others; empty before it has any. */
  suffix: string;
  /** Never answered: its engine died without a word. */
  isSilent: boolean;
}

const resetTurns = 4;

interface Connection {
  readonly id: number;
  served: number;
}

/** Resets a connection instead of closing it. */
export function resetSocket(socket: Socket): void {
  if (!socket.destroyed) socket.resetAndDestroy();
}

/** Sends a body at once. */
export function sendText(response: ServerResponse, status: number, type: string | undefined, text: string): void {
  if (response.destroyed || response.headersSent) return;
  const headers = type === undefined ? {} : { 'content-type': type };
  response.writeHead(status, { ...headers, 'content-length': Buffer.byteLength(text) });
  response.end(text);
}

/** Sends JSON at once. */
export function sendJson(response: ServerResponse, status: number, value: unknown): void {
  sendText(response, status, 'application/json', JSON.stringify(value));
}

/**
 * The HTTP listener of an engine: reads whole bodies, tracks connections so that they can be reset or closed, and can
 * go away and come back on the same port.
 */
export class HttpFront {
  port: number;
  readonly open = new Set<Exchange>();
  private server: Server | undefined;
  private readonly connections = new Map<Socket, Connection>();
  private connectionCount = 0;
  private readonly host: string;
  private readonly keepAliveMs: number;
  private readonly handle: (exchange: Exchange) => Promise<void>;
  private readonly record: ((request: RecordedRequest) => void) | undefined;
  private readonly noticeLeave: (notice: () => void) => void;

  /** @param noticeLeave calls `notice` when the engine sees that a client has left */
  constructor(
    host: string,
    port: number,
    keepAliveMs: number,
    handle: (exchange: Exchange) => Promise<void>,
    record: ((request: RecordedRequest) => void) | undefined,
    noticeLeave: (notice: () => void) => void,
  ) {
    this.host = host;
    this.port = port;
    this.keepAliveMs = keepAliveMs;
    this.handle = handle;
    this.record = record;
    this.noticeLeave = noticeLeave;
  }

  get isListening(): boolean {
    return this.server !== undefined;
  }

  /** Opens the listener on the port of the options, or the one it had before; rejects if it is in use. */
  listen(): Promise<void> {
    const server = createServer({ keepAliveTimeout: this.keepAliveMs, noDelay: true }, (request, response) => {
      void this.accept(request, response);
    });
    server.keepAliveTimeoutBuffer = 0;
    server.requestTimeout = 0;
    server.headersTimeout = 60_000;
    server.on('connection', (socket) => {
      this.connectionCount += 1;
      this.connections.set(socket, { id: this.connectionCount, served: 0 });
      socket.on('close', () => this.connections.delete(socket));
      socket.on('error', () => socket.destroy());
    });
    return new Promise((resolve, reject) => {
      server.once('error', reject);
      server.listen(this.port, this.host, () => {
        server.off('error', reject);
        this.server = server;
        this.port = portOf(server.address());
        resolve();
      });
    });
  }

  /** Stops listening; open exchanges go on, idle connections are closed. */
  async stopListening(): Promise<void> {
    const { server } = this;
    this.server = undefined;
    if (server === undefined) return;
    const busy = new Set([...this.open].map((exchange) => exchange.socket));
    for (const socket of this.connections.keys()) if (!busy.has(socket)) socket.destroy();
    server.close();
    await new Promise((resolve) => setImmediate(resolve));
  }

  /** Resets every connection, except those of silent exchanges if asked to keep them. */
  async resetAll(keepSilent: boolean): Promise<void> {
    const kept = new Set([...this.open].filter((exchange) => keepSilent && exchange.isSilent).map((e) => e.socket));
    for (const socket of this.connections.keys()) if (!kept.has(socket)) resetSocket(socket);
    // The resets leave this process in the next turns; clients in the same process have then seen them.
    for (let turn = 0; turn < resetTurns; turn += 1) await new Promise((resolve) => setImmediate(resolve));
  }

  private async accept(message: IncomingMessage, response: ServerResponse): Promise<void> {
    const { socket } = message;
    if (!this.isListening) {
      resetSocket(socket);
      return;
    }
    const connection = this.connections.get(socket) ?? { id: 0, served: 0 };
    connection.served += 1;
    const onConnection = connection.served;
    const chunks: Uint8Array[] = [];
    try {
      for await (const chunk of message) if (chunk instanceof Uint8Array) chunks.push(chunk);
    } catch {
      return;
    }
    const body = Buffer.concat(chunks);
    let parsed: unknown;
    try {
      parsed = body.length === 0 ? undefined : JSON.parse(body.toString('utf8'));
    } catch {
      parsed = undefined;
    }
    const request: RecordedRequest = {
      method: message.method ?? 'GET',
      path: (message.url ?? '/').split('?')[0] ?? '/',
      rawHeaders: message.rawHeaders,
      headers: message.headers,
      body,
      leg: isObject(parsed) ? legOf(parsed['kv_transfer_params']) : 'plain',
      connection: connection.id,
      onConnection,
    };
    this.record?.(request);
    const left = new AbortController();
    response.on('close', () => {
      if (!response.writableFinished) this.noticeLeave(() => left.abort());
    });
    response.setHeader('x-baton-sim', '1');
    response.setHeader('server', 'uvicorn');
    // uvicorn keeps connections without saying so or for how long.
    if (message.headers.connection?.toLowerCase() !== 'close') response.removeHeader('connection');
    const exchange: Exchange = {
      request,
      parsed,
      response,
      socket,
      signal: left.signal,
      suffix: '',
      isSilent: false,
    };
    this.open.add(exchange);
    try {
      await this.handle(exchange);
    } catch (error) {
      if (!response.headersSent) sendText(response, 500, 'text/plain', `simulator failure: ${String(error)}`);
      else resetSocket(socket);
    } finally {
      this.open.delete(exchange);
    }
  }
}
