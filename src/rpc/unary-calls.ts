import type { IncomingMessage, OutgoingHttpHeaders, ServerResponse } from 'node:http';
import { constants, type Http2ServerRequest, type Http2ServerResponse, type ServerHttp2Stream } from 'node:http2';
import { create, type DescMessage, type DescMethod, type Message } from '@bufbuild/protobuf';
import { Code, ConnectError } from '@connectrpc/connect';
import { createMethodSerializationLookup, type MethodSerializationLookup } from '@connectrpc/connect/protocol';
import {
  codeToHttpStatus,
  contentTypeUnaryJson,
  contentTypeUnaryProto,
  errorToJsonBytes,
  headerTimeout,
  headerUnaryAcceptEncoding,
  headerUnaryEncoding,
  parseTimeout,
  trailerMux,
} from '@connectrpc/connect/protocol-connect';
import { compressionGzip } from '@connectrpc/connect-node';
import type { BoundMethod } from './bind.ts';
import { admitCaller, CALLER, type CallerOf } from './caller.ts';
import { LazyContext } from './lazy-context.ts';
import { COMPRESS_MIN_BYTES, RPC_MAX_MESSAGE_BYTES, RPC_MAX_TIMEOUT_MS } from './limits.ts';
import { unreadMessage } from './unread-message.ts';

export type NodeRequest = IncomingMessage | Http2ServerRequest;
export type NodeResponse = ServerResponse | Http2ServerResponse;

type BoundUnary = Extract<BoundMethod, { kind: 'unary' }>;

/** What {@link UnaryCalls} need. */
export interface UnaryCallsOptions {
  readonly methods: readonly BoundMethod[];
  readonly callerOf: CallerOf;
  /** Ends every open call with its reason. */
  readonly callStop: AbortSignal;
}

/**
 * Serves calls with a single answer in Connect's binary form without the async iterables that connect-node puts between a
 * request and its message: they cost more than a whole take of the store. Only what a usual client sends is taken; the
 * rest, and whatever has to be refused before its body is read, is left to connect-node, which answers the same.
 */
export class UnaryCalls {
  readonly #routes: ReadonlyMap<string, Route>;
  readonly #callerOf: CallerOf;
  readonly #callStop: AbortSignal;

