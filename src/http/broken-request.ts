import type { IncomingMessage, Server, ServerResponse } from 'node:http';
import type { Socket } from 'node:net';
import { BatonError } from '../core/errors.ts';
import { refusalOf } from '../services/leg.ts';
import { renderRefusal } from './errors.ts';

/** Statuses of what Node's parser and timers refuse; everything else is 400. */
const STATUSES: Readonly<Record<string, string>> = {
  HPE_HEADER_OVERFLOW: '431 Request Header Fields Too Large',
  HPE_CHUNK_EXTENSIONS_OVERFLOW: '413 Payload Too Large',
  ERR_HTTP_REQUEST_TIMEOUT: '408 Request Timeout',
};

/** Answers what is no HTTP request, and closes the connection; for the server's `clientError`. */
export class BrokenRequests {
  readonly #open = new WeakMap<Socket, Set<ServerResponse>>();

  /** Follows the replies of `server`, of which a late error must not become a part. */
  watch(server: Server): void {
    server.prependListener('request', ({ socket }: IncomingMessage, response: ServerResponse) => {
      const open = this.#open.get(socket) ?? new Set();
      this.#open.set(socket, open.add(response));
      response.once('close', () => open.delete(response));
    });
  }

  answer(error: Error, socket: Socket): void {
    const code = 'code' in error && typeof error.code === 'string' ? error.code : '';
    const isReplying = [...(this.#open.get(socket) ?? [])].some(({ headersSent }) => headersSent);
    if (code === 'ECONNRESET' || !socket.writable || isReplying) {
      socket.destroy();
      return;
    }
    const { headers, body } = renderRefusal(refusalOf(NOT_HTTP));
    const lines = Object.entries({
      ...headers,
      connection: 'close',
      'content-length': String(Buffer.byteLength(body)),
    });
    const head = lines.map(([name, value]) => `${name}: ${value}\r\n`).join('');
    socket.end(`HTTP/1.1 ${STATUSES[code] ?? '400 Bad Request'}\r\n${head}\r\n${body}`);
  }
}

const NOT_HTTP = new BatonError({ reason: 'INVALID_ARGUMENT', message: 'The request is no valid HTTP, or not whole.' });
