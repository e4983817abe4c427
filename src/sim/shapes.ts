import type { JsonObject } from './json.ts';
import type { RankedToken } from './output.ts';
import { tokenBytes, tokenText } from './tokenizer.ts';

/** Members that every body of a reply shares. */
export interface ReplyMeta {
  readonly id: string;
  readonly created: number;
  readonly model: string;
  readonly fingerprint: string;
  /** 0.33: streams carry handles and choices carry weight versions. */
  readonly isCurrent: boolean;
}

/** Token counts of a reply. */
export interface UsageNumbers {
  readonly prompt: number;
  readonly completion: number;
  readonly cached: number;
  readonly created: number;
  /** Null where the engine reports no details. */
  readonly withDetails: boolean;
}

/** `usage` of a whole reply: null members included. */
export function fullUsage(usage: UsageNumbers, isChat: boolean): JsonObject {
  return {
    prompt_tokens: usage.prompt,
    total_tokens: usage.prompt + usage.completion,
    completion_tokens: usage.completion,
    prompt_tokens_details: usage.withDetails
      ? { cached_tokens: usage.cached, created_cache_tokens: isChat ? usage.created : null, multimodal_tokens: null }
      : null,
    completion_tokens_details: null,
  };
}

/** `usage` of the trailing chunk: null members left out. */
export function trailingUsage(usage: UsageNumbers, isChat: boolean): JsonObject {
  const details = { cached_tokens: usage.cached, ...(isChat ? { created_cache_tokens: usage.created } : {}) };
  return {
    prompt_tokens: usage.prompt,
    total_tokens: usage.prompt + usage.completion,
    completion_tokens: usage.completion,
    ...(usage.withDetails ? { prompt_tokens_details: details } : {}),
  };
}

/** `usage` on every chunk of a stream. */
export function runningUsage(prompt: number, completion: number, isChat: boolean): JsonObject {
  return {
    prompt_tokens: prompt,
    total_tokens: prompt + completion,
    completion_tokens: completion,
    ...(isChat ? { completion_tokens_details: null } : {}),
  };
}

function logprobEntry(entry: { readonly id: number; readonly logprob: number }): JsonObject {
  const token = tokenText(entry.id);
  const bytes = tokenBytes(entry.id);
  return { token, logprob: entry.logprob, bytes: bytes.length > 0 ? bytes : [...new TextEncoder().encode(token)] };
}

/** `logprobs` of a chat choice. */
export function chatLogprobs(ranked: readonly RankedToken[], top: number): JsonObject {
  return {
    content: ranked.map((tokens) => ({
      ...logprobEntry(tokens[0] ?? { id: 0, logprob: 0 }),
      top_logprobs: tokens.slice(0, top).map(logprobEntry),
    })),
  };
}

/** `logprobs` of a completions choice; an undefined entry is the first prompt token, which has none. */
export function completionLogprobs(ranked: readonly (RankedToken | number)[], top: number, offset: number): JsonObject {
  const offsets: number[] = [];
  const values: (number | null)[] = [];
  const tokens: string[] = [];
  const tops: (JsonObject | null)[] = [];
  let at = offset;
  for (const entry of ranked) {
    const chosen = typeof entry === 'number' ? { id: entry, logprob: null } : (entry[0] ?? { id: 0, logprob: 0 });
    const text = tokenText(chosen.id);
    offsets.push(at);
    values.push(chosen.logprob);
    tokens.push(text);
    const best = typeof entry === 'number' ? [] : entry.slice(0, Math.max(1, top));
    tops.push(typeof entry === 'number' ? null : Object.fromEntries(best.map((t) => [tokenText(t.id), t.logprob])));
    at += text.length;
  }
  return { text_offset: offsets, token_logprobs: values, tokens, top_logprobs: tops };
}

/** `prompt_logprobs`: null for the first token, then a map by token id. */
export function promptLogprobs(ranked: readonly (RankedToken | number)[]): readonly (JsonObject | null)[] {
  return ranked.map((entry) =>
    typeof entry === 'number'
      ? null
      : Object.fromEntries(
          entry.map((token, index) => [
            String(token.id),
            { logprob: token.logprob, rank: index + 1, decoded_token: tokenText(token.id) },
          ]),
        ),
  );
}

/** The first chunk of a chat choice. */
export function roleChunk(
  meta: ReplyMeta,
  index: number,
  usage: JsonObject | undefined,
  promptIds: readonly number[] | null,
): JsonObject {
  const delta = { role: 'assistant', content: '' };
  return {
    id: meta.id,
    object: 'chat.completion.chunk',
    created: meta.created,
    model: meta.model,
    choices: [{ index, delta, logprobs: null, finish_reason: null }],
    ...(usage === undefined ? {} : { usage }),
    prompt_token_ids: promptIds,
    prompt_text: null,
  };
}

