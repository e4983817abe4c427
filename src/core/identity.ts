import { isLongName, MAX_NAME_BYTES } from './body-limits.ts';
import { decodeString, findMember, type Member, type ScannedObject, scanObject } from './json-scan.ts';

/** The conversation a client names; `invalid` only for baton's own member `conversation_id`. */
export type Identity =
  | { readonly kind: 'named'; readonly conversationId: string }
  | { readonly kind: 'none' }
  | { readonly kind: 'invalid'; readonly message: string };

type Headers = Readonly<Record<string, string | readonly string[] | undefined>>;

/**
 * Reads the conversation a client names: the first usable one of the headers in `headerNames` (lower case, as Node has
 * them), then of the body's `conversation_id`, `session_id`, `vllm_xargs.session_id` and `prompt_cache_key`.
 *
 * An id is taken whole or not at all: two that differ are never made equal.
 */
export function readIdentity(
  headerNames: readonly string[],
  headers: Headers,
  body: Uint8Array,
  scan: ScannedObject,
): Identity {
  const own = readOwn(body, findMember(scan, 'conversation_id'));
  if (own.kind === 'invalid') return own;
  for (const name of headerNames) {
    const id = headerText(headers[name]);
    if (id !== undefined && isUsable(id)) return { kind: 'named', conversationId: id };
  }
  if (own.kind === 'named') return own;
  const xargs = findMember(scan, 'vllm_xargs');
  for (const read of [
    () => findMember(scan, 'session_id'),
    () => (xargs?.type === 'object' ? memberIn(body, xargs, 'session_id') : undefined),
    () => findMember(scan, 'prompt_cache_key'),
  ]) {
    const member = read();
    if (member?.type !== 'string') continue;
    const id = decodeString(body, member);
    if (isUsable(id)) return { kind: 'named', conversationId: id };
  }
  return { kind: 'none' };
}

function readOwn(body: Uint8Array, member: Member | undefined): Identity {
  if (member === undefined || member.type === 'null') return { kind: 'none' };
  if (member.type !== 'string') return { kind: 'invalid', message: '`conversation_id` must be a string.' };
  const id = decodeString(body, member);
  if (id === '') return { kind: 'none' };
  if (isLongName(id)) {
    return { kind: 'invalid', message: `\`conversation_id\` must be at most ${MAX_NAME_BYTES} bytes long.` };
  }
  if (!isUsable(id)) {
    return { kind: 'invalid', message: '`conversation_id` must not hold control characters or half characters.' };
  }
  return { kind: 'named', conversationId: id };
}

function memberIn(body: Uint8Array, object: Member, key: string): Member | undefined {
  const scan = scanObject(body, object.valueStart, object.valueEnd);
  return scan.kind === 'object' ? findMember(scan, key) : undefined;
}

// Control characters break logs and listings; a lone surrogate has no UTF-8 form, all would become the same character.
const UNUSABLE = /\p{Cc}|\p{Cs}/u;

function isUsable(id: string): boolean {
  return id !== '' && !isLongName(id) && !UNUSABLE.test(id);
}

/** Node gives each byte of a header as one character; the same id in header and body must be the same text. */
function headerText(value: string | readonly string[] | undefined): string | undefined {
  if (typeof value !== 'string') return undefined;
  if (!/[\x80-\xff]/.test(value)) return value;
  try {
    return new TextDecoder('utf-8', { fatal: true, ignoreBOM: true }).decode(
      Uint8Array.from(value, (character) => character.charCodeAt(0)),
    );
  } catch {
    return undefined;
  }
}
