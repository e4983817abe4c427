import type { Api } from './facts.ts';
import { findMember, type ScannedObject, scanObject, spliceObject } from './json-scan.ts';
import { DONE_EVENT } from './openai-error.ts';
import { parseJson } from './parse-json.ts';
import type { ReplyUsage } from './reply.ts';
import { eventData } from './sse.ts';

type Json = Readonly<Record<string, unknown>>;

/** What a prefill engine generated, and where it stopped. */
export interface FirstToken {
  /** Id of P's reply as P wrote it, `cmpl-…`. */
  readonly id: string;
  /** Unix seconds. */
  readonly created: number;
  readonly model: string;
  readonly text: string;
  readonly tokenId: number;
  /** `length` where the generation could go on. */
  readonly finishReason: string;
  readonly stopReason: unknown;
  /** In the form of the completions API; null where the client asked for none. */
  readonly logprobs: Json | null;
  /** P's `prompt_tokens_details`, which tell of P's prefix cache; null where P reports none. */
  readonly promptDetails: Json | null;
}

/** How a reply is put together from P's first token and D's completion. */
export interface Composition {
  readonly api: Api;
  readonly first: FirstToken;
  /** Token ids of the prompt as the client wrote it: D was sent one more. */
  readonly promptTokenIds: readonly number[];
  /** The client asked for `return_token_ids`. */
  readonly showTokenIds: boolean;
  /** Alternatives a token in chat log probabilities. */
  readonly topLogprobs: number;
  readonly includeUsage: boolean;
  /** Usage on every chunk (`stream_options.continuous_usage_stats`). */
  readonly continuousUsage: boolean;
}

const decoder = new TextDecoder('utf-8', { ignoreBOM: true });
const encoder = new TextEncoder();

/** Reads P's whole completions reply; undefined where it names no first token (`kv_transfer_params.first_tok`). */
export function readFirstToken(body: Uint8Array): FirstToken | undefined {
  const reply = parseRecord(body);
  const choice = recordOf(listOf(reply?.['choices'])[0]);
  const tokenId = recordOf(reply?.['kv_transfer_params'])?.['first_tok'];
  if (reply === undefined || choice === undefined) return undefined;
  if (typeof tokenId !== 'number' || !Number.isSafeInteger(tokenId) || tokenId < 0) return undefined;
  return {
    id: textOf(reply['id']),
    created: typeof reply['created'] === 'number' ? reply['created'] : 0,
    model: textOf(reply['model']),
    text: textOf(choice['text']),
    tokenId,
    finishReason: textOf(choice['finish_reason']) || 'length',
    stopReason: choice['stop_reason'] ?? null,
    logprobs: recordOf(choice['logprobs']) ?? null,
    promptDetails: recordOf(recordOf(reply['usage'])?.['prompt_tokens_details']) ?? null,
  };
}

/**
 * Why D has to answer alone, from the prompt, although P has the first token: its text may be half a character, or the
 * beginning of a stop string, and D does not look at the text before its own.
 */
export function whyNotSplit(text: string, stops: readonly string[]): 'partial_text' | 'stop_at_boundary' | undefined {
  if (text === '' || text.includes('\ufffd')) return 'partial_text';
  const begins = stops.some((stop) => {
    for (let size = Math.min(text.length, stop.length - 1); size > 0; size--) {
      if (text.endsWith(stop.slice(0, size))) return true;
    }
    return false;
  });
  return begins ? 'stop_at_boundary' : undefined;
}

/** The events of the first token: for chat with the role before it. They are complete; D's follow. */
export function headEvents(reply: Composition): string {
  return eventsOf(reply, null);
}

/** The whole stream of a reply that ends with its first token. */
export function endedStream(reply: Composition, finishReason: string): string {
  const usage = usageOfFirst(reply, 1);
  const last = reply.includeUsage ? event({ ...baseOf(reply, true), choices: [], usage }) : '';
  return eventsOf(reply, finishReason) + last + DONE_EVENT;
}

/** The whole JSON reply that ends with its first token. */
export function endedWhole(reply: Composition, finishReason: string): Uint8Array {
  const { api, first, showTokenIds } = reply;
  const choice = {
    index: 0,
    text: first.text,
    logprobs: first.logprobs,
    finish_reason: finishReason,
    stop_reason: finishReason === first.finishReason ? first.stopReason : null,
    ...(showTokenIds ? { token_ids: [first.tokenId] } : {}),
  };
  const body = { ...baseOf(reply, false), choices: [wholeChoice(reply, choice)], usage: usageOfFirst(reply, 1) };
  return encoder.encode(JSON.stringify(api === 'chat.completions' ? withPromptIds(reply, body) : body));
}

/** Usage of a reply that ends with its first token. */
export function endedUsage({ promptTokenIds, first }: Composition): ReplyUsage {
  const cached = first.promptDetails?.['cached_tokens'];
  return {
    promptTokens: promptTokenIds.length,
    completionTokens: 1,
    cachedTokens: typeof cached === 'number' ? cached : 0,
  };
}

