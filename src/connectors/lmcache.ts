import { CONSUMED_MEMBERS, type LocalReason, REFUSED_MEMBERS } from '../core/facts.ts';
import { decodeString, type Edits, findMember, type Member, scanObject } from '../core/json-scan.ts';
import { unprovenMembers } from '../core/prompt-members.ts';
import type { Receiver } from '../core/receiver.ts';
import type { ClientRequest, FirstTokenConnector, TokenLimits, Uncarried } from './connector.ts';

// LMCache's in-process prefill/decode mode (`enable_pd`), as its example proxy speaks it. Both legs are completions
// whatever the client asked for; D finds the KV by a hash of the tokens, so a leg to D is never wrong, only slower.

/** Members of the client that no leg may carry. */
const NEVER = [...CONSUMED_MEMBERS, 'ec_transfer_params'];
/** What D gets when the client names no limit: the default of the completions API. */
const COMPLETIONS_MAX_TOKENS = 16;

const LOCAL_PARAMS: Readonly<Record<LocalReason, string>> = {
  n: 'n',
  beam_search: 'use_beam_search',
  multi_prompt: 'prompt',
  echo_logprobs: 'echo',
  prompt_logprobs: 'prompt_logprobs',
  prompt_embeds: 'prompt_embeds',
};

/** A grammar would begin anew with D's first token. */
const CONSTRAINED = [
  'structured_outputs',
  'guided_json',
  'guided_regex',
  'guided_choice',
  'guided_grammar',
  'structural_tag',
];
/** Members that shape a chat prompt and that `/tokenize` leaves out (seen on 0.33). */
const UNTOKENIZED = ['documents', 'reasoning_effort', 'truncate_prompt_tokens', 'mm_processor_kwargs'];

export const lmcache: FirstTokenConnector = {
  runner: 'first-token',
  name: 'lmcache',

  uncarried(request: ClientRequest): Uncarried | undefined {
    const { api, facts } = request;
    const [local] = facts.localReasons;
    if (local !== undefined)
      return { param: LOCAL_PARAMS[local], message: 'one prompt and one choice are handed over' };
    const shown = (key: string) => shortText(request, key);
    if (!isOff(shown('echo'))) return { param: 'echo', message: 'the prompt is handed over as token ids' };
    if (!['', '1', 'null'].includes(shown('best_of'))) {
      return { param: 'best_of', message: 'one prompt and one choice are handed over' };
    }
    for (const param of CONSTRAINED) {
      if (!isOff(shown(param))) return { param, message: 'a grammar cannot go on in the decode engine' };
    }
    const format = member(request, 'response_format');
    if (format?.type === 'object' && typeOf(request, format) !== 'text') {
      return { param: 'response_format', message: 'a grammar cannot go on in the decode engine' };
    }
    if (api === 'completions') return undefined;
    if (!['', 'null', '"auto"', '"none"'].includes(shown('tool_choice'))) {
      return { param: 'tool_choice', message: 'a call cannot be forced through the completions API' };
    }
    for (const param of UNTOKENIZED) {
      if (!isOff(shown(param))) return { param, message: "the engine's /tokenize leaves it out of the prompt" };
    }
    return unprovenMembers(api, request.body, request.scan).includes('messages')
      ? { param: 'messages', message: 'only text can be handed over as token ids' }
      : undefined;
  },

  unproven(request: ClientRequest): boolean {
    const { api, body, scan } = request;
    return unprovenMembers(api, body, scan).some((key) => !CARRIED.has(key)) || hasOddStream(request);
  },

  readLimits(request: ClientRequest): TokenLimits {
    const { api } = request;
    const [most, chatMost, least] = ['max_tokens', 'max_completion_tokens', 'min_tokens'].map((key) =>
      readCount(request, key),
    );
    if (most === 'odd' || chatMost === 'odd' || least === 'odd') return { kind: 'odd' };
    const max = api === 'chat.completions' ? (chatMost ?? most) : (most ?? COMPLETIONS_MAX_TOKENS);
    const min = least ?? 0;
    return max !== undefined && (max < 1 || min > max) ? { kind: 'odd' } : { kind: 'ok', max, min };
  },

  topLogprobs(request: ClientRequest): number {
    const count = request.api === 'chat.completions' ? readCount(request, 'top_logprobs') : undefined;
    return typeof count === 'number' ? count : 0;
  },

  stops(request: ClientRequest): readonly string[] {
    const stop = member(request, 'stop');
    if (stop === undefined) return [];
    const value: unknown = JSON.parse(textOf(request, stop));
    const stops: readonly unknown[] = Array.isArray(value) ? value : [value];
    return stops.filter((text): text is string => typeof text === 'string');
  },

  prefill(request: ClientRequest, promptTokenIds: readonly number[], transferId: string, receiver: Receiver): Edits {
    const { host, initPorts, allocPorts, queryPorts } = receiver;
    const params = {
      // P looks only whether the key is there.
      ret_first_tok: true,
      disagg_spec: {
        req_id: transferId,
        receiver_host: host,
        receiver_init_port: initPorts,
        receiver_alloc_port: allocPorts,
        ...(queryPorts.length === 0 ? {} : { receiver_query_port: queryPorts }),
      },
    };
    const set = new Map<string, string>([
      ['prompt', idsJson(promptTokenIds)],
      ['max_tokens', '1'],
      ['stream', 'false'],
      ['kv_transfer_params', JSON.stringify(params)],
      ...legMembers(request),
    ]);
    if (has(request, 'max_completion_tokens')) set.set('max_completion_tokens', '1');
    // More than the one token would be a 400; one keeps the first from being the end.
    if (atLeast(request) > 0) set.set('min_tokens', '1');
    return { set, drop: new Set([...NEVER, 'stream_options', 'top_logprobs']) };
  },

  decode(request: ClientRequest, promptTokenIds: readonly number[], firstToken: number, max: number): Edits {
    const set = new Map<string, string>([
      ['prompt', idsJson([...promptTokenIds, firstToken])],
      ['max_tokens', String(max - 1)],
      ...legMembers(request),
    ]);
    if (has(request, 'max_completion_tokens')) set.set('max_completion_tokens', String(max - 1));
    if (has(request, 'min_tokens')) set.set('min_tokens', String(Math.max(0, atLeast(request) - 1)));
    return { set, drop: new Set([...NEVER, ...REFUSED_MEMBERS, 'top_logprobs']) };
  },

  drain({ scan }: ClientRequest, promptTokenIds: readonly number[], firstToken: number): Edits {
    const set = new Map<string, string>([
      // With `skip_last_n_tokens: 1` D looks for all but the last token.
      ['prompt', idsJson([...promptTokenIds, firstToken])],
      ['max_tokens', '1'],
      ['stream', 'false'],
    ]);
    // The rest of the body is the client's; model and salt may be part of the key.
    const keys = scan.members.map(({ key }) => key).filter((key) => key !== 'model' && key !== 'cache_salt');
    return { set, drop: new Set(keys) };
  },
};

