import type { Api } from './facts.ts';
import {
  concatBytes,
  type Element,
  findMember,
  type Member,
  type ScannedObject,
  scanArray,
  scanObject,
} from './json-scan.ts';

/** Versions whose streams {@link streamOf} writes, byte for byte as recorded of the engine (vLLM 0.32). */
export const CONVERTIBLE_VERSIONS = /^0\.32\./;

/**
 * Members that change what a stream's chunks carry, so that a whole reply cannot be shown as one: anything but a value
 * that means absent.
 */
const SHAPING = new Set([
  'continuous_usage_stats',
  'echo',
  'functions',
  'logprobs',
  'n',
  'prompt_logprobs',
  'return_token_ids',
  'return_token_offsets',
  'return_weight_versions',
  'stream_interval',
  'tools',
  'top_logprobs',
  'use_beam_search',
]);
const ABSENT = new Set(['null', 'false']);

/** Whether a streamed request gets chunks that can be written without loss once its whole reply is there. */
export function isConvertible(body: Uint8Array, scan: ScannedObject): boolean {
  return scan.members.every((member) => {
    if (member.key === 'stream_options') return readOptions(body, member) !== undefined;
    if (member.key === 'n') return raw(body, member) === '1' || ABSENT.has(member.type);
    return !SHAPING.has(member.key) || ABSENT.has(member.type);
  });
}

/** Whether a request wants the trailing chunk with the token counts. */
export function wantsUsage(body: Uint8Array, scan: ScannedObject): boolean {
  const options = findMember(scan, 'stream_options');
  return options !== undefined && readOptions(body, options) === 'usage';
}

/** Undefined where there is more than the one option that is understood. */
function readOptions(body: Uint8Array, options: Member): 'usage' | 'none' | undefined {
  if (options.type === 'null') return 'none';
  const scan = scanObject(body, options.valueStart, options.valueEnd);
  if (scan.kind !== 'object') return undefined;
  let wanted: 'usage' | 'none' = 'none';
  for (const { key, type } of scan.members) {
    if (key === 'include_usage' && type === 'true') wanted = 'usage';
    else if (!ABSENT.has(type)) return undefined;
  }
  return wanted;
}

/** A whole reply as a stream. */
export interface WrittenStream {
  readonly events: Uint8Array;
  /** The reply has parts besides text (reasoning): they are shown, but an engine's own stream would have shown them sooner. */
  readonly hasMore: boolean;
}

/** Of a chat message what every reply has. */
const PLAIN = new Set(['role', 'content']);

/** What all chunks of a reply share. */
interface Frame {
  /** Up to the choices. */
  readonly head: string;
  /** Behind the choices of a last chunk. */
  readonly tail: string;
}

/**
 * Writes a whole reply as the engine would have streamed it: values are copied as they are written. Undefined where the
 * reply is none that is known.
 */
export function streamOf(api: Api, body: Uint8Array, includeUsage: boolean): WrittenStream | undefined {
  const reply = scanObject(body);
  if (reply.kind !== 'object') return undefined;
  const choices = findMember(reply, 'choices');
  const list = choices === undefined ? undefined : scanArray(body, choices.valueStart, choices.valueEnd);
  if (list === undefined || list.length === 0) return undefined;
  const value = (key: string) => rawOrNull(body, findMember(reply, key));
  const object = api === 'completions' ? 'text_completion' : 'chat.completion.chunk';
  const print = value('system_fingerprint');
  const fingerprint = print === 'null' ? '' : `,"system_fingerprint":${print}`;
  const frame: Frame = {
    head: `{"id":${value('id')},"object":"${object}","created":${value('created')},"model":${value('model')},"choices":[`,
    tail: includeUsage ? '' : fingerprint,
  };
  const events: string[] = [];
  let hasMore = false;
  for (const element of list) {
    const choice = scanObject(body, element.valueStart, element.valueEnd);
    const chunks = choice.kind === 'object' ? CHUNKS[api](body, choice, frame) : undefined;
    if (chunks === undefined) return undefined;
    events.push(...chunks.events);
    hasMore ||= chunks.hasMore;
  }
  const usage = findMember(reply, 'usage');
  if (includeUsage && usage !== undefined) {
    events.push(`${frame.head}],"usage":${withoutNulls(body, usage)}${fingerprint}}`);
  }
  const lines = [...events, '[DONE]'].map((event) => encoder.encode(`data: ${event}\n\n`));
  return { events: concatBytes(lines), hasMore };
}