/**
 * One event of D's completion stream as the client is to get it: P's id, usage of the whole request, and for chat the
 * shape of a chat chunk. Events that are no chunk (end marker, errors, comments) come back as they are.
 */
export function reshapeEvent(reply: Composition, raw: Uint8Array): Uint8Array {
  const data = eventData(raw);
  if (data === undefined) return raw;
  const scan = scanObject(data.text);
  if (scan.kind !== 'object' || findMember(scan, 'choices') === undefined) return raw;
  const chunk = recordOf(parseJson(decoder.decode(data.text)));
  if (chunk === undefined) return raw;
  if (reply.api === 'completions') return frame(spliceObject(data.text, scan, completionEdits(reply, chunk, scan)));
  const { choices, usage, ...rest } = chunk;
  return encoder.encode(
    event({
      ...rest,
      ...baseOf(reply, true),
      choices: listOf(choices).flatMap((choice) => chatChunkChoice(reply, recordOf(choice))),
      ...(usage === undefined ? {} : { usage: wholeUsage(reply, recordOf(usage)) }),
    }),
  );
}

/** D's whole JSON reply with the first token in front; anything that is no such reply comes back as it is. */
export function reshapeWhole(reply: Composition, body: Uint8Array): Uint8Array {
  const parsed = parseRecord(body);
  if (parsed === undefined || !Array.isArray(parsed['choices'])) return body;
  const { choices, usage, ...rest } = parsed;
  const { first } = reply;
  const merged = {
    ...rest,
    ...baseOf(reply, false),
    choices: listOf(choices).flatMap((item) => {
      const choice = recordOf(item);
      if (choice === undefined) return [];
      const ids = Array.isArray(choice['token_ids']) ? { token_ids: [first.tokenId, ...choice['token_ids']] } : {};
      return wholeChoice(reply, {
        ...choice,
        ...ids,
        text: first.text + textOf(choice['text']),
        logprobs: joinLogprobs(first.logprobs, shiftOffsets(first.text, recordOf(choice['logprobs']))),
      });
    }),
    usage: wholeUsage(reply, recordOf(usage)) ?? null,
  };
  return encoder.encode(JSON.stringify(withPromptIds(reply, merged)));
}

function eventsOf(reply: Composition, finishReason: string | null): string {
  const { api, first, promptTokenIds, showTokenIds, continuousUsage } = reply;
  const running = (completion: number) => (continuousUsage ? { usage: runningUsage(reply, completion) } : {});
  const base = baseOf(reply, true);
  const stopReason = finishReason === first.finishReason ? first.stopReason : null;
  const ids = showTokenIds ? { token_ids: [first.tokenId] } : {};
  if (api === 'completions') {
    const choice = {
      index: 0,
      text: first.text,
      logprobs: first.logprobs,
      finish_reason: finishReason,
      stop_reason: stopReason,
      ...(showTokenIds ? { prompt_token_ids: promptTokenIds, ...ids } : {}),
    };
    return event({ ...base, choices: [choice], usage: continuousUsage ? runningUsage(reply, 1) : null });
  }
  const role = {
    index: 0,
    delta: { role: 'assistant', content: '' },
    logprobs: null,
    finish_reason: null,
  };
  const text = {
    index: 0,
    delta: { content: first.text },
    logprobs: chatLogprobs(first.logprobs, reply.topLogprobs),
    finish_reason: finishReason,
    ...(finishReason === null ? {} : { stop_reason: stopReason }),
    ...ids,
  };
  const opening = withPromptIds(reply, { ...base, choices: [role], ...running(0) });
  return event(opening) + event({ ...base, choices: [text], ...running(1) });
}

function completionEdits(reply: Composition, chunk: Json, scan: ScannedObject) {
  const { first } = reply;
  const set = new Map<string, string>([
    ['id', JSON.stringify(first.id)],
    ['created', String(first.created)],
  ]);
  const usage = wholeUsage(reply, recordOf(chunk['usage']));
  if (usage !== undefined) set.set('usage', JSON.stringify(usage));
  const choices = listOf(chunk['choices']).map(recordOf);
  if (choices.some((choice) => recordOf(choice?.['logprobs']) !== undefined || choice?.['prompt_token_ids'])) {
    const changed = choices.map((choice) => ({
      ...choice,
      logprobs: shiftOffsets(first.text, recordOf(choice?.['logprobs'])),
      // The head told them, without the token that D got besides.
      ...(choice?.['prompt_token_ids'] === undefined ? {} : { prompt_token_ids: null }),
    }));
    set.set('choices', JSON.stringify(changed));
  }
  for (const key of [...set.keys()]) if (findMember(scan, key) === undefined) set.delete(key);
  return { set, drop: new Set<string>() };
}

function chatChunkChoice(reply: Composition, choice: Json | undefined): readonly Json[] {
  if (choice === undefined) return [];
  const finishReason = choice['finish_reason'] ?? null;
  return [
    {
      index: choice['index'] ?? 0,
      delta: { content: textOf(choice['text']) },
      logprobs: chatLogprobs(recordOf(choice['logprobs']) ?? null, reply.topLogprobs),
      finish_reason: finishReason,
      ...(finishReason === null ? {} : { stop_reason: choice['stop_reason'] ?? null }),
      ...(reply.showTokenIds ? { token_ids: choice['token_ids'] ?? null } : {}),
    },
  ];
}

