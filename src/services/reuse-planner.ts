import { randomUUID } from 'node:crypto';
import { create } from '@bufbuild/protobuf';
import { type Instance, InstanceState } from '../../gen/baton/v1/instance_pb.ts';
import {
  type Entry,
  type EntryKey,
  MissReason,
  TakeEntryRequestSchema,
  type TakenEntry,
  TokenIdsSchema,
} from '../../gen/baton/v1/kv_cache_store_pb.ts';
import type { KvTransferParams } from '../../gen/baton/v1/kv_transfer_pb.ts';
import {
  type PrefillHandle,
  PrefillHandleSchema,
  type RequestFacts,
  ReuseOutcome,
} from '../../gen/baton/v1/router_pb.ts';
import type { PromptTokens } from '../../gen/baton/v1/tokens_pb.ts';
import { type ProvablePrompt, promptOfIds } from '../core/chain.ts';
import { compatGroup, keepsWeights } from '../core/compat.ts';
import { checkHandle } from '../core/handle-check.ts';
import { cutHandle } from '../core/handle-edit.ts';
import { isProvable, PROVEN_VERSIONS } from '../core/prompt-members.ts';
import { type RemoteHostRule, usableRemoteHost } from '../core/remote-host.ts';
import type { Admission, BidirectionalTrials } from './bidirectional-trials.ts';
import type { CachedPrefixes } from './cached-prefixes.ts';
import { adapterOf, entryKeyOf, handlePlaces, keyModel, mayBeFirst } from './conversation-keys.ts';
import type { ConversationMemory } from './conversation-memory.ts';
import { toDuration } from './durations.ts';
import type { HandleClaims } from './handle-claims.ts';
import { isSameLife } from './instance-record.ts';
import type { InstanceView } from './instance-view.ts';
import { sha256 } from './sha256.ts';

/** How it is proven that stored KV belongs to a prompt; `history` and `off` are unsafe. */
export type GuardMode = 'exact' | 'history' | 'off';

/** Settings of {@link ReusePlanner}; times in milliseconds. */
export interface ReuseSettings {
  readonly guard: GuardMode;
  readonly prefillWarmMs: number;
  readonly prefillWarmPerTokenMs: number;
  readonly remoteHost: RemoteHostRule;
  /** A handle is used from so many tokens on that the prefill engine likely does not hold itself; 0: always. */
  readonly minSavedTokens: number;
  /** With so few tokens that the last decode engine does not hold it computes them itself; 0: never. */
  readonly localTailTokens: number;
}

/** What planning wants to know about earlier turns. */
export interface ReuseRequest {
  readonly facts: RequestFacts;
  /** Unset on the first call of a planning. */
  readonly prompt: PromptTokens | undefined;
  /** Prefill instances that could take the leg, best first, where the turn stays near this decode instance. */
  readonly prefillFor: (decodeId: string) => readonly Instance[];
  readonly signal: AbortSignal;
}

/** The answer: a handle, a question, or neither. */
export type ReuseStep =
  | {
      readonly kind: 'hit';
      readonly outcome: ReuseOutcome;
      readonly handle: PrefillHandle;
      /** The first of them is to be asked first; only they may get the handle. */
      readonly prefill: readonly Instance[];
      readonly ownerId: string;
      /** Claims the prefill instance's trial, if this leg is one. */
      readonly admission: Admission;
    }
  /** Of any of these instances, the first one best. */
  | { readonly kind: 'need-tokens'; readonly instances: readonly Instance[]; readonly ownerId: string }
  /** The decode instance is to compute the little that it does not hold; the stored handle stays. */
  | { readonly kind: 'local'; readonly ownerId: string }
  | {
      readonly kind: 'cold';
      readonly outcome: ReuseOutcome;
      /** Decode instance that holds the conversation's history, if one is known. */
      readonly ownerId: string | undefined;
    };

/** The prompt as it is compared with what engines hold. */
type Proof = () => ProvablePrompt;

/** Where an entry is to be taken from. */
interface Place {
  readonly key: EntryKey;
  readonly wholeOnly: boolean;
}

type Cold = Extract<ReuseStep, { kind: 'cold' }>;

/** Nothing is kept under a key any more, or never was. */
interface Absent {
  readonly kind: 'absent';
  readonly outcome: ReuseOutcome;
}

