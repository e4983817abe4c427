import { isTenantName } from '../core/tenant.ts';
import type { LogFields } from './log.ts';

/** What is known of a client request once it has ended. */
export interface AccessFields {
  readonly requestId: string;
  /** E.g. `chat.completions`. */
  readonly api: string;
  /** Whose it is; left out of the line where it is no name but a hash, or not known. */
  readonly tenant: string;
  /** A model name already folded to the known ones, see `Metrics.modelLabel`. */
  readonly model: string;
  readonly stream: boolean;
  /** Plan mode as a word, e.g. `prefill_decode`; absent if no plan was made. */
  readonly mode?: string | undefined;
  /** Why the plan has this mode. */
  readonly planReason?: string | undefined;
  readonly prefillInstance?: string | undefined;
  readonly decodeInstance?: string | undefined;
  /** Status the client got; 499 where it left before one was sent. */
  readonly status: number;
  /** Milliseconds of the prefill legs. */
  readonly prefillMs?: number | undefined;
  /** Milliseconds until the first content for the client. */
  readonly ttftMs?: number | undefined;
  readonly durationMs: number;
  readonly promptTokens?: number | undefined;
  readonly completionTokens?: number | undefined;
  readonly cachedTokens?: number | undefined;
  /** What became of the KV of earlier turns; `none` where there was nothing to reuse. */
  readonly reuse?: string | undefined;
  /** Tokens, blocks and age of the stored handle that was used. */
  readonly matchedTokens?: number | undefined;
  readonly blocks?: number | undefined;
  readonly entryAgeMs?: number | undefined;
  /** Hash of the conversation. */
  readonly conversation?: string | undefined;
  readonly retries: number;
  /** Code of the error that the client got: a word of baton's, or what the engine wrote. */
  readonly error?: string | undefined;
  /** The last leg that did not end well, e.g. `decode:reset`. */
  readonly failedLeg?: string | undefined;
  /** Why D ran without P's handle although the plan wanted one. */
  readonly noHandle?: string | undefined;
  /** How the request ended, e.g. `ok`, `client_gone`, `error`. */
  readonly ending: string;
}

/** The fields of an access log line; absent ones are undefined, durations have a tenth of a millisecond. */
export function buildAccessRecord(fields: AccessFields): LogFields {
  return {
    request_id: fields.requestId,
    api: fields.api,
    tenant: isTenantName(fields.tenant) ? fields.tenant : undefined,
    model: fields.model,
    stream: fields.stream,
    mode: fields.mode,
    plan_reason: fields.planReason,
    prefill_instance: fields.prefillInstance,
    decode_instance: fields.decodeInstance,
    status: fields.status,
    prefill_ms: toTenth(fields.prefillMs),
    ttft_ms: toTenth(fields.ttftMs),
    duration_ms: toTenth(fields.durationMs),
    prompt_tokens: fields.promptTokens,
    completion_tokens: fields.completionTokens,
    cached_tokens: fields.cachedTokens,
    reuse: fields.reuse === 'none' ? undefined : fields.reuse,
    matched_tokens: fields.matchedTokens,
    blocks: fields.blocks,
    entry_age_ms: toTenth(fields.entryAgeMs),
    conv: fields.conversation,
    no_handle: fields.noHandle,
    retries: fields.retries,
    error: fields.error,
    failed_leg: fields.failedLeg,
    ending: fields.ending,
  };
}

function toTenth(milliseconds: number | undefined): number | undefined {
  return milliseconds === undefined ? undefined : Math.round(milliseconds * 10) / 10;
}