function wholeChoice(reply: Composition, choice: Json): Json {
  const { api, promptTokenIds, showTokenIds } = reply;
  if (api === 'completions') return showTokenIds ? { ...choice, prompt_token_ids: promptTokenIds } : choice;
  return {
    index: choice['index'] ?? 0,
    message: { role: 'assistant', content: textOf(choice['text']), refusal: null },
    logprobs: chatLogprobs(recordOf(choice['logprobs']) ?? null, reply.topLogprobs),
    finish_reason: choice['finish_reason'] ?? null,
    stop_reason: choice['stop_reason'] ?? null,
    ...(showTokenIds ? { token_ids: choice['token_ids'] ?? null } : {}),
  };
}

/** Chat tells the prompt's ids at the top; completions in the choice. */
function withPromptIds(reply: Composition, body: Json): Json {
  const { api, showTokenIds, promptTokenIds } = reply;
  return api === 'chat.completions' && showTokenIds ? { ...body, prompt_token_ids: promptTokenIds } : body;
}

function baseOf({ api, first }: Composition, streamed: boolean): Json {
  const { id, created, model } = first;
  if (api === 'completions') return { id, object: 'text_completion', created, model };
  const object = streamed ? 'chat.completion.chunk' : 'chat.completion';
  return { id: id.replace(/^cmpl-/, 'chatcmpl-'), object, created, model };
}

/** D counts the first token to the prompt; it belongs to the completion. What P had cached is the request's saving. */
function wholeUsage({ promptTokenIds, first }: Composition, usage: Json | undefined): Json | undefined {
  if (usage === undefined) return undefined;
  const details = recordOf(usage['prompt_tokens_details']);
  const cached = first.promptDetails?.['cached_tokens'] ?? 0;
  const completion = (typeof usage['completion_tokens'] === 'number' ? usage['completion_tokens'] : 0) + 1;
  return {
    ...usage,
    prompt_tokens: promptTokenIds.length,
    total_tokens: promptTokenIds.length + completion,
    completion_tokens: completion,
    ...(details === undefined ? {} : { prompt_tokens_details: { ...details, cached_tokens: cached } }),
  };
}

function runningUsage({ promptTokenIds: { length } }: Composition, completion: number): Json {
  return { prompt_tokens: length, total_tokens: length + completion, completion_tokens: completion };
}

function usageOfFirst(reply: Composition, completion: number): Json {
  const { promptDetails } = reply.first;
  return { ...runningUsage(reply, completion), prompt_tokens_details: promptDetails };
}

/** Completions tell parallel lists, chat a list of entries; engines make `bytes` from the token's text. */
function chatLogprobs(logprobs: Json | null, top: number): Json | null {
  if (logprobs === null) return null;
  const entry = (token: string, logprob: unknown) => ({ token, logprob, bytes: [...encoder.encode(token)] });
  const numbers = listOf(logprobs['token_logprobs']);
  const alternatives = listOf(logprobs['top_logprobs']).map(recordOf);
  return {
    content: listOf(logprobs['tokens']).map((token, i) => ({
      ...entry(textOf(token), numbers[i] ?? null),
      top_logprobs: Object.entries(alternatives[i] ?? {})
        .sort(([, a], [, b]) => Number(b) - Number(a))
        .slice(0, top)
        .map(([text, logprob]) => entry(text, logprob)),
    })),
  };
}

/** Offsets are in characters as Python counts them, from the start of D's text. */
function shiftOffsets(text: string, logprobs: Json | undefined): Json | null {
  if (logprobs === undefined) return null;
  const shift = [...text].length;
  const offsets = listOf(logprobs['text_offset']).map((at) => (typeof at === 'number' ? at + shift : at));
  return { ...logprobs, text_offset: offsets };
}

function joinLogprobs(first: Json | null, rest: Json | null): Json | null {
  if (first === null || rest === null) return first ?? rest;
  const keys = new Set([...Object.keys(first), ...Object.keys(rest)]);
  return Object.fromEntries([...keys].map((key) => [key, [...listOf(first[key]), ...listOf(rest[key])]]));
}

function event(value: Json): string {
  return `data: ${JSON.stringify(value)}\n\n`;
}

function frame(payload: Uint8Array): Uint8Array {
  return encoder.encode(`data: ${decoder.decode(payload)}\n\n`);
}

function parseRecord(bytes: Uint8Array): Json | undefined {
  return scanObject(bytes).kind === 'object' ? recordOf(parseJson(decoder.decode(bytes))) : undefined;
}

function recordOf(value: unknown): Json | undefined {
  return typeof value === 'object' && value !== null && !Array.isArray(value) ? (value as Json) : undefined;
}

function listOf(value: unknown): readonly unknown[] {
  return Array.isArray(value) ? value : [];
}

function textOf(value: unknown): string {
  return typeof value === 'string' ? value : '';
}