interface Chunks {
  readonly events: readonly string[];
  readonly hasMore: boolean;
}

const CHUNKS: Readonly<Record<Api, (body: Uint8Array, choice: ScannedObject, frame: Frame) => Chunks | undefined>> = {
  completions: completionChunks,
  'chat.completions': chatChunks,
};

function completionChunks(body: Uint8Array, choice: ScannedObject, { head, tail }: Frame): Chunks {
  const value = (key: string) => rawOrNull(body, findMember(choice, key));
  const chunk = (text: string, reason: string, stop: string) =>
    `${head}{"index":${value('index')},"text":${text},"logprobs":null,"finish_reason":${reason},"stop_reason":${stop},"prompt_token_ids":null,"token_ids":null}]`;
  const text = value('text');
  const last = `${chunk('""', value('finish_reason'), value('stop_reason'))}${tail}}`;
  return { events: EMPTY.has(text) ? [last] : [`${chunk(text, 'null', 'null')}}`, last], hasMore: false };
}

function chatChunks(body: Uint8Array, choice: ScannedObject, { head, tail }: Frame): Chunks | undefined {
  const message = findMember(choice, 'message');
  const parts = message === undefined ? undefined : scanObject(body, message.valueStart, message.valueEnd);
  if (parts?.kind !== 'object') return undefined;
  const value = (key: string) => rawOrNull(body, findMember(choice, key));
  const delta = (text: string, reason: string, rest: string) =>
    `${head}{"index":${value('index')},"delta":{${text}},"logprobs":null,"finish_reason":${reason}${rest}}]`;
  const role = rawOrNull(body, findMember(parts, 'role'));
  const first = delta(`"role":${role},"content":""`, 'null', '');
  const part = (key: string, text: string) => `${delta(`"${key}":${text}`, 'null', ',"token_ids":null')}}`;
  // What came before the answer is shown before it.
  const more = parts.members.filter((member) => !PLAIN.has(member.key) && !isNothing(body, member));
  const content = rawOrNull(body, findMember(parts, 'content'));
  const last = delta('"content":""', value('finish_reason'), `,"stop_reason":${value('stop_reason')},"token_ids":null`);
  return {
    events: [
      `${first},"prompt_token_ids":null,"prompt_text":null}`,
      ...more.map((member) => part(member.key, raw(body, member))),
      ...(EMPTY.has(content) ? [] : [part('content', content)]),
      `${last}${tail}}`,
    ],
    hasMore: more.length > 0,
  };
}

const EMPTY = new Set(['null', '""']);
// A byte order mark inside a text is a character of it.
const decoder = new TextDecoder('utf-8', { ignoreBOM: true });
const encoder = new TextEncoder();

function raw(body: Uint8Array, value: Element): string {
  return decoder.decode(body.subarray(value.valueStart, value.valueEnd));
}

function rawOrNull(body: Uint8Array, value: Element | undefined): string {
  return value === undefined ? 'null' : raw(body, value);
}

/** null, and a list or text without anything in it. */
function isNothing(body: Uint8Array, member: Member): boolean {
  if (member.type === 'array') return scanArray(body, member.valueStart, member.valueEnd)?.length === 0;
  return EMPTY.has(raw(body, member));
}

/** The counts as they stand in a stream, which leaves out what is null. */
function withoutNulls(body: Uint8Array, value: Element): string {
  if (value.type !== 'object') return raw(body, value);
  const scan = scanObject(body, value.valueStart, value.valueEnd);
  if (scan.kind !== 'object') return raw(body, value);
  const kept = scan.members.filter(({ type }) => type !== 'null');
  return `{${kept.map((member) => `${JSON.stringify(member.key)}:${withoutNulls(body, member)}`).join(',')}}`;
}
