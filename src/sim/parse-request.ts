import { badRequest, schemaError, toPython, toPythonFloat } from './api-error.ts';
import { renderChat } from './chat-template.ts';
import { isInteger, isObject, isTruthy, type JsonObject } from './json.ts';
import type { MediaContents, MediaDigests } from './media.ts';
import type { SimConfig } from './options.ts';
import { encodeText, vocabularySize } from './tokenizer.ts';

const MAX_N = 128;
/** vLLM's default of `--max-logprobs`. */
const MAX_LOGPROBS = 20;

/** Which API a request uses. */
export type ApiKind = 'chat' | 'completions';

/** A choice of tool that the reply must make: a name, or any of the list. */
export interface ForcedTools {
  readonly names: readonly string[];
  readonly isNamed: boolean;
}

/** A checked generate request. */
export interface GenerateRequest {
  readonly api: ApiKind;
  readonly model: string;
  readonly prompts: readonly (readonly number[])[];
  readonly promptTexts: readonly string[];
  /** Of the only prompt. */
  readonly media: MediaContents;
  readonly stream: boolean;
  readonly includeUsage: boolean;
  readonly continuousUsage: boolean;
  readonly n: number;
  readonly maxTokens: readonly number[];
  readonly minTokens: number;
  readonly ignoreEos: boolean;
  readonly stops: readonly string[];
  readonly stopTokenIds: readonly number[];
  readonly keepStop: boolean;
  /** Greedy decoding gives every choice the same text. */
  readonly isGreedy: boolean;
  readonly salt: number;
  readonly echo: boolean;
  /** Alternatives per token; undefined = no log probabilities. */
  readonly logprobs: number | undefined;
  readonly promptLogprobs: number | undefined;
  readonly returnTokenIds: boolean;
  readonly cacheSalt: string;
  readonly tools: ForcedTools | undefined;
  readonly kv: JsonObject | undefined;
}

const jsonErrors: readonly (readonly [RegExp, string])[] = [
  [/property name/i, 'Expecting property name enclosed in double quotes'],
  [/',' or '[}\]]'/, "Expecting ',' delimiter"],
  [/':'/, "Expecting ':' delimiter"],
];

/** Parses a body, with the engine's error for text that is not JSON. */
export function parseBody(bytes: Uint8Array): unknown {
  const text = new TextDecoder().decode(bytes);
  try {
    return JSON.parse(text);
  } catch (error) {
    const message = error instanceof Error ? error.message : '';
    const position = /position (\d+)/.exec(message)?.[1] ?? String(text.length);
    const reason = jsonErrors.find(([pattern]) => pattern.test(message))?.[1] ?? 'Expecting value';
    throw schemaError('json_invalid', `body.${position}`, 'JSON decode error', "'<dict of 0 items>'", reason);
  }
}

function missing(body: JsonObject, name: string): Error {
  return schemaError('missing', `body.${name}`, 'Field required', toPython(body));
}

/** Checks what the schema checks: types of the members that matter here. */
export function checkSchema(body: unknown, required: string): JsonObject {
  if (!isObject(body)) {
    throw schemaError('dict_type', 'body', 'Input should be a valid dictionary', toPython(body));
  }
  if (!(required in body)) throw missing(body, required);
  if (required === 'messages' && !Array.isArray(body['messages'])) {
    throw schemaError('list_type', 'body.messages', 'Input should be a valid list', toPython(body['messages']));
  }
  for (const name of ['kv_transfer_params', 'ec_transfer_params']) {
    const value = body[name];
    if (value !== undefined && value !== null && !isObject(value)) {
      throw schemaError('dict_type', `body.${name}`, 'Input should be a valid dictionary', toPython(value));
    }
  }
  for (const name of ['max_tokens', 'max_completion_tokens', 'min_tokens', 'n', 'seed']) {
    const value = body[name];
    const mayBeNull = name !== 'min_tokens';
    if (value === undefined || (value === null && mayBeNull) || isInteger(value)) continue;
    throw schemaError('int_type', `body.${name}`, 'Input should be a valid integer', toPython(value));
  }
  for (const name of ['stream', 'echo', 'ignore_eos', 'return_token_ids']) {
    const value = body[name];
    if (value === undefined || value === null || typeof value === 'boolean') continue;
    throw schemaError('bool_type', `body.${name}`, 'Input should be a valid boolean', toPython(value));
  }
  if (isTruthy(body['stream_options']) && body['stream'] !== true) {
    throw badRequest(
      'Stream options can only be defined when `stream=True`. (parameter=stream_options)',
      'stream_options',
    );
  }
  return body;
}

function checkIds(ids: readonly unknown[], param: string): readonly number[] {
  const known = ids.filter((id) => isInteger(id)).filter((id) => id >= 0 && id < vocabularySize);
  if (ids.length === 0 || known.length !== ids.length) {
    throw badRequest(`${param} must be a non-empty list of token ids within the vocabulary.`, param);
  }
  return known;
}