/** What a chunk after the first carries. */
export interface ChunkParts {
  readonly index: number;
  /** Chat: the `delta` object. Completions: the text. */
  readonly delta: JsonObject | string;
  readonly logprobs: JsonObject | null;
  readonly ids: readonly number[] | null;
  readonly promptIds: readonly number[] | null;
  readonly finishReason: string | null;
  readonly stopReason: string | number | null;
  readonly usage: JsonObject | undefined;
  readonly showFingerprint: boolean;
  readonly handle: JsonObject | null;
}

/** A content chunk, final when it has a finish reason. */
export function deltaChunk(meta: ReplyMeta, parts: ChunkParts): JsonObject {
  const isChat = typeof parts.delta !== 'string';
  const isFinal = parts.finishReason !== null;
  const weights = meta.isCurrent ? { weight_versions: null } : {};
  const choice: JsonObject =
    typeof parts.delta === 'string'
      ? {
          index: parts.index,
          text: parts.delta,
          logprobs: parts.logprobs,
          finish_reason: parts.finishReason,
          stop_reason: parts.stopReason,
          prompt_token_ids: parts.promptIds,
          token_ids: parts.ids,
          ...weights,
        }
      : {
          index: parts.index,
          delta: parts.delta,
          logprobs: parts.logprobs,
          finish_reason: parts.finishReason,
          ...(isFinal ? { stop_reason: parts.stopReason } : {}),
          token_ids: parts.ids,
          ...(isFinal ? weights : {}),
        };
  return {
    id: meta.id,
    object: isChat ? 'chat.completion.chunk' : 'text_completion',
    created: meta.created,
    model: meta.model,
    choices: [choice],
    ...(parts.usage === undefined ? {} : { usage: parts.usage }),
    ...(isFinal && parts.showFingerprint ? { system_fingerprint: meta.fingerprint } : {}),
    ...(meta.isCurrent ? { kv_transfer_params: parts.handle } : {}),
  };
}

/** The trailing chunk of a stream that asked for usage. */
export function usageChunk(meta: ReplyMeta, usage: UsageNumbers, isChat: boolean): JsonObject {
  return {
    id: meta.id,
    object: isChat ? 'chat.completion.chunk' : 'text_completion',
    created: meta.created,
    model: meta.model,
    choices: [],
    usage: trailingUsage(usage, isChat),
    system_fingerprint: meta.fingerprint,
  };
}

/** What a choice of a whole reply carries. */
export interface ChoiceParts {
  readonly index: number;
  readonly text: string;
  /** Empty where the model did not think. */
  readonly thought: string;
  readonly toolCall: JsonObject | undefined;
  readonly logprobs: JsonObject | null;
  readonly finishReason: string;
  readonly stopReason: string | number | null;
  readonly ids: readonly number[] | null;
  readonly promptIds: readonly number[] | null;
  readonly promptLogprobs: readonly unknown[] | null;
}

function contentOf({ text, thought, toolCall }: ChoiceParts): string | null {
  if (toolCall !== undefined) return '';
  return text === '' && thought !== '' ? null : text;
}

function chatChoice(meta: ReplyMeta, parts: ChoiceParts): JsonObject {
  return {
    index: parts.index,
    message: {
      role: 'assistant',
      content: contentOf(parts),
      refusal: null,
      annotations: null,
      audio: null,
      function_call: null,
      ...(parts.toolCall === undefined ? {} : { tool_calls: [parts.toolCall] }),
      reasoning: parts.thought === '' ? null : parts.thought,
    },
    logprobs: parts.logprobs,
    finish_reason: parts.finishReason,
    stop_reason: parts.stopReason,
    token_ids: parts.ids,
    routed_experts: null,
    ...(meta.isCurrent ? { weight_versions: null } : {}),
  };
}

function completionChoice(meta: ReplyMeta, parts: ChoiceParts): JsonObject {
  return {
    index: parts.index,
    text: parts.text,
    logprobs: parts.logprobs,
    finish_reason: parts.finishReason,
    stop_reason: parts.stopReason,
    token_ids: parts.ids,
    prompt_logprobs: parts.promptLogprobs,
    prompt_token_ids: parts.promptIds,
    routed_experts: null,
    ...(meta.isCurrent ? { weight_versions: null } : {}),
  };
}

/** A whole reply. */
export function fullReply(
  meta: ReplyMeta,
  choices: readonly ChoiceParts[],
  usage: UsageNumbers,
  handle: JsonObject | null,
  isChat: boolean,
): JsonObject {
  return {
    id: meta.id,
    object: isChat ? 'chat.completion' : 'text_completion',
    created: meta.created,
    model: meta.model,
    choices: choices.map((choice) => (isChat ? chatChoice(meta, choice) : completionChoice(meta, choice))),
    service_tier: null,
    system_fingerprint: meta.fingerprint,
    usage: fullUsage(usage, isChat),
    ...(isChat
      ? {
          prompt_logprobs: choices[0]?.promptLogprobs ?? null,
          prompt_token_ids: choices[0]?.promptIds ?? null,
          prompt_text: null,
        }
      : {}),
    kv_transfer_params: handle,
    ec_transfer_params: null,
    metrics: null,
  };
}
