/** Canonical status codes (the gRPC set) that baton's errors use. */
export type ErrorCode =
  | 'aborted'
  | 'canceled'
  | 'deadline_exceeded'
  | 'failed_precondition'
  | 'internal'
  | 'invalid_argument'
  | 'not_found'
  | 'permission_denied'
  | 'resource_exhausted'
  | 'unauthenticated'
  | 'unavailable'
  | 'unimplemented';

interface ReasonRow {
  readonly code: ErrorCode;
  readonly httpStatus: number;
  /** `error.type` of the OpenAI envelope. */
  readonly type: string;
}

/**
 * Every reason baton itself fails with: one row gives the Connect code, the HTTP status and the OpenAI type.
 * The lower-case name is `error.code` of the OpenAI envelope, the name is `ErrorInfo.reason` on the RPC port.
 */
export const ERROR_REASONS = {
  BODY_EMPTY: { code: 'invalid_argument', httpStatus: 400, type: 'invalid_request_error' },
  BODY_INVALID_JSON: { code: 'invalid_argument', httpStatus: 400, type: 'invalid_request_error' },
  BODY_NOT_OBJECT: { code: 'invalid_argument', httpStatus: 400, type: 'invalid_request_error' },
  BODY_TOO_LARGE: { code: 'resource_exhausted', httpStatus: 413, type: 'invalid_request_error' },
  HEADERS_TOO_LARGE: { code: 'resource_exhausted', httpStatus: 431, type: 'invalid_request_error' },
  BODY_INCOMPLETE: { code: 'invalid_argument', httpStatus: 400, type: 'invalid_request_error' },
  CONTENT_ENCODING_UNSUPPORTED: { code: 'invalid_argument', httpStatus: 415, type: 'invalid_request_error' },
  KV_TRANSFER_PARAMS_REFUSED: { code: 'invalid_argument', httpStatus: 400, type: 'invalid_request_error' },
  INVALID_ARGUMENT: { code: 'invalid_argument', httpStatus: 400, type: 'invalid_request_error' },
  METHOD_NOT_ALLOWED: { code: 'unimplemented', httpStatus: 405, type: 'invalid_request_error' },
  ROUTE_NOT_FOUND: { code: 'not_found', httpStatus: 404, type: 'invalid_request_error' },
  MODEL_NOT_FOUND: { code: 'not_found', httpStatus: 404, type: 'invalid_request_error' },
  INSTANCE_NOT_FOUND: { code: 'not_found', httpStatus: 404, type: 'invalid_request_error' },
  NO_ROUTABLE_PAIR: { code: 'unavailable', httpStatus: 503, type: 'service_unavailable_error' },
  QUEUE_FULL: { code: 'resource_exhausted', httpStatus: 503, type: 'service_unavailable_error' },
  TENANT_QUEUE_FULL: { code: 'resource_exhausted', httpStatus: 429, type: 'rate_limit_error' },
  OVERLOADED: { code: 'unavailable', httpStatus: 503, type: 'service_unavailable_error' },
  RATE_LIMIT_EXCEEDED: { code: 'resource_exhausted', httpStatus: 429, type: 'rate_limit_error' },
  REQUEST_LOOP: { code: 'internal', httpStatus: 508, type: 'upstream_error' },
  SHUTTING_DOWN: { code: 'unavailable', httpStatus: 503, type: 'service_unavailable_error' },
  ENGINE_UNREACHABLE: { code: 'unavailable', httpStatus: 503, type: 'service_unavailable_error' },
  ENGINE_CONNECTION_LOST: { code: 'unavailable', httpStatus: 502, type: 'upstream_error' },
  ENGINE_REPLY_INVALID: { code: 'internal', httpStatus: 502, type: 'upstream_error' },
  ENGINE_AUTH: { code: 'permission_denied', httpStatus: 502, type: 'upstream_error' },
  ENGINE_TIMEOUT: { code: 'deadline_exceeded', httpStatus: 504, type: 'upstream_error' },
  ROUTER_UNAVAILABLE: { code: 'unavailable', httpStatus: 503, type: 'service_unavailable_error' },
  STORE_UNAVAILABLE: { code: 'unavailable', httpStatus: 503, type: 'service_unavailable_error' },
  CREDENTIAL_REQUIRED: { code: 'unauthenticated', httpStatus: 401, type: 'authentication_error' },
  AUTH_UNAVAILABLE: { code: 'unavailable', httpStatus: 503, type: 'service_unavailable_error' },
  OPERATOR_REQUIRED: { code: 'permission_denied', httpStatus: 403, type: 'permission_error' },
  TENANT_FORBIDDEN: { code: 'permission_denied', httpStatus: 403, type: 'permission_error' },
  IDEMPOTENCY_KEY_REUSED: { code: 'aborted', httpStatus: 409, type: 'invalid_request_error' },
  LIMIT_EXCEEDED: { code: 'resource_exhausted', httpStatus: 429, type: 'rate_limit_error' },
  QUOTA_EXCEEDED: { code: 'resource_exhausted', httpStatus: 429, type: 'rate_limit_error' },
  PAGE_TOKEN_INVALID: { code: 'invalid_argument', httpStatus: 400, type: 'invalid_request_error' },
  RESUME_TOKEN_INVALID: { code: 'invalid_argument', httpStatus: 400, type: 'invalid_request_error' },
  STALE_INCARNATION: { code: 'failed_precondition', httpStatus: 409, type: 'invalid_request_error' },
  PROMPT_REQUIRED: { code: 'failed_precondition', httpStatus: 400, type: 'invalid_request_error' },
  UNVERIFIED_NOT_PERMITTED: { code: 'permission_denied', httpStatus: 403, type: 'permission_error' },
  REVISION_MISMATCH: { code: 'failed_precondition', httpStatus: 412, type: 'invalid_request_error' },
  ENTRY_EXISTS: { code: 'failed_precondition', httpStatus: 412, type: 'invalid_request_error' },
  ENTRY_CLAIMED: { code: 'failed_precondition', httpStatus: 409, type: 'invalid_request_error' },
  CLAIM_NOT_FOUND: { code: 'not_found', httpStatus: 404, type: 'invalid_request_error' },
  CLAIM_SPENT: { code: 'failed_precondition', httpStatus: 409, type: 'invalid_request_error' },
  CLIENT_GONE: { code: 'canceled', httpStatus: 499, type: 'client_closed_request' },
  INTERNAL: { code: 'internal', httpStatus: 500, type: 'internal_error' },
  NOT_IMPLEMENTED: { code: 'unimplemented', httpStatus: 501, type: 'internal_error' },
} as const satisfies Record<string, ReasonRow>;

