import { decodeString, type Element, findMember, type ScannedObject, scanArray, scanObject } from './json-scan.ts';

/**
 * What a message has beside text: nothing; pictures, sound or video whose bytes are in it; or something else, a link for
 * example, of which nobody knows what the engine sees.
 */
export type MessageMedia = 'none' | 'inline' | 'other';

/** Of each message of a chat; undefined where `messages` is no list. */
export function mediaOfMessages(body: Uint8Array, scan: ScannedObject): readonly MessageMedia[] | undefined {
  const messages = findMember(scan, 'messages');
  if (messages?.type !== 'array') return undefined;
  return (scanArray(body, messages.valueStart, messages.valueEnd) ?? []).map((message) => mediaOf(body, message));
}

function mediaOf(body: Uint8Array, element: Element): MessageMedia {
  const message = objectAt(body, element);
  if (message === undefined) return 'other';
  const content = findMember(message, 'content');
  if (content === undefined || content.type === 'string' || content.type === 'null') return 'none';
  if (content.type !== 'array') return 'other';
  let media: MessageMedia = 'none';
  for (const part of scanArray(body, content.valueStart, content.valueEnd) ?? []) {
    const kind = mediaOfPart(body, part);
    if (kind === 'other') return 'other';
    if (kind === 'inline') media = 'inline';
  }
  return media;
}

function mediaOfPart(body: Uint8Array, element: Element): MessageMedia {
  if (element.type === 'string') return 'none';
  const part = objectAt(body, element);
  const type = part === undefined ? undefined : findMember(part, 'type');
  if (part === undefined || type?.type !== 'string') return 'other';
  const name = decodeString(body, type);
  if (name === 'text') return 'none';
  return isInline(body, part, name) ? 'inline' : 'other';
}

/** Parts that engines take a URL in, under a member of the same name. */
const BY_URL: ReadonlySet<string> = new Set(['image_url', 'video_url', 'audio_url']);
/** What may stand beside the URL. A `uuid` beside the part, for one, makes engines use what they know under it. */
const BESIDE_URL: ReadonlySet<string> = new Set(['url', 'detail']);

function isInline(body: Uint8Array, part: ScannedObject, type: string): boolean {
  if (!BY_URL.has(type) || !part.members.every(({ key }) => key === 'type' || key === type)) return false;
  const value = findMember(part, type);
  const object = value === undefined ? undefined : objectAt(body, value);
  if (object === undefined || !object.members.every(({ key }) => BESIDE_URL.has(key))) return false;
  const url = findMember(object, 'url');
  return url?.type === 'string' && DATA_URL.every((byte, i) => body[url.valueStart + i] === byte);
}

/** As it is written: a long value needs no decoding, and with escapes in these it counts as something else. */
const DATA_URL = new TextEncoder().encode('"data:');

function objectAt(body: Uint8Array, { type, valueStart, valueEnd }: Element): ScannedObject | undefined {
  if (type !== 'object') return undefined;
  const object = scanObject(body, valueStart, valueEnd);
  return object.kind === 'object' ? object : undefined;
}
