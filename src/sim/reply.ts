import { type ApiError, deadEngineError, internalError, toPythonJson } from './api-error.ts';
import { type Choice, type GenerateContext, generate, replyHandle } from './generate.ts';
import type { JsonObject } from './json.ts';
import type { Delta, RankedToken } from './output.ts';
import type { GenerateRequest } from './parse-request.ts';
import { rankTokens } from './sampler.ts';
import { EngineError } from './sequence.ts';
import {
  type ChoiceParts,
  chatLogprobs,
  completionLogprobs,
  deltaChunk,
  fullReply,
  promptLogprobs,
  type ReplyMeta,
  roleChunk,
  runningUsage,
  type UsageNumbers,
  usageChunk,
} from './shapes.ts';
import { decodeTokens } from './tokenizer.ts';
import { type PlannedCall, sliceArguments } from './tool-calls.ts';

/** Changes the handle of a reply; the identity unless a fault is active. */
export type HandleFilter = (handle: JsonObject | null) => JsonObject | null;

function rankPrompt(ids: readonly number[], top: number): readonly (RankedToken | number)[] {
  return ids.map((id, position) => (position === 0 ? id : rankTokens({ a: id, b: position }, 0, id, Math.max(1, top))));
}

function promptText(request: GenerateRequest, promptIndex: number): string {
  const text = request.promptTexts[promptIndex] ?? '';
  return text === '' ? decodeTokens(request.prompts[promptIndex] ?? []) : text;
}

function countUsage(request: GenerateRequest, choices: readonly Choice[], withDetails: boolean): UsageNumbers {
  const first = choices[0]?.result;
  return {
    prompt: request.prompts.reduce((sum, ids) => sum + ids.length, 0),
    completion: choices.reduce((sum, choice) => sum + choice.output.ids.length, 0),
    cached: first?.cachedTokens ?? 0,
    created: first?.createdTokens ?? 0,
    withDetails,
  };
}

function toolCall(call: PlannedCall, text: string): JsonObject {
  const fn = { name: call.name, arguments: sliceArguments(call, text, 0, text.length) };
  return { id: call.id, type: 'function', function: fn };
}

function choiceParts(request: GenerateRequest, choice: Choice): ChoiceParts {
  const isChat = request.api === 'chat';
  const promptIds = request.prompts[choice.promptIndex] ?? [];
  const echoed = request.echo && !isChat ? promptText(request, choice.promptIndex) : '';
  let logprobs: JsonObject | null = null;
  if (request.logprobs !== undefined) {
    const ranked = choice.output.ranked;
    const prompt = echoed === '' ? [] : rankPrompt(promptIds, request.logprobs);
    logprobs = isChat
      ? chatLogprobs(ranked, request.logprobs)
      : completionLogprobs([...prompt, ...ranked], request.logprobs, 0);
  }
  return {
    index: choice.index,
    // Whoever gets the ids of the prompt does not get its text besides.
    text: (request.returnTokenIds ? '' : echoed) + choice.output.content,
    thought: choice.output.thought,
    toolCall: choice.call === undefined ? undefined : toolCall(choice.call, choice.output.content),
    logprobs,
    finishReason: choice.finishReason,
    stopReason: choice.stopReason,
    ids: request.returnTokenIds ? choice.output.ids : null,
    promptIds: request.returnTokenIds ? promptIds : null,
    promptLogprobs:
      request.promptLogprobs === undefined ? null : promptLogprobs(rankPrompt(promptIds, request.promptLogprobs)),
  };
}

function thoughtOf({ thought }: Delta): JsonObject {
  return thought === '' ? {} : { reasoning: thought };
}

function chatDelta(delta: Delta): JsonObject {
  return delta.thought !== '' && delta.text === '' ? thoughtOf(delta) : { ...thoughtOf(delta), content: delta.text };
}

/** Runs the request and builds the whole reply. */
export async function replyWhole(
  request: GenerateRequest,
  context: GenerateContext,
  meta: ReplyMeta,
  filter: HandleFilter,
): Promise<JsonObject> {
  const choices = await generate(request, context, undefined);
  const usage = countUsage(request, choices, context.config.promptTokensDetails);
  const parts = choices.map((choice) => choiceParts(request, choice));
  return fullReply(meta, parts, usage, filter(replyHandle(request, choices)), request.api === 'chat');
}

