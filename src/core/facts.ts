import { hasAssistantMessage } from './history.ts';
import { decodeString, findMember, type Member, type ObjectScan, scanArray } from './json-scan.ts';

/** The two APIs that go through prefill and decode. */
export type Api = 'chat.completions' | 'completions';

/** What baton reads from a request body; text stays in the body. */
export interface BodyFacts {
  /** Empty when the body names none: engines then use their first model. */
  readonly model: string;
  /** What the client asked for; the shape of the reply is decided by what the engine sends. */
  readonly stream: boolean;
  /** What `readIdentity` found; empty when the client names no conversation. */
  readonly conversationId: string;
  /** The request continues a conversation as far as its messages show: one of them is an assistant's. */
  readonly continues: boolean;
  /** The client wants the token ids of prompt and reply. */
  readonly returnTokenIds: boolean;
  readonly cacheSalt: string;
  /** Place among the waiting requests of its tenant, lower is earlier, as engines have it. */
  readonly priority: number;
  /** Why the request cannot be handed over; empty for requests that can. See {@link LOCAL_REASONS}. */
  readonly localReasons: readonly LocalReason[];
  /** Members through which a client would steer hand-overs itself. */
  readonly refused: readonly string[];
}

/**
 * Requests whose hand-over would be wrong, not just slow: one handle covers one sequence (n, several prompts, beams),
 * and prompt log-probabilities make D compute the prompt again anyway.
 */
export const LOCAL_REASONS = [
  'n',
  'beam_search',
  'multi_prompt',
  'echo_logprobs',
  'prompt_logprobs',
  'prompt_embeds',
] as const;
export type LocalReason = (typeof LOCAL_REASONS)[number];

/** Members that baton consumes; no engine sees them. */
export const CONSUMED_MEMBERS: readonly string[] = ['conversation_id'];

/** Members that a client may not send: they can crash or hang an engine, or aim it at a foreign host. */
export const REFUSED_MEMBERS: readonly string[] = ['kv_transfer_params', 'ec_transfer_params'];

type Scan = Extract<ObjectScan, { readonly kind: 'object' }>;

/** Reads the facts from a scanned body; `conversationId` is the caller's, as a header may name it (default none). */
export function readFacts(api: Api, body: Uint8Array, scan: Scan, conversationId = ''): BodyFacts {
  const reader = new Reader(body, scan);
  const localReasons: LocalReason[] = [];
  // Engines coerce ("2", 2.0 and true are ints to pydantic), so anything but a plain 1 is taken for several.
  if (!reader.isAbsent('n') && reader.text('n') !== '1') localReasons.push('n');
  if (reader.isTruthy('use_beam_search')) localReasons.push('beam_search');
  if (!reader.isAbsent('prompt_logprobs')) localReasons.push('prompt_logprobs');
  if (api === 'completions') {
    if (reader.hasSeveralPrompts()) localReasons.push('multi_prompt');
    if (!reader.isAbsent('prompt_embeds')) localReasons.push('prompt_embeds');
  }
  if (reader.isTruthy('echo') && reader.wantsLogprobs(api)) localReasons.push('echo_logprobs');
  return {
    model: reader.string('model'),
    stream: reader.isTruthy('stream'),
    conversationId,
    returnTokenIds: reader.isTruthy('return_token_ids'),
    continues: api === 'chat.completions' && hasAssistantMessage(body, scan),
    cacheSalt: reader.string('cache_salt'),
    priority: reader.int32('priority'),
    localReasons,
    refused: REFUSED_MEMBERS.filter((key) => !reader.isAbsent(key)),
  };
}

class Reader {
  readonly #body: Uint8Array;
  readonly #scan: Scan;

  constructor(body: Uint8Array, scan: Scan) {
    this.#body = body;
    this.#scan = scan;
  }

  isAbsent(key: string): boolean {
    const member = findMember(this.#scan, key);
    return member === undefined || member.type === 'null';
  }

  string(key: string): string {
    const member = findMember(this.#scan, key);
    return member?.type === 'string' ? decodeString(this.#body, member) : '';
  }

  /** A whole number of 32 bits; 0 for anything else. */
  int32(key: string): number {
    const member = findMember(this.#scan, key);
    const value = member?.type === 'number' ? Number(ascii(this.#body, member)) : 0;
    return Number.isInteger(value) && Math.abs(value) < 2 ** 31 ? value : 0;
  }

  text(key: string): string {
    const member = findMember(this.#scan, key);
    return member === undefined ? '' : ascii(this.#body, member);
  }

  /** Truth as pydantic's lax mode sees it: true, 1, "true", "on", "yes" … */
  isTruthy(key: string): boolean {
    const member = findMember(this.#scan, key);
    switch (member?.type) {
      case undefined:
      case 'null':
      case 'false':
        return false;
      case 'number':
        return Number(ascii(this.#body, member)) !== 0;
      case 'string':
        return !['', '0', 'false', 'f', 'no', 'n', 'off'].includes(decodeString(this.#body, member).toLowerCase());
      default:
        return true;
    }
  }

  /** For completions a count, of which 0 and what coerces to it still asks; for chat a flag with a count beside it. */
  wantsLogprobs(api: Api): boolean {
    if (api === 'completions') return !this.isAbsent('logprobs');
    return this.isTruthy('logprobs') || !this.isAbsent('top_logprobs');
  }

  /** True for several prompts and for what the engine will refuse; one prompt in a list is still one prompt. */
  hasSeveralPrompts(): boolean {
    const prompt = findMember(this.#scan, 'prompt');
    if (prompt?.type !== 'array') return false;
    const first = firstElementType(this.#body, prompt);
    if (first === 'number') return false;
    return scanArray(this.#body, prompt.valueStart, prompt.valueEnd)?.length !== 1;
  }
}

/** A prompt of token ids may hold a hundred thousand numbers: its first byte tells enough. */
function firstElementType(body: Uint8Array, array: Member): 'number' | 'other' {
  for (let i = array.valueStart + 1; i < array.valueEnd; i++) {
    const byte = body[i] ?? 0;
    if (byte === 0x20 || byte === 0x09 || byte === 0x0a || byte === 0x0d) continue;
    return byte === 0x2d || (byte >= 0x30 && byte <= 0x39) ? 'number' : 'other';
  }
  return 'other';
}

function ascii(body: Uint8Array, member: Member): string {
  let text = '';
  for (let i = member.valueStart; i < Math.min(member.valueEnd, member.valueStart + 64); i++) {
    text += String.fromCharCode(body[i] ?? 0);
  }
  return text;
}
