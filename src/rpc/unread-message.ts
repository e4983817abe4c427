import { Code, ConnectError } from '@connectrpc/connect';
import type { UniversalServerRequest, UniversalServerResponse } from '@connectrpc/connect/protocol';
import { codeToHttpStatus, errorToJsonBytes } from '@connectrpc/connect/protocol-connect';

/** The refusal of a message that cannot be read: a mistake of the caller, which 500 would not say. */
export function unreadMessage(cause?: unknown): ConnectError {
  return new ConnectError('the message cannot be read', Code.InvalidArgument, undefined, undefined, cause);
}

const INTERNAL = codeToHttpStatus(Code.Internal);

/**
 * Tells calls whose message connect could not read from those that failed. Of the former it says INTERNAL, which is gRPC's
 * word; in the Connect protocol that is an HTTP status, and one that blames the server.
 */
export class UnreadMessages {
  /** Headers of calls whose message was read. */
  readonly #read = new WeakSet<Headers>();

  /** The message of the call with these headers has been read. */
  noteRead(header: Headers): void {
    this.#read.add(header);
  }

  /** The answer that the caller is to get. */
  answerOf(request: UniversalServerRequest, answer: UniversalServerResponse): UniversalServerResponse {
    if (answer.status !== INTERNAL || this.#read.has(request.header)) return answer;
    const body = errorToJsonBytes(unreadMessage(), undefined);
    return { ...answer, status: codeToHttpStatus(Code.InvalidArgument), body: only(body) };
  }
}

async function* only(bytes: Uint8Array): AsyncIterable<Uint8Array> {
  yield bytes;
}
