import { decodeString, findMember, type Member, type ObjectScan, type ScannedObject, scanObject } from './json-scan.ts';

/** Largest name that is part of a key (model, salt, conversation), in bytes of UTF-8: the limit of the contracts. */
export const MAX_NAME_BYTES = 512;

/**
 * What a request's object may have itself; vLLM's request models have about a hundred members. Everything that reads a
 * body or tells the router of it costs time and bytes for each of them.
 */
const BODY_LIMITS = { members: 1000, nameBytes: 1024 };

/** Members that become part of keys. */
const KEY_MEMBERS: readonly string[] = ['model', 'cache_salt'];

/** A member that is at fault, and a sentence for the client. */
interface BodyFault {
  readonly param: string;
  readonly message: string;
}

/** Scans a request body: as {@link scanObject}, and over the limit at the first member that is one too many or too long. */
export function scanBody(body: Uint8Array): ObjectScan {
  return scanObject(body, 0, body.length, BODY_LIMITS);
}

/** The first member that no key can hold; undefined where there is none. */
export function findBodyFault(body: Uint8Array, scan: ScannedObject): BodyFault | undefined {
  for (const param of KEY_MEMBERS) {
    const member = findMember(scan, param);
    if (member?.type !== 'string') continue;
    if (isLong(body, member)) return { param, message: `\`${param}\` must be at most ${MAX_NAME_BYTES} bytes long.` };
    // Half a character has no UTF-8 form: two salts that differ would become one. No engine has such a model.
    if (param === 'cache_salt' && !decodeString(body, member).isWellFormed()) {
      return { param, message: `\`${param}\` must not hold half characters.` };
    }
  }
  return undefined;
}

const ENCODER = new TextEncoder();

/** Whether a text is longer than a name may be. */
export function isLongName(text: string): boolean {
  return text.length > MAX_NAME_BYTES || ENCODER.encode(text).length > MAX_NAME_BYTES;
}

/** An escape has at most six bytes for one of its text, so that a very long value needs no decoding. */
function isLong(body: Uint8Array, member: Member): boolean {
  return member.valueEnd - member.valueStart > 6 * MAX_NAME_BYTES + 2 || isLongName(decodeString(body, member));
}
