import { Code, ConnectError, type ContextValues, createContextKey } from '@connectrpc/connect';
import type { UniversalServerResponse } from '@connectrpc/connect/protocol';
import { codeToHttpStatus, errorToJsonBytes } from '@connectrpc/connect/protocol-connect';

/** Whether the message of a call has been read. */
export const WAS_READ = createContextKey(false);

/** The refusal of a message that cannot be read: a mistake of the caller. */
export function unreadMessage(cause?: unknown): ConnectError {
  return new ConnectError('the message cannot be read', Code.InvalidArgument, undefined, undefined, cause);
}

const INTERNAL = codeToHttpStatus(Code.Internal);

/**
 * The answer that a caller gets. Of a message that it cannot read connect says INTERNAL, which is gRPC's word; in the Connect
 * protocol that is an HTTP status, and one that blames the server.
 */
export function blameCaller(values: ContextValues, answer: UniversalServerResponse): UniversalServerResponse {
  if (answer.status !== INTERNAL || values.get(WAS_READ)) return answer;
  const body = errorToJsonBytes(unreadMessage(), undefined);
  const header = new Headers(answer.header);
  header.set('content-length', String(body.byteLength));
  return { ...answer, status: codeToHttpStatus(Code.InvalidArgument), header, body: only(body) };
}

async function* only(bytes: Uint8Array): AsyncIterable<Uint8Array> {
  yield bytes;
}