/** The error that a failed run shows to the client. */
export function toApiError(error: EngineError, version: string): ApiError {
  return error.kind === 'dead' ? deadEngineError(version) : internalError();
}

/** Runs the request and sends one SSE data text per event, `[DONE]` included; engine failures become an error event. */
export async function replyStream(
  request: GenerateRequest,
  context: GenerateContext,
  meta: ReplyMeta,
  filter: HandleFilter,
  send: (data: string) => void,
): Promise<void> {
  const isChat = request.api === 'chat';
  const opened = new Set<number>();
  const generated = new Map<number, number>();
  const argumentsSent = new Map<number, number>();
  const sendJson = (value: JsonObject): void => send(JSON.stringify(value));

  const usageOf = (index: number, promptIndex: number): JsonObject | undefined =>
    request.continuousUsage
      ? runningUsage(request.prompts[promptIndex]?.length ?? 0, generated.get(index) ?? 0, isChat)
      : undefined;
  const open = (index: number, promptIndex: number): void => {
    if (!isChat || opened.has(index)) return;
    opened.add(index);
    const ids = request.returnTokenIds ? (request.prompts[promptIndex] ?? []) : null;
    sendJson(roleChunk(meta, index, usageOf(index, promptIndex), ids));
  };
  const toolDelta = (index: number, call: PlannedCall, text: string, isFinal: boolean): JsonObject => {
    const from = argumentsSent.get(index);
    const part = sliceArguments(call, text, from ?? 0, text.length);
    argumentsSent.set(index, text.length);
    const fn = from === undefined ? { name: call.name, arguments: part } : { arguments: part };
    const entry =
      from === undefined ? { id: call.id, type: 'function', index: 0, function: fn } : { index: 0, function: fn };
    return isFinal && from !== undefined && part === '' ? {} : { tool_calls: [entry] };
  };
  const emit = (
    index: number,
    delta: Delta,
    call: PlannedCall | undefined,
    textSoFar: string,
    final: Choice | undefined,
  ): void => {
    const promptIndex = Math.floor(index / request.n);
    open(index, promptIndex);
    generated.set(index, (generated.get(index) ?? 0) + delta.ids.length);
    const isFirst = !isChat && !opened.has(index);
    if (isFirst) opened.add(index);
    const promptIds = request.prompts[promptIndex] ?? [];
    const echoed = isFirst && request.echo ? promptText(request, promptIndex) : '';
    const echoedRanks = echoed === '' || request.logprobs === undefined ? [] : rankPrompt(promptIds, request.logprobs);
    const offset = isChat ? 0 : textSoFar.length - delta.text.length;
    const top = request.logprobs ?? 0;
    const content: JsonObject | string =
      call !== undefined && (delta.thought === '' || delta.text !== '')
        ? { ...thoughtOf(delta), ...toolDelta(index, call, textSoFar, final !== undefined) }
        : isChat
          ? chatDelta(delta)
          : (request.returnTokenIds ? '' : echoed) + delta.text;
    sendJson(
      deltaChunk(meta, {
        index,
        delta: content,
        logprobs:
          request.logprobs === undefined
            ? null
            : isChat
              ? chatLogprobs(delta.ranked, top)
              : completionLogprobs([...echoedRanks, ...delta.ranked], top, offset),
        ids: request.returnTokenIds ? delta.ids : null,
        promptIds: request.returnTokenIds && isFirst ? promptIds : null,
        finishReason: final?.finishReason ?? null,
        stopReason: final?.stopReason ?? null,
        usage: usageOf(index, promptIndex),
        showFingerprint: !request.includeUsage,
        handle: final === undefined ? null : filter(final.result.handle),
      }),
    );
  };

  try {
    const choices = await generate(request, context, {
      onStart: open,
      onDelta: (index, delta, call, text) => emit(index, delta, call, text, undefined),
      onFinish: (choice) => emit(choice.index, choice.rest, choice.call, choice.output.content, choice),
    });
    if (request.includeUsage) {
      sendJson(usageChunk(meta, countUsage(request, choices, context.config.promptTokensDetails), isChat));
    }
  } catch (error) {
    if (!(error instanceof EngineError) || error.kind === 'aborted') throw error;
    if (error.kind === 'load_failure') open(0, 0);
    send(toPythonJson(toApiError(error, context.config.version).body));
  }
  send('[DONE]');
}
