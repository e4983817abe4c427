import type { Api } from './facts.ts';
import { findMember, type ScannedObject, scanArray } from './json-scan.ts';
import { mediaOfMessages } from './media.ts';

/**
 * Whether a prompt's tokens can be proven before a handle is used: each member of the body either cannot shape the
 * prompt, or the engine's `/tokenize` honours it. The lists are those of vLLM 0.32 and 0.33 (their request models);
 * anything else, members of later versions included, could shape the prompt unseen.
 */
export const PROVEN_VERSIONS = /^0\.3[23]\./;

/** Members that reach sampling, output or bookkeeping, never the prompt. */
const HARMLESS = new Set([
  'allowed_token_ids',
  'bad_words',
  'cache_salt',
  'conversation_id',
  'frequency_penalty',
  'ignore_eos',
  'include_reasoning',
  'include_stop_str_in_output',
  'length_penalty',
  'logit_bias',
  'logprob_token_ids',
  'logprobs',
  'max_completion_tokens',
  'max_tokens',
  'metadata',
  'min_p',
  'min_tokens',
  'model',
  'n',
  'parallel_tool_calls',
  'presence_penalty',
  'priority',
  'prompt_cache_key',
  'repetition_detection',
  'repetition_penalty',
  'request_id',
  'return_token_ids',
  'return_token_offsets',
  'return_tokens_as_token_ids',
  'return_weight_versions',
  'safety_identifier',
  'seed',
  'service_tier',
  'session_id',
  'skip_special_tokens',
  'spaces_between_special_tokens',
  'stop',
  'stop_token_ids',
  'store',
  'stream',
  'stream_interval',
  'stream_options',
  'temperature',
  'thinking_token_budget',
  'top_k',
  'top_logprobs',
  'top_p',
  'user',
  'vllm_xargs',
]);

/** Members that shape the prompt and that `/tokenize` takes too. */
const HONOURED: Readonly<Record<Api, ReadonlySet<string>>> = {
  'chat.completions': new Set([
    'add_generation_prompt',
    'add_special_tokens',
    'chat_template',
    'chat_template_kwargs',
    'continue_final_message',
    'messages',
    'tools',
  ]),
  completions: new Set(['add_special_tokens', 'prompt']),
};

/** Members that shape the prompt and that `/tokenize` of this engine version takes, of both APIs; none if it was not tested. */
export function honouredMembers(version: string): readonly string[] {
  return PROVEN_VERSIONS.test(version) ? ALL_HONOURED : [];
}

const ALL_HONOURED = [...new Set(Object.values(HONOURED).flatMap((members) => [...members]))].toSorted();

/** Values that are what an absent member means; a member may have any name, `constructor` too. */
const NEUTRAL: ReadonlyMap<string, string> = new Map([
  ['echo', 'false'],
  ['tool_choice', '"auto"'],
  ['use_beam_search', 'false'],
]);

/** Members that keep a handle from being used; `messages` or `prompt` among them where their form does. */
export function unprovenMembers(api: Api, body: Uint8Array, scan: ScannedObject): readonly string[] {
  const unproven = new Set<string>();
  for (const { key, type, valueStart, valueEnd } of scan.members) {
    if (type === 'null' || HARMLESS.has(key) || HONOURED[api].has(key)) continue;
    const neutral = NEUTRAL.get(key);
    const length = valueEnd - valueStart;
    // A member without a neutral value is not decoded.
    if (neutral?.length === length && neutral === ascii(body.subarray(valueStart, valueEnd))) continue;
    unproven.add(key);
  }
  const media = api === 'chat.completions' ? mediaOfMessages(body, scan) : [];
  if (media?.every((kind) => kind === 'none') !== true) unproven.add('messages');
  return [...unproven];
}

/**
 * Whether the KV of a prompt with these unproven members follows from its token ids alone. The ids of a picture are the
 * same for every picture: who compares them proves nothing.
 */
export function isInTokens(unproven: readonly string[]): boolean {
  return !unproven.includes('messages');
}

/**
 * Whether a prompt with these unproven members is proven by its token ids, beside a history that is equal byte by byte where
 * its messages are not text alone.
 */
export function isProvable(unproven: readonly string[], hasHistory: boolean): boolean {
  return unproven.every((key) => hasHistory && key === 'messages');
}

/** With any of these unproven, engines render the prompt themselves whatever ids they are given, or cannot take them. */
const RENDERED: ReadonlySet<string> = new Set(['messages', 'echo', 'suffix', 'prompt_embeds']);

/** Names that are told besides those, and characters of each. */
const TOLD_NAMES = 8;
const TOLD_CHARACTERS = 64;

/** What the router is told of these: it asks whether there are any, and for the names of what is rendered. */
export function toldMembers(unproven: readonly string[]): string[] {
  const others = unproven.filter((key) => !RENDERED.has(key)).slice(0, TOLD_NAMES);
  return [...others.map((key) => key.slice(0, TOLD_CHARACTERS)), ...unproven.filter((key) => RENDERED.has(key))];
}

/** Whether a reply stays the same when token ids are asked for: with them an engine leaves out the text it was to echo. */
export function mayAskForTokenIds(api: Api, unproven: readonly string[]): boolean {
  return api === 'chat.completions' || !unproven.includes('echo');
}

/**
 * Whether an engine takes the token ids of this prompt in place of its text (vLLM 0.32 and 0.33): text alone, and none of it
 * asked back. False for a prompt that is token ids already.
 */
export function goesAsTokenIds(api: Api, body: Uint8Array, scan: ScannedObject, unproven: readonly string[]): boolean {
  if (unproven.some((key) => RENDERED.has(key))) return false;
  if (api === 'chat.completions') return true;
  const prompt = findMember(scan, 'prompt');
  if (prompt?.type !== 'array') return prompt?.type === 'string';
  const [only, ...others] = scanArray(body, prompt.valueStart, prompt.valueEnd) ?? [];
  return only?.type === 'string' && others.length === 0;
}

/**
 * Whether each engine renders this prompt for itself although it could be told its token ids afterwards: what the two made of
 * it is to be compared. False where nothing is rendered, as the prompt is token ids already.
 */
export function isRenderedByEach(
  api: Api,
  body: Uint8Array,
  scan: ScannedObject,
  unproven: readonly string[],
): boolean {
  if (!mayAskForTokenIds(api, unproven)) return false;
  if (api === 'chat.completions') return true;
  const prompt = findMember(scan, 'prompt');
  if (prompt?.type !== 'array') return prompt?.type === 'string';
  return scanArray(body, prompt.valueStart, prompt.valueEnd)?.[0]?.type === 'string';
}

/** The members that a call of `/tokenize` takes from the client's body. */
export function tokenizeDrops(api: Api, scan: ScannedObject): ReadonlySet<string> {
  const keys = scan.members.map(({ key }) => key);
  return new Set(keys.filter((key) => key !== 'model' && !HONOURED[api].has(key)));
}

function ascii(bytes: Uint8Array): string {
  return String.fromCharCode(...bytes);
}
