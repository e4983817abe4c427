import { badRequest } from './api-error.ts';
import { foldInto, hashText } from './hash.ts';
import { isObject, type JsonObject } from './json.ts';

/** What the links of a request lead to, by URL. */
export type MediaDigests = ReadonlyMap<string, string>;

/** What stands where a prompt has the tokens of pictures, by place: equal tokens of two pictures have another KV. */
export type MediaContents = ReadonlyMap<number, number>;

const FETCH_MS = 5000;

/**
 * Fetches the pictures that messages link to, as the engine's front end does for each request: what a link leads to may be
 * another picture the next time, under the same tokens. Inline ones are their own content. Throws the engine's 400.
 */
export async function loadMedia(messages: unknown, signal: AbortSignal): Promise<MediaDigests> {
  const links = new Set(partsOf(messages).map(mediaUrl));
  const digests = new Map<string, string>();
  for (const url of links) {
    if (url !== undefined && /^https?:/.test(url)) digests.set(url, await fetchDigest(url, signal));
  }
  return digests;
}

/** What KV at each of a picture's `count` places is computed from: never the id of a token, nor {@link emptySlot}. */
export function mediaContents(part: JsonObject, digests: MediaDigests, count: number): readonly number[] {
  const state = hashText(digests.get(mediaUrl(part) ?? '') ?? JSON.stringify(part));
  return Array.from({ length: count }, () => {
    foldInto(state, count);
    return -2 - (state.b >>> 2);
  });
}

function partsOf(messages: unknown): readonly JsonObject[] {
  if (!Array.isArray(messages)) return [];
  return messages.flatMap((message: unknown) => {
    const content = isObject(message) ? message['content'] : undefined;
    return Array.isArray(content) ? content.filter(isObject) : [];
  });
}

function mediaUrl(part: JsonObject): string | undefined {
  const image = part['image_url'];
  const url = isObject(image) ? image['url'] : image;
  return typeof url === 'string' ? url : undefined;
}

async function fetchDigest(url: string, signal: AbortSignal): Promise<string> {
  try {
    const reply = await fetch(url, { signal: AbortSignal.any([signal, AbortSignal.timeout(FETCH_MS)]) });
    if (!reply.ok) throw new Error(String(reply.status));
    return `${reply.headers.get('content-type')} ${Buffer.from(await reply.arrayBuffer()).toString('base64')}`;
  } catch (error) {
    throw badRequest(`Failed to load the image: ${error instanceof Error ? error.message : ''}`, 'image_url');
  }
}