/** Engines that a prompt's tokens are asked of at most. */
const MAX_TOKENIZERS = 3;
/** Least number of equal tokens that an engine pulls at all (`kv_recompute_threshold`). */
const MIN_TOKENS = 64;
/** Limit for the first leg with a handle of an instance that may hang on it. */
const TRIAL_MS = 30_000;
/** A claim outlives the leg that uses it by this much, so that its end can be reported. */
const CLAIM_SLACK_MS = 30_000;
const MAX_CLAIM_MS = 3_600_000;

const MISS_OUTCOMES: Readonly<Record<number, ReuseOutcome>> = {
  [MissReason.EXPIRED]: ReuseOutcome.MISS_EXPIRED,
  [MissReason.TAKEN]: ReuseOutcome.MISS_TAKEN,
  [MissReason.RELEASED]: ReuseOutcome.MISS_RELEASED,
  [MissReason.PREFIX_MISMATCH]: ReuseOutcome.MISS_MISMATCH,
  [MissReason.OWNER_GONE]: ReuseOutcome.MISS_OWNER_GONE,
  [MissReason.TOO_SMALL]: ReuseOutcome.MISS_TOO_SMALL,
  [MissReason.STORE_EPOCH]: ReuseOutcome.MISS_STORE_EPOCH,
  [MissReason.DISABLED]: ReuseOutcome.MISS_DISABLED,
};

/**
 * Decides whether a turn may read the blocks of an earlier one: looks at the store, asks for the prompt's tokens only if
 * there is something to compare them with, and takes an entry only for an instance that can read it.
 */
export class ReusePlanner {
  readonly #claims: HandleClaims;
  readonly #view: InstanceView;
  readonly #trials: BidirectionalTrials;
  readonly #memory: ConversationMemory;
  readonly #cached: CachedPrefixes;
  readonly #settings: ReuseSettings;

  constructor(
    claims: HandleClaims,
    view: InstanceView,
    trials: BidirectionalTrials,
    memory: ConversationMemory,
    cached: CachedPrefixes,
    settings: ReuseSettings,
  ) {
    this.#claims = claims;
    this.#view = view;
    this.#trials = trials;
    this.#memory = memory;
    this.#cached = cached;
    this.#settings = settings;
  }

  async plan(request: ReuseRequest): Promise<ReuseStep> {
    const step = await this.#planUnderAll(request);
    // An equal prompt may be anybody's first: that nothing helps it is no miss, and binds it to no instance.
    return step.kind === 'cold' && mayBeFirst(request.facts) ? cold(ReuseOutcome.UNSPECIFIED) : step;
  }

  async #planUnderAll(request: ReuseRequest): Promise<ReuseStep> {
    const { facts, prompt } = request;
    const adapter = adapterOf(this.#view.snapshot(), facts);
    const seed = { ...facts, model: keyModel(facts.model), adapter };
    const proof = lazily(() => promptOfIds(prompt?.tokenIds ?? [], seed, sha256));
    let useless: Cold | undefined;
    let absent: ReuseOutcome = ReuseOutcome.MISS_NEVER;
    for (const { conversationId, wholeOnly } of handlePlaces(facts)) {
      const key = entryKeyOf(facts, adapter, conversationId);
      const step = await this.#planUnder(key, request, proof, wholeOnly);
      if (step.kind === 'absent') {
        if (absent === ReuseOutcome.MISS_NEVER) absent = step.outcome;
      } else if (step.kind === 'cold' && step.outcome !== ReuseOutcome.MISS_STORE_UNAVAILABLE) {
        useless ??= step;
      } else {
        return step;
      }
    }
    if (useless !== undefined) return useless;
    const remembered = this.#memory.get(facts);
    const ownerId = remembered?.decodeId;
    // The last turn is the one to be continued: what became of earlier ones says nothing where it left no handle.
    if (remembered?.noHandle !== undefined) return cold(remembered.noHandle, ownerId);
    if (absent !== ReuseOutcome.MISS_NEVER) return cold(absent, ownerId);
    // What the last turn left is kept for its very messages, pictures and all, and these are others.
    if (remembered !== undefined && (remembered.hasMedia === true || facts.media !== undefined)) {
      return cold(isProven(facts) ? ReuseOutcome.MISS_MISMATCH : ReuseOutcome.MISS_UNSUPPORTED, ownerId);
    }
    return cold(facts.continues ? ReuseOutcome.MISS_NEVER : ReuseOutcome.UNSPECIFIED, ownerId);
  }