  constructor({ methods, callerOf, callStop }: UnaryCallsOptions) {
    const unary = methods.filter((bound): bound is BoundUnary => bound.kind === 'unary');
    this.#routes = new Map(
      unary.map((bound) => [`/${bound.method.parent.typeName}/${bound.method.name}`, routeOf(bound)]),
    );
    this.#callerOf = callerOf;
    this.#callStop = callStop;
  }

  /** Begins to serve the request; undefined leaves it untouched. The promise rejects with faults of this process only. */
  serve(path: string, request: NodeRequest, response: NodeResponse): Promise<void> | undefined {
    const route = this.#routes.get(path);
    const { headers } = request;
    if (route === undefined || request.method !== 'POST' || headers['content-type'] !== contentTypeUnaryProto)
      return undefined;
    if (headers['content-encoding'] !== undefined) return undefined;
    const length = Number(headers['content-length']);
    // Over HTTP/1.1 there is no way to end a request that turns out to be too long but the end of its connection.
    if (length > RPC_MAX_MESSAGE_BYTES || (Number.isNaN(length) && !('stream' in request))) return undefined;
    const { timeoutMs, error } = parseTimeout(textOf(headers[headerTimeout.toLowerCase()]), RPC_MAX_TIMEOUT_MS);
    if (error !== undefined) return undefined;
    const context = new WireContext(route.bound.method, timeoutMs, request, this.#callStop);
    try {
      const caller = admitCaller(this.#callerOf, route.bound.method, headers.authorization);
      if (caller !== undefined) context.values.set(CALLER, caller);
    } catch {
      return undefined;
    }
    response.once('close', () => context.leave());
    return readBody(request).then((body) => (body === undefined ? undefined : answer(route, context, body, response)));
  }
}

interface Route {
  readonly bound: BoundUnary;
  readonly serialization: MethodSerializationLookup<DescMessage, DescMessage>;
}

function routeOf(bound: BoundUnary): Route {
  const limits = { readMaxBytes: RPC_MAX_MESSAGE_BYTES, writeMaxBytes: RPC_MAX_MESSAGE_BYTES };
  return { bound, serialization: createMethodSerializationLookup(bound.method, undefined, undefined, limits) };
}

/** Context of a call that came through a port. */
class WireContext extends LazyContext {
  readonly protocolName = 'connect';
  readonly #request: NodeRequest;
  readonly #callStop: AbortSignal;

  constructor(method: DescMethod, timeoutMs: number | undefined, request: NodeRequest, callStop: AbortSignal) {
    super(method, timeoutMs);
    this.#request = request;
    this.#callStop = callStop;
  }

  get url(): string {
    const { url = '', headers } = this.#request;
    return `http://${headers.host ?? textOf(headers[':authority']) ?? ''}${url}`;
  }

  /** Ends the call if it runs: its caller went away. */
  leave(): void {
    // An error costs more than the rest of a call's end.
    if (!this.hasEnded) this.end(new ConnectError('the caller went away', Code.Canceled));
  }

  override end(reason?: Error): void {
    super.end(reason);
    this.#callStop.removeEventListener('abort', this.#onStop);
  }

  protected readRequestHeader(): Headers {
    const headers = new Headers();
    for (const [name, value] of Object.entries(this.#request.headers)) {
      if (name.startsWith(':') || value === undefined) continue;
      for (const each of [value].flat()) headers.append(name, each);
    }
    return headers;
  }

  protected override watchForEnd(): void {
    if (this.#callStop.aborted) this.#onStop();
    else this.#callStop.addEventListener('abort', this.#onStop);
    super.watchForEnd();
  }

  readonly #onStop = (): void => this.end(ConnectError.from(this.#callStop.reason));
}

/** The whole body, or why it is none; undefined if its sender went away. Neither is kept longer than the call. */
function readBody(request: NodeRequest): Promise<Uint8Array | ConnectError | undefined> {
  return new Promise((resolve) => {
    const chunks: Buffer[] = [];
    let length = 0;
    request.on('data', (chunk: Buffer) => {
      length += chunk.length;
      if (length <= RPC_MAX_MESSAGE_BYTES) {
        chunks.push(chunk);
      } else {
        chunks.length = 0;
        resolve(tooLong(length));
      }
    });
    request.once('end', () => {
      const [first] = chunks;
      resolve(first !== undefined && chunks.length === 1 ? first : Buffer.concat(chunks, length));
    });
    // A request that broke closes without its end.
    request.once('error', () => resolve(undefined));
    request.once('close', () => resolve(undefined));
  });
}

function tooLong(length: number): ConnectError {
  const text = `message size ${length} is larger than the limit of ${RPC_MAX_MESSAGE_BYTES} bytes`;
  return new ConnectError(text, Code.ResourceExhausted);
}

async function answer(
  { bound, serialization }: Route,
  context: WireContext,
  body: Uint8Array | ConnectError,
  response: NodeResponse,
): Promise<void> {
  let status = 200;
  const headers: OutgoingHttpHeaders = { 'content-type': contentTypeUnaryProto };
  let bytes: Uint8Array;
  try {
    if (body instanceof ConnectError) throw body;
    const output = await bound.call(parse(serialization, body), context);
    bytes = serialization.getO(true).serialize(create(bound.method.output, output));
  } catch (thrown) {
    const error = thrown instanceof ConnectError ? thrown : new ConnectError('internal error', Code.Internal);
    status = codeToHttpStatus(error.code);
    headers['content-type'] = contentTypeUnaryJson;
    bytes = errorToJsonBytes(error, undefined);
  } finally {
    context.end();
  }
  if (context.hasAnswerHeaders) {
    for (const [name, value] of trailerMux(context.responseHeader, context.responseTrailer)) headers[name] ??= value;
  }
  const { req: request } = response;
  if (bytes.length >= COMPRESS_MIN_BYTES && accepts(request, compressionGzip.name)) {
    bytes = await compressionGzip.compress(bytes);
    headers[headerUnaryEncoding] = compressionGzip.name;
  }
  headers['content-length'] = bytes.length;
  if ('stream' in response) {
    if (body instanceof ConnectError) stopSending(response.stream);
    response.writeHead(status, headers);
  } else {
    response.writeHead(status, headers);
  }
  response.end(bytes);
}

function parse(serialization: Route['serialization'], body: Uint8Array): Message {
  try {
    return serialization.getI(true).parse(body);
  } catch (error) {
    throw unreadMessage(error);
  }
}

/** Ends a request in its middle once its answer is written; Node tells of that one turn before the last frame is out. */
function stopSending(stream: ServerHttp2Stream): void {
  stream.once('wantTrailers', () => setImmediate(() => stream.close(constants.NGHTTP2_NO_ERROR)));
}

function accepts({ headers }: NodeRequest, encoding: string): boolean {
  const names = textOf(headers[headerUnaryAcceptEncoding.toLowerCase()])?.split(',') ?? [];
  return names.some((name) => name.trim() === encoding);
}

function textOf(header: string | string[] | undefined): string | null {
  return header === undefined ? null : header.toString();
}