/** Members that `unprovenMembers` does not know and that do not reach the prompt of a completion. */
const CARRIED = new Set(['tool_choice', 'response_format', 'echo', 'best_of', 'use_beam_search']);

/** Members of `stream_options` that engines know, and what they are set to. */
const STREAM_OPTIONS = new Set(['include_usage', 'continuous_usage_stats']);
const SWITCHES: ReadonlySet<Member['type']> = new Set(['true', 'false', 'null']);

/** Chat asks for log probabilities with a flag and a count, completions with the count alone. */
function legMembers(request: ClientRequest): readonly (readonly [string, string])[] {
  const top = readCount(request, 'top_logprobs');
  const wants = request.api === 'chat.completions' && typeof top === 'number' && top > 0;
  return wants && !isOff(shortText(request, 'logprobs')) ? [['logprobs', String(top)]] : [];
}

function atLeast(request: ClientRequest): number {
  const least = readCount(request, 'min_tokens');
  return typeof least === 'number' ? least : 0;
}

function has(request: ClientRequest, key: string): boolean {
  return findMember(request.scan, key) !== undefined;
}

function member({ scan }: ClientRequest, key: string): Member | undefined {
  const found = findMember(scan, key);
  return found?.type === 'null' ? undefined : found;
}

function textOf({ body }: ClientRequest, { valueStart, valueEnd }: Member): string {
  return new TextDecoder().decode(body.subarray(valueStart, valueEnd));
}

/** JSON text of a short value; empty where it is absent. */
function shortText(request: ClientRequest, key: string): string {
  const found = member(request, key);
  if (found === undefined) return '';
  return found.valueEnd - found.valueStart > 64 ? 'long' : textOf(request, found);
}

function isOff(value: string): boolean {
  return value === '' || value === 'null' || value === 'false';
}

/**
 * P is asked for a whole reply, so that D alone would judge how the client asks for a stream: after the first token has
 * been shown. Anything but what every engine takes is odd.
 */
function hasOddStream(request: ClientRequest): boolean {
  const stream = shortText(request, 'stream');
  if (!isOff(stream) && stream !== 'true') return true;
  const options = member(request, 'stream_options');
  if (options === undefined) return false;
  const scan = scanObject(request.body, options.valueStart, options.valueEnd);
  if (stream !== 'true' || options.type !== 'object' || scan.kind !== 'object') return true;
  return scan.members.some(({ key, type }) => !STREAM_OPTIONS.has(key) || !SWITCHES.has(type));
}

function typeOf({ body }: ClientRequest, object: Member): string {
  const scan = scanObject(body, object.valueStart, object.valueEnd);
  const type = scan.kind === 'object' ? findMember(scan, 'type') : undefined;
  return type?.type === 'string' ? decodeString(body, type) : '';
}

/** A plain whole number; undefined where absent, `odd` for anything that an engine may or may not take for one. */
function readCount(request: ClientRequest, key: string): number | 'odd' | undefined {
  const found = member(request, key);
  if (found === undefined) return undefined;
  const text = textOf(request, found);
  return /^\d{1,15}$/.test(text) ? Number(text) : 'odd';
}

function idsJson(ids: readonly number[]): string {
  return `[${ids.join(',')}]`;
}
