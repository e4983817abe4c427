import { randomUUID } from 'node:crypto';
import type { IncomingMessage, Server, ServerResponse } from 'node:http';
import type { Socket } from 'node:net';
import { BatonError } from '../core/errors.ts';
import { acceptedRequestId } from '../core/request-headers.ts';
import { refusalOf } from '../services/leg.ts';
import { renderRefusal } from './errors.ts';

/** What a request that broke was answered. */
export interface SentAnswer {
  readonly requestId: string;
  readonly status: number;
}

/** A request that nobody could read. */
export interface BrokenRequest extends SentAnswer {
  readonly error: BatonError;
  /** Node's code of what is wrong, e.g. `HPE_INVALID_METHOD`; no part of the request. */
  readonly cause: string;
}

const NOT_HTTP = new BatonError({ reason: 'INVALID_ARGUMENT', message: 'The request is no valid HTTP, or not whole.' });
const BROKEN_BODY = new BatonError({
  reason: 'BODY_INCOMPLETE',
  message: 'The body did not come whole, or not in the form that its headers tell.',
});
const LARGE_HEAD = new BatonError({
  reason: 'HEADERS_TOO_LARGE',
  message: 'The head of the request is larger than this server takes.',
});

interface Answer {
  readonly status: number;
  readonly phrase: string;
  readonly error: BatonError;
}

/** By the codes of what Node's parser and timers refuse; everything else is 400. */
const ANSWERS: Readonly<Record<string, Answer>> = {
  HPE_HEADER_OVERFLOW: { status: 431, phrase: 'Request Header Fields Too Large', error: LARGE_HEAD },
  HPE_CHUNK_EXTENSIONS_OVERFLOW: { status: 413, phrase: 'Payload Too Large', error: NOT_HTTP },
  ERR_HTTP_REQUEST_TIMEOUT: { status: 408, phrase: 'Request Timeout', error: NOT_HTTP },
};
const BAD_REQUEST: Answer = { status: 400, phrase: 'Bad Request', error: NOT_HTTP };

/** Answers what is no HTTP request, and closes the connection; for the server's `clientError`. */
export class BrokenRequests {
  readonly #open = new WeakMap<Socket, Set<ServerResponse>>();
  readonly #answered = new WeakMap<Socket, SentAnswer>();
  readonly #tell: (broken: BrokenRequest) => void;

  /** `tell` hears of each that got an answer and is no request with a route: of those the route hears. */
  constructor(tell: (broken: BrokenRequest) => void = () => undefined) {
    this.#tell = tell;
  }

  /** Follows the replies of `server`, of which a late error must not become a part. */
  watch(server: Server): void {
    server.prependListener('request', ({ socket }: IncomingMessage, response: ServerResponse) => {
      const open = this.#open.get(socket) ?? new Set();
      this.#open.set(socket, open.add(response));
      response.once('close', () => open.delete(response));
    });
  }

  /** What was sent for a request whose body broke; undefined if nothing was. */
  answerTo({ socket }: IncomingMessage): SentAnswer | undefined {
    return this.#answered.get(socket);
  }

  answer(error: Error, socket: Socket): void {
    const cause = 'code' in error && typeof error.code === 'string' ? error.code : '';
    const open = [...(this.#open.get(socket) ?? [])];
    const isReplying = open.some(({ headersSent }) => headersSent);
    if (cause === 'ECONNRESET' || !socket.writable || isReplying) {
      socket.destroy();
      return;
    }
    const unread = open.find(({ req }) => !req.complete)?.req;
    const requestId = acceptedRequestId(unread?.headers['x-request-id']) ?? randomUUID();
    const known = ANSWERS[cause] ?? BAD_REQUEST;
    const { status, phrase, error: refused } = unread === undefined ? known : { ...known, error: BROKEN_BODY };
    const { headers, body } = renderRefusal(refusalOf(refused));
    const lines = Object.entries({
      ...headers,
      'x-request-id': requestId,
      connection: 'close',
      'content-length': String(Buffer.byteLength(body)),
    });
    const head = lines.map(([name, value]) => `${name}: ${value}\r\n`).join('');
    socket.end(`HTTP/1.1 ${status} ${phrase}\r\n${head}\r\n${body}`);
    this.#answered.set(socket, { requestId, status });
    // Who opens a connection, or keeps one, and says nothing has asked for nothing.
    if (unread === undefined && socket.bytesRead > 0) this.#tell({ requestId, status, error: refused, cause });
  }
}