interface Prompt {
  readonly ids: readonly (readonly number[])[];
  readonly texts: readonly string[];
  readonly media: MediaContents;
}

const NO_MEDIA: MediaContents = new Map();

/** Prompt of a chat request, or, without media, of a `/tokenize` call (which ignores some members that chat honours). */
export function readChatPrompt(body: JsonObject, config: SimConfig, media: MediaDigests | undefined): Prompt {
  const forTokenize = media === undefined;
  const messages = Array.isArray(body['messages']) ? body['messages'] : [];
  if (messages.length === 0) {
    throw badRequest('Cannot apply chat template to an empty conversation. Provide at least one message.');
  }
  const rendered = renderChat(
    {
      messages,
      tools: body['tools'],
      chatTemplate: body['chat_template'],
      templateKwargs: body['chat_template_kwargs'],
      documents: forTokenize ? undefined : body['documents'],
      reasoningEffort: forTokenize ? undefined : body['reasoning_effort'],
      addGenerationPrompt: body['add_generation_prompt'] !== false,
      continueFinalMessage: body['continue_final_message'] === true,
      addSpecialTokens: body['add_special_tokens'] === true,
      template: config.template,
      reasoning: config.reasoning,
      ...(media === undefined ? {} : { media }),
    },
    config.tokenizer,
  );
  let ids: readonly number[] = rendered.tokens;
  const kv = body['kv_transfer_params'];
  const given = isObject(kv) ? kv['prompt_token_ids'] : undefined;
  if (given !== undefined && rendered.media.size === 0 && body['echo'] !== true) {
    ids = checkIds(Array.isArray(given) ? given : [], 'kv_transfer_params.prompt_token_ids');
  }
  const keep = body['truncate_prompt_tokens'];
  const cut = !forTokenize && isInteger(keep) && keep > 0 ? Math.max(0, ids.length - keep) : 0;
  const contents = new Map([...rendered.media].map(([place, content]) => [place - cut, content]));
  return { ids: [ids.slice(cut)], texts: [''], media: contents };
}

/** Prompts of a completions request: a text, token ids, or a list of either. */
export function readCompletionPrompts(prompt: unknown, config: SimConfig): Prompt {
  const isIds = (value: unknown): boolean => Array.isArray(value) && value.length > 0 && value.every(isInteger);
  const items: readonly unknown[] = Array.isArray(prompt) && !isIds(prompt) ? prompt : [prompt];
  if (items.length === 0) throw badRequest('Please provide at least one prompt', 'prompt');
  const ids: (readonly number[])[] = [];
  const texts: string[] = [];
  for (const item of items) {
    if (typeof item === 'string') {
      const tokens = encodeText(item, config.tokenizer);
      if (tokens.length === 0) throw badRequest('The prompt is empty. Please provide at least one token.', 'prompt');
      ids.push(tokens);
      texts.push(item);
    } else if (Array.isArray(item)) {
      ids.push(checkIds(item, 'prompt'));
      texts.push('');
    } else {
      throw schemaError('string_type', 'body.prompt', 'Input should be a valid string', toPython(item));
    }
  }
  return { ids, texts, media: NO_MEDIA };
}

function readLimit(body: JsonObject, api: ApiKind, config: SimConfig): number | undefined {
  for (const name of api === 'chat' ? ['max_completion_tokens', 'max_tokens'] : ['max_tokens']) {
    const value = body[name];
    if (!isInteger(value)) continue;
    if (value < 1)
      throw badRequest(
        `max_tokens must be at least 1, got ${value}. (parameter=max_tokens, value=${value})`,
        'max_tokens',
      );
    return value;
  }
  return api === 'chat' ? config.defaultMaxTokens : 16;
}

function readTools(body: JsonObject, config: SimConfig): ForcedTools | undefined {
  const tools: readonly unknown[] = Array.isArray(body['tools']) ? body['tools'] : [];
  const choice = body['tool_choice'];
  if (isObject(choice)) {
    const fn = choice['function'];
    const name = isObject(fn) && typeof fn['name'] === 'string' ? fn['name'] : '';
    return { names: [name], isNamed: true };
  }
  const names = tools.flatMap((tool) => {
    const fn = isObject(tool) ? tool['function'] : undefined;
    return isObject(fn) && typeof fn['name'] === 'string' ? [fn['name']] : [];
  });
  if (choice === 'required' && names.length > 0) return { names, isNamed: false };
  if (names.length > 0 && choice !== 'none' && !config.autoToolChoice) {
    throw badRequest('"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set');
  }
  return undefined;
}

function readStops(value: unknown): readonly string[] {
  const items: readonly unknown[] = Array.isArray(value) ? value : [value];
  return items.filter((item): item is string => typeof item === 'string' && item.length > 0);
}

