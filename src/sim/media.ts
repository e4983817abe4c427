import { badRequest } from './api-error.ts';
import { hashText } from './hash.ts';
import { isObject, type JsonObject } from './json.ts';

/** Digest of what a part of a message shows, by the URL of its picture. */
export type MediaDigests = ReadonlyMap<string, string>;

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

/** What the KV of a part that is no text follows from, beside its tokens. */
export function mediaDigest(part: JsonObject, digests: MediaDigests): string {
  const { a, b } = hashText(digests.get(mediaUrl(part) ?? '') ?? JSON.stringify(part));
  return `${a}.${b};`;
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