/** Name of a row of {@link ERROR_REASONS}. */
export type ErrorReasonName = keyof typeof ERROR_REASONS;

/** What a {@link BatonError} is made from. */
export interface BatonErrorInit {
  readonly reason: ErrorReasonName;
  /** For people; never parsed, never holds prompts, handles, keys or engine addresses. */
  readonly message: string;
  /** Request member at fault, `param` of the OpenAI envelope. Default null. */
  readonly param?: string | null;
  /** Variable parts, `ErrorInfo.metadata` on the RPC port. Default none. */
  readonly metadata?: Readonly<Record<string, string>>;
  /** When a caller may try again, milliseconds; sent as Retry-After or RetryInfo. */
  readonly retryAfterMs?: number;
}

/** A fault of baton's own making, with everything each protocol needs to tell it. */
export class BatonError extends Error {
  override readonly name = 'BatonError';
  readonly reason: ErrorReasonName;
  readonly code: ErrorCode;
  readonly httpStatus: number;
  readonly type: string;
  readonly param: string | null;
  readonly metadata: Readonly<Record<string, string>>;
  readonly retryAfterMs: number | undefined;

  constructor(init: BatonErrorInit, options?: ErrorOptions) {
    super(init.message, options);
    const row = ERROR_REASONS[init.reason];
    this.reason = init.reason;
    this.code = row.code;
    this.httpStatus = row.httpStatus;
    this.type = row.type;
    this.param = init.param ?? null;
    this.metadata = init.metadata ?? {};
    this.retryAfterMs = init.retryAfterMs;
  }
}

/** Whether `name` is a known reason, e.g. one read from a peer's ErrorInfo. */
export function isErrorReason(name: string): name is ErrorReasonName {
  return Object.hasOwn(ERROR_REASONS, name);
}