function checkSampling(body: JsonObject): number {
  const temperature = body['temperature'];
  if (typeof temperature === 'number' && temperature < 0) {
    const shown = toPythonFloat(temperature);
    throw badRequest(
      `temperature must be non-negative, got ${shown}. (parameter=temperature, value=${shown})`,
      'temperature',
    );
  }
  const topP = body['top_p'];
  if (typeof topP === 'number' && (topP <= 0 || topP > 1)) {
    const shown = toPythonFloat(topP);
    throw badRequest(`top_p must be in (0, 1], got ${shown}. (parameter=top_p, value=${shown})`, 'top_p');
  }
  const seed = body['seed'];
  return temperature !== 0 && isInteger(seed) ? seed | 0 : 0;
}

function readLogprobs(body: JsonObject, api: ApiKind): number | undefined {
  const count = api === 'completions' ? countOfCompletion(body['logprobs']) : countOfChat(body);
  if (count !== undefined && count > MAX_LOGPROBS) {
    throw badRequest(
      `Requested sample logprobs of ${count}, which is greater than max allowed: ${MAX_LOGPROBS} (parameter=logprobs, value=${count})`,
      'logprobs',
    );
  }
  return count;
}

/** The flag of chat is a count of 1 to the completions schema. */
function countOfCompletion(value: unknown): number | undefined {
  if (value === true) return 1;
  return isInteger(value) ? value : undefined;
}

function countOfChat(body: JsonObject): number | undefined {
  const top = body['top_logprobs'];
  if (body['logprobs'] === true) return isInteger(top) ? top : 0;
  if (isInteger(top) && top > 0) {
    throw badRequest(
      'when using `top_logprobs`, `logprobs` must be set to true. (parameter=top_logprobs)',
      'top_logprobs',
    );
  }
  return undefined;
}

/** Turns a body into a checked request; throws ApiError as the engine answers. The model was checked before. */
export function readGenerate(
  body: JsonObject,
  api: ApiKind,
  model: string,
  config: SimConfig,
  media: MediaDigests,
): GenerateRequest {
  const prompt = api === 'chat' ? readChatPrompt(body, config, media) : readCompletionPrompts(body['prompt'], config);
  for (const ids of prompt.ids) {
    if (ids.length < config.maxModelLen) continue;
    const shown = Math.min(ids.length, config.maxModelLen + 1);
    throw badRequest(
      `This model's maximum context length is ${config.maxModelLen} tokens. However, your prompt contains at least ${shown} input tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input prompt. (parameter=input_tokens, value=${shown})`,
      'input_tokens',
    );
  }
  const tools = api === 'chat' ? readTools(body, config) : undefined;
  const salt = checkSampling(body);
  const limit = readLimit(body, api, config) ?? config.defaultMaxTokens;
  const minTokens = isInteger(body['min_tokens']) ? body['min_tokens'] : 0;
  if (minTokens > limit) {
    throw badRequest(`min_tokens must be less than or equal to max_tokens=${limit}, got ${minTokens}.`);
  }
  const options = isObject(body['stream_options']) ? body['stream_options'] : {};
  const kv = isObject(body['kv_transfer_params']) ? body['kv_transfer_params'] : undefined;
  const n = isInteger(body['n']) ? body['n'] : 1;
  if (n < 1) throw badRequest(`n must be at least 1, got ${n}. (parameter=n, value=${n})`, 'n');
  // One process may hold engines, proxy and tests: a huge n would stop them all.
  if (n > MAX_N) throw badRequest(`n must be at most ${MAX_N}, got ${n}. (parameter=n, value=${n})`, 'n');
  const includeUsage = options['include_usage'] === true;
  return {
    api,
    model,
    prompts: prompt.ids,
    promptTexts: prompt.texts,
    media: prompt.media,
    stream: body['stream'] === true,
    includeUsage,
    continuousUsage: includeUsage && options['continuous_usage_stats'] === true,
    n,
    maxTokens: prompt.ids.map((ids) => Math.min(limit, config.maxModelLen - ids.length)),
    minTokens,
    ignoreEos: body['ignore_eos'] === true,
    stops: readStops(body['stop']),
    stopTokenIds: Array.isArray(body['stop_token_ids']) ? body['stop_token_ids'].filter(isInteger) : [],
    keepStop: body['include_stop_str_in_output'] === true,
    isGreedy: body['temperature'] === 0,
    salt,
    echo: body['echo'] === true,
    logprobs: readLogprobs(body, api),
    promptLogprobs: isInteger(body['prompt_logprobs']) ? body['prompt_logprobs'] : undefined,
    returnTokenIds: body['return_token_ids'] === true,
    cacheSalt: typeof body['cache_salt'] === 'string' ? body['cache_salt'] : '',
    tools,
    kv: kv !== undefined && isTruthy(kv) ? kv : undefined,
  };
}
