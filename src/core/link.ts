import type { Api } from './facts.ts';
import {
  type HistoryHashes,
  hashHistory,
  hashPromptPrefixes,
  historyLookups,
  type IncrementalHash,
} from './history.ts';
import type { ScannedObject } from './json-scan.ts';
import { mediaOfMessages } from './media.ts';
import { isInTokens } from './prompt-members.ts';

/** How turns find the handles of earlier ones. */
export interface LinkRules {
  readonly guard: 'exact' | 'history' | 'off';
  /** Requests that name no conversation are linked by their history. */
  readonly autolink: boolean;
}

/** A request as far as its history goes, which may be megabytes of pictures: it is hashed once, when that is asked for. */
export class LinkedRequest {
  readonly api: Api;
  readonly body: Uint8Array;
  readonly scan: ScannedObject;
  readonly createHash: () => IncrementalHash;
  #hashes: { readonly of: HistoryHashes | undefined } | undefined;

  constructor(api: Api, body: Uint8Array, scan: ScannedObject, createHash: () => IncrementalHash) {
    this.api = api;
    this.body = body;
    this.scan = scan;
    this.createHash = createHash;
  }

  get history(): HistoryHashes | undefined {
    this.#hashes ??= { of: hashHistory(this.api, this.body, this.scan, this.createHash) };
    return this.#hashes.of;
  }
}

/** Where the handle of a request's turn is put, and where those of earlier turns are looked for. */
export interface TurnLink {
  /** Empty where the turn is in no conversation. */
  readonly conversationId: string;
  /** In order; empty: under `conversationId` alone. */
  readonly lookups: readonly string[];
  /** `conversationId` is made from the history: the next turn has another one. */
  readonly derived: boolean;
}

/** Where the handle of a prompt with media is put, and where those of earlier turns are looked for. */
export interface MediaLink {
  readonly conversationId: string;
  readonly lookups: readonly MediaLookup[];
}

/** A turn whose messages are the first of the request's, byte by byte. */
export interface MediaLookup {
  readonly conversationId: string;
  /** Messages with media come behind those: only a handle whose every token is proven is clear of them. */
  readonly moreMedia: boolean;
}

/**
 * Links a request that has media, all inline, by its history, whatever name it has: the token ids of a picture are the same
 * for every picture, so that here the bytes of the messages are part of the proof. Undefined where there is something else
 * among them than text and inline media, and where nothing is looked for.
 */
export function linkMedia(rules: LinkRules, named: string, request: LinkedRequest): MediaLink | undefined {
  const { api, body, scan, createHash } = request;
  if (rules.guard !== 'exact' || (named === '' && !rules.autolink) || api !== 'chat.completions') return undefined;
  const media = mediaOfMessages(body, scan);
  if (media === undefined || media.includes('other') || !media.includes('inline')) return undefined;
  const hashes = request.history;
  if (hashes === undefined) return undefined;
  const idOf = (hash: string) => derivedId(named === '' ? hash : hashWithin(named, hash, createHash));
  const last = media.lastIndexOf('inline');
  const lookups = historyLookups(hashes).map((hash) => ({
    conversationId: idOf(hash),
    moreMedia: (hashes.lengths.get(hash) ?? 0) <= last,
  }));
  return { conversationId: idOf(hashes.all), lookups };
}

/**
 * Links a request to earlier ones. What it is found by may be wrong: the guard compares tokens, so that a wrong link
 * costs a miss. Under the unsafe guards there is no such proof, and only named conversations are linked.
 */
export function linkTurn(rules: LinkRules, named: string, request: LinkedRequest): TurnLink {
  if (rules.guard === 'history' && named !== '') return byHistoryOf(named, request);
  if (named !== '' || !findsByHistory(rules)) {
    return { conversationId: named, lookups: [], derived: false };
  }
  const [own, lookups] = ownAndLookups(request);
  if (own === undefined) return UNLINKED;
  return { conversationId: derivedId(own), lookups: lookups.map(derivedId), derived: true };
}

/** Both links of a request whose prompt has these unproven members. */
export function linkRequest(
  rules: LinkRules,
  named: string,
  request: LinkedRequest,
  unproven: readonly string[],
): { readonly link: TurnLink; readonly media?: MediaLink } {
  const link = linkTurn(rules, named, request);
  const media = isInTokens(unproven) ? undefined : linkMedia(rules, named, request);
  return { link, ...(media === undefined ? {} : { media }) };
}

/** Whether requests that name no conversation are linked. */
export function findsByHistory({ guard, autolink }: LinkRules): boolean {
  return guard === 'exact' && autolink;
}

const UNLINKED: TurnLink = { conversationId: '', lookups: [], derived: false };

function derivedId(hash: string): string {
  return `history:${hash}`;
}

/** The hash of a history in one conversation only. */
function hashWithin(named: string, hash: string, createHash: () => IncrementalHash): string {
  const both = createHash();
  both.update(new TextEncoder().encode(`${named}\n${hash}`));
  return both.digest('hex');
}

function ownAndLookups(request: LinkedRequest): readonly [own: string | undefined, lookups: readonly string[]] {
  const { api, body, scan, createHash } = request;
  if (api === 'completions') {
    const hashes = hashPromptPrefixes(body, scan, createHash);
    return [hashes[0], hashes];
  }
  const hashes = request.history;
  return hashes === undefined ? [undefined, []] : [hashes.all, historyLookups(hashes)];
}

/**
 * Under the unsafe `history` guard a turn is found only by the history it continues: it is stored under its conversation
 * and the hash of its messages, and looked for under those before the last assistant message.
 */
function byHistoryOf(named: string, request: LinkedRequest): TurnLink {
  const hashes = request.history;
  if (hashes === undefined) return UNLINKED;
  const name = (hash: string) => hashWithin(named, hash, request.createHash);
  const { all, beforeAssistant } = hashes;
  // A turn without an earlier one has nothing to look for: an id that no turn is stored under.
  const lookup = beforeAssistant === undefined ? `${name(all)}-first` : name(beforeAssistant);
  return { conversationId: name(all), lookups: [lookup], derived: false };
}