  /** Looks under one key; what is found may be of no use, and others may be there under the next. */
  async #planUnder(
    key: EntryKey,
    request: ReuseRequest,
    proof: Proof,
    wholeOnly: boolean,
  ): Promise<ReuseStep | Absent> {
    const { facts, prompt } = request;
    const look = await this.#claims.peek(key, request.signal);
    if (look === undefined) return cold(ReuseOutcome.MISS_STORE_UNAVAILABLE);
    if (look.entries.length === 0) {
      const reason = look.miss?.reason ?? MissReason.NEVER_STORED;
      return { kind: 'absent', outcome: MISS_OUTCOMES[reason] ?? ReuseOutcome.MISS_NEVER };
    }
    const chosen = this.#chooseReaders(request, look.entries, key.adapter);
    if (chosen.kind === 'cold') return chosen;
    const { readers, ownerId } = chosen;
    if (this.#settings.guard === 'exact') {
      if (!isProven(facts)) return cold(ReuseOutcome.MISS_UNSUPPORTED, ownerId);
      // Equal short prompts come again and again: what cannot become a hit is not worth the question for their tokens.
      const isShort = look.entries.every(({ cachedTokens }) => cachedTokens < MIN_TOKENS);
      if (isShort && mayBeFirst(facts)) return cold(ReuseOutcome.MISS_TOO_SMALL, ownerId);
      if (prompt === undefined) return { kind: 'need-tokens', instances: this.#tokenizers(readers, ownerId), ownerId };
      if (prompt.tokenIds.length === 0) return cold(ReuseOutcome.MISS_UNVERIFIABLE, ownerId);
      if (this.#isTailShort(prompt.tokenIds.length, proof, ownerId)) return { kind: 'local', ownerId };
    }
    return this.#take(request, { key, wholeOnly }, proof, readers, ownerId);
  }

  #isTailShort(promptTokens: number, proof: Proof, ownerId: string): boolean {
    const { localTailTokens } = this.#settings;
    const owner = this.#view.snapshot().find(({ id }) => id === ownerId);
    if (localTailTokens === 0 || owner === undefined) return false;
    return promptTokens - this.#cached.held(owner, proof()) <= localTailTokens;
  }

  /** Equal tokens from which on a transfer saves the reader enough. */
  #leastTokens(reader: Instance, proof: Proof): number {
    const { minSavedTokens } = this.#settings;
    if (minSavedTokens === 0) return MIN_TOKENS;
    return Math.max(MIN_TOKENS, this.#cached.held(reader, proof()) + minSavedTokens);
  }

  /** The prefill instances that can read from a living owner of the entries. */
  #chooseReaders(
    request: ReuseRequest,
    entries: readonly Entry[],
    adapter: string,
  ): { readonly kind: 'readers'; readonly readers: readonly Instance[]; readonly ownerId: string } | Cold {
    let reason: ReuseOutcome = ReuseOutcome.MISS_OWNER_GONE;
    for (const entry of entries) {
      const owner = this.#livingOwner(entry);
      if (owner === undefined) continue;
      const group = entry.owner?.compatGroup ?? '';
      if (this.#settings.guard === 'exact' && (group === '' || !PROVEN_VERSIONS.test(owner.engine?.version ?? ''))) {
        reason = ReuseOutcome.MISS_UNVERIFIABLE;
        continue;
      }
      if (!keepsWeights(owner, adapter)) {
        reason = ReuseOutcome.MISS_UNSUPPORTED;
        continue;
      }
      reason = ReuseOutcome.MISS_DISABLED;
      const readers = request
        .prefillFor(owner.id)
        .filter(
          (prefill) =>
            compatGroup(prefill) === group &&
            keepsWeights(prefill, adapter) &&
            !isSameProcess(prefill, owner) &&
            this.#trials.mayAdmit(prefill, owner.id),
        );
      if (readers.length > 0) return { kind: 'readers', readers, ownerId: owner.id };
    }
    return cold(reason, entries[0]?.owner?.instanceId);
  }

  /** Instances of one compat group, so of one tokenizer: the readers, and the owner where there are few of them. */
  #tokenizers(readers: readonly Instance[], ownerId: string): readonly Instance[] {
    const owner = this.#view.snapshot().filter(({ id, state }) => id === ownerId && state === InstanceState.READY);
    return [...readers, ...owner].slice(0, MAX_TOKENIZERS);
  }

  #livingOwner(entry: Entry): Instance | undefined {
    const { instanceId = '', incarnation } = entry.owner ?? {};
    const owner = this.#view.snapshot().find(({ id }) => id === instanceId);
    if (owner?.incarnation === undefined || incarnation === undefined) return undefined;
    // A draining instance may still be read; a suspect one would only make the prefill leg fail.
    const readable = owner.state === InstanceState.READY || owner.state === InstanceState.DRAINING;
    return readable && isSameLife(owner.incarnation, incarnation) ? owner : undefined;
  }

  async #take(
    request: ReuseRequest,
    place: Place,
    proof: Proof,
    readers: readonly Instance[],
    ownerId: string,
  ): Promise<ReuseStep> {
    const { guard } = this.#settings;
    const [reader] = readers;
    if (reader === undefined) return cold(ReuseOutcome.MISS_DISABLED, ownerId);
    // Opened before the take: a second trial at the same moment must not cost an entry.
    const admission = this.#trials.admit(reader, ownerId);
    if (admission === 'no') return cold(ReuseOutcome.MISS_DISABLED, ownerId);
    const step = await this.#claim(request, place, proof, reader, ownerId, admission);
    if (step.kind !== 'hit') {
      if (admission === 'trial') this.#trials.settle(reader, ownerId, 'other');
      return step;
    }
    // While the reader is on trial no other instance gets the handle in its place, and none that would need a trial ever.
    const others =
      admission === 'trial' || guard !== 'exact'
        ? []
        : readers.slice(1).filter((other) => this.#trials.isProven(other, step.ownerId));
    const prefill = [reader, ...others];
    step.handle.instanceIds = prefill.map(({ id }) => id);
    return { ...step, prefill };
  }

  async #claim(
    request: ReuseRequest,
    { key, wholeOnly }: Place,
    proof: Proof,
    reader: Instance,
    ownerId: string,
    admission: Admission,
  ): Promise<ReuseStep> {
    const { guard, prefillWarmMs } = this.#settings;
    const tokenIds = guard === 'exact' ? (request.prompt?.tokenIds ?? []) : [];
    const longestMs = this.#deadlineMs(tokenIds.length, admission);
    const claimMs = longestMs === 0 ? MAX_CLAIM_MS : Math.min(MAX_CLAIM_MS, longestMs + CLAIM_SLACK_MS + prefillWarmMs);
    const message = create(TakeEntryRequestSchema, {
      // Not the plan's: a repeat of the planning elsewhere must not get a claim that this one may give back.
      idempotencyKey: randomUUID(),
      key,
      // Without a proof the number of tokens is what the engine said, and may be unknown.
      minTokens: guard === 'exact' ? this.#leastTokens(reader, proof) : 1,
      // What is found by a history may be somebody else's; and what this reader has no need of another may use.
      keepTokens: request.facts.derivedConversation ? 0 : MIN_TOKENS,
      compatGroup: compatGroup(reader),
      claimDeadline: toDuration(claimMs),
      allowUnverified: guard !== 'exact',
    });
    if (guard === 'exact') message.prompt = { case: 'tokenIds', value: create(TokenIdsSchema, { tokenIds }) };
    const answer = await this.#claims.take(message, request.signal);
    if (answer === undefined) return cold(ReuseOutcome.MISS_STORE_UNAVAILABLE, ownerId);
    if (answer.result.case !== 'taken') {
      const { reason = MissReason.NEVER_STORED, matchedTokens = 0 } = answer.result.value ?? {};
      if (reason === MissReason.PREFIX_MISMATCH && matchedTokens >= MIN_TOKENS) {
        return cold(ReuseOutcome.MISS_TOO_SMALL, ownerId);
      }
      return cold(MISS_OUTCOMES[reason] ?? ReuseOutcome.MISS_NEVER, ownerId);
    }
    const { value: taken } = answer.result;
    if (wholeOnly && taken.matchedTokens < (taken.entry?.storedTokens ?? 0)) {
      this.#claims.release(taken.claimId, 'not_sent');
      return cold(ReuseOutcome.MISS_MISMATCH, ownerId);
    }
    return this.#useTaken(taken, reader, tokenIds.length, admission);
  }

  async #useTaken(taken: TakenEntry, reader: Instance, promptTokens: number, admission: Admission): Promise<ReuseStep> {
    const { entry, handle, matchedTokens, claimId } = taken;
    const owner = entry === undefined ? undefined : this.#livingOwner(entry);
    if (entry === undefined || handle === undefined || owner === undefined) {
      this.#claims.commit(claimId);
      return cold(ReuseOutcome.MISS_OWNER_GONE);
    }
    // The entry that matches best may be another owner's than the one that the reader was chosen for.
    if (isSameProcess(reader, owner) || this.#trials.isBarred(reader, owner.id)) {
      this.#claims.release(claimId, 'not_sent');
      return cold(ReuseOutcome.MISS_DISABLED, owner.id);
    }
    const exact = this.#settings.guard === 'exact';
    const whole = !exact || matchedTokens >= entry.storedTokens;
    const usable = whole ? handle : cutHandle(handle, matchedTokens, entry.engineBlockSize);
    const params = usable === undefined ? undefined : this.#checked(usable, entry, owner, reader);
    if (params === undefined) {
      // Never sent, not even as a release: the owner's own limit frees the blocks.
      this.#claims.commit(claimId);
      return cold(ReuseOutcome.MISS_NO_HANDLE, owner.id);
    }
    const prefillHandle = create(PrefillHandleSchema, {
      params,
      claimId,
      entryId: entry.entryId,
      matchedTokens: exact ? matchedTokens : entry.storedTokens,
      storedTokens: entry.storedTokens,
      cut: !whole,
      deadline: toDuration(this.#deadlineMs(promptTokens - matchedTokens, admission)),
      ...(entry.age === undefined ? {} : { age: entry.age }),
    });
    const outcome = whole ? ReuseOutcome.HIT : ReuseOutcome.HIT_CUT;
    return { kind: 'hit', outcome, handle: prefillHandle, prefill: [reader], ownerId: owner.id, admission };
  }

  /** The last look before a handle leaves: a malformed one would kill or hang the engine that gets it. */
  #checked(params: KvTransferParams, entry: Entry, owner: Instance, reader: Instance): KvTransferParams | undefined {
    const blockSize = entry.engineBlockSize;
    const readerBlocks = reader.engine?.blockSize ?? 0;
    if (readerBlocks > 0 && blockSize > 0 && readerBlocks !== blockSize) return undefined;
    const check = checkHandle(params, { flag: 'do_remote_decode', blockSize });
    if (!check.ok) return undefined;
    if (this.#settings.guard === 'exact' && (check.numTokens === undefined || blockSize === 0)) return undefined;
    const host = usableRemoteHost(params.remoteHost ?? '', this.#settings.remoteHost, owner.url, reader.url);
    if (host === undefined) return undefined;
    return host === params.remoteHost ? params : { ...params, remoteHost: host };
  }

  #deadlineMs(uncachedTokens: number, admission: Admission): number {
    const { prefillWarmMs, prefillWarmPerTokenMs } = this.#settings;
    const warm = prefillWarmMs === 0 ? 0 : prefillWarmMs + Math.max(0, uncachedTokens) * prefillWarmPerTokenMs;
    if (admission !== 'trial') return warm;
    return warm === 0 ? TRIAL_MS : Math.min(warm, TRIAL_MS);
  }
}

/** Made when it is first needed, and then the same: not every plan compares, and each hash is made once. */
function lazily<T extends object>(make: () => T): () => T {
  let made: T | undefined;
  return () => {
    made ??= make();
    return made;
  };
}

/** An engine that got another id is in the pool under both for a while, and does not read from itself. */
function isSameProcess(a: Instance, b: Instance): boolean {
  return a.url === b.url;
}

function isProven({ unprovenMembers, media }: RequestFacts): boolean {
  return isProvable(unprovenMembers, media !== undefined);
}

function cold(outcome: ReuseOutcome, ownerId?: string): Cold {
  return { kind: 'cold', outcome, ownerId };
}
