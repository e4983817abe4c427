import { durationFromMs, durationMs } from '@bufbuild/protobuf/wkt';
import { Code, ConnectError } from '@connectrpc/connect';
import { BadRequestSchema, ErrorInfoSchema, RetryInfoSchema } from '../../gen/google/rpc/error_details_pb.ts';
import { BatonError, type ErrorCode, type ErrorReasonName, isErrorReason } from '../core/errors.ts';

/** `ErrorInfo.domain` of every error that baton makes. */
const ERROR_DOMAIN = 'baton';

const CODES: Readonly<Record<ErrorCode, Code>> = {
  aborted: Code.Aborted,
  canceled: Code.Canceled,
  deadline_exceeded: Code.DeadlineExceeded,
  failed_precondition: Code.FailedPrecondition,
  internal: Code.Internal,
  invalid_argument: Code.InvalidArgument,
  not_found: Code.NotFound,
  permission_denied: Code.PermissionDenied,
  resource_exhausted: Code.ResourceExhausted,
  unauthenticated: Code.Unauthenticated,
  unavailable: Code.Unavailable,
  unimplemented: Code.Unimplemented,
};

type Details = NonNullable<ConstructorParameters<typeof ConnectError>[3]>;

/** The error as the RPC port sends it: code, ErrorInfo, and RetryInfo or BadRequest where they fit. */
export function connectErrorFromBaton(error: BatonError): ConnectError {
  const details: Details = [
    { desc: ErrorInfoSchema, value: { reason: error.reason, domain: ERROR_DOMAIN, metadata: { ...error.metadata } } },
  ];
  if (error.retryAfterMs !== undefined) {
    details.push({ desc: RetryInfoSchema, value: { retryDelay: durationFromMs(error.retryAfterMs) } });
  }
  if (error.param !== null) {
    details.push({
      desc: BadRequestSchema,
      value: { fieldViolations: [{ field: error.param, description: error.message }] },
    });
  }
  return new ConnectError(error.message, CODES[error.code], undefined, details, error);
}

/**
 * Any value that an implementation throws, as the caller is to see it: a ConnectError as it is, a BatonError mapped,
 * the end of `signal` as its reason, and everything else as INTERNAL without its text (the cause keeps it for logs).
 */
export function connectErrorFrom(thrown: unknown, signal?: AbortSignal): ConnectError {
  if (thrown instanceof ConnectError) return thrown;
  if (thrown instanceof BatonError) return connectErrorFromBaton(thrown);
  if (signal?.aborted === true && (thrown === signal.reason || isAbortError(thrown))) return abortErrorOf(signal);
  const details: Details = [
    { desc: ErrorInfoSchema, value: { reason: 'INTERNAL' satisfies ErrorReasonName, domain: ERROR_DOMAIN } },
  ];
  return new ConnectError('internal error', Code.Internal, undefined, details, thrown);
}

/** A code as a word, e.g. `deadline_exceeded`. */
export function codeWord(code: Code): string {
  return Code[code].replaceAll(/(?<!^)([A-Z])/g, '_$1').toLowerCase();
}

/** Why an aborted signal ended a call: its reason if that is a ConnectError, else CANCELED. */
export function abortErrorOf(signal: AbortSignal): ConnectError {
  const reason: unknown = signal.reason;
  if (reason instanceof BatonError) return connectErrorFromBaton(reason);
  return ConnectError.from(reason, Code.Canceled);
}

/** The error of a call whose `timeoutMs` has passed. */
export function deadlineError(): ConnectError {
  return new ConnectError('the operation timed out', Code.DeadlineExceeded);
}

/** Whether an error of {@link connectErrorFrom} hides a fault of this process that belongs in its log. */
export function isFault(error: ConnectError): boolean {
  const cause = error.cause;
  if (cause instanceof BatonError) return cause.reason === 'INTERNAL';
  return error.code === Code.Internal && cause !== undefined;
}

/** Codes that say what is wrong between two processes of a deployment, and not with what was asked. */
const REFUSALS: ReadonlySet<Code> = new Set([Code.Unauthenticated, Code.PermissionDenied, Code.Unimplemented]);

/** Whether a peer does not serve this process at all: it wants another token, or is something else than it is taken for. */
export function isRefusal(thrown: unknown): boolean {
  return REFUSALS.has(ConnectError.from(thrown).code);
}

/** System errors of a connection that was never made. */
const NO_CONNECTION: ReadonlySet<unknown> = new Set(['ECONNREFUSED', 'ENOENT', 'ENOTFOUND', 'EAI_AGAIN']);

/** Whether the failure of a call proves that the other side has not begun with it. */
export function neverReached(thrown: unknown): boolean {
  const error = ConnectError.from(thrown);
  if (batonErrorFrom(error, 'INTERNAL').reason === 'SHUTTING_DOWN') return true;
  const { cause } = error;
  if (!(cause instanceof Error)) return false;
  // A stream that came behind the last one that an ending session takes (RFC 9113, section 8.7).
  return ('code' in cause && NO_CONNECTION.has(cause.code)) || cause.message.includes('NGHTTP2_REFUSED_STREAM');
}

/**
 * The failure of a call to another service as a BatonError. A reason that this process knows is kept with its metadata
 * and delay; CANCELED is CLIENT_GONE; everything else is `fallback`, whose metadata then has `rpc_code` and the peer's
 * `rpc_reason`. Text that may name an address is kept in the cause alone.
 */
export function batonErrorFrom(thrown: unknown, fallback: ErrorReasonName): BatonError {
  if (thrown instanceof BatonError) return thrown;
  const error = ConnectError.from(thrown);
  const info = error.findDetails(ErrorInfoSchema).find((detail) => detail.domain === ERROR_DOMAIN);
  if (info !== undefined && isErrorReason(info.reason)) {
    const retryDelay = error.findDetails(RetryInfoSchema)[0]?.retryDelay;
    const field = error.findDetails(BadRequestSchema)[0]?.fieldViolations[0]?.field;
    return new BatonError(
      {
        reason: info.reason,
        message: error.rawMessage,
        metadata: info.metadata,
        param: field ?? null,
        ...(retryDelay === undefined ? {} : { retryAfterMs: durationMs(retryDelay) }),
      },
      { cause: error },
    );
  }
  if (error.code === Code.Canceled) {
    return new BatonError({ reason: 'CLIENT_GONE', message: 'the call was canceled' }, { cause: error });
  }
  const code = codeWord(error.code);
  return new BatonError(
    {
      reason: fallback,
      message: `call to another service failed: ${code}`,
      metadata: { rpc_code: code, ...(info === undefined ? {} : { rpc_reason: info.reason }) },
    },
    { cause: error },
  );
}

function isAbortError(thrown: unknown): boolean {
  return thrown instanceof Error && (thrown.name === 'AbortError' || thrown.name === 'TimeoutError');
}
