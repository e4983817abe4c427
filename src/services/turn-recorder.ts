import { randomUUID } from 'node:crypto';
import { create } from '@bufbuild/protobuf';
import type { Client } from '@connectrpc/connect';
import { IncarnationSchema, type Instance } from '../../gen/baton/v1/instance_pb.ts';
import { EntryOwnerSchema, type KVCacheStore, PutEntryRequestSchema } from '../../gen/baton/v1/kv_cache_store_pb.ts';
import { type ReportOutcomeRequest, type RequestFacts, ReuseOutcome } from '../../gen/baton/v1/router_pb.ts';
import { compatGroup, keepsWeights } from '../core/compat.ts';
import { checkHandle } from '../core/handle-check.ts';
import { isInTokens, isProvable } from '../core/prompt-members.ts';
import type { CachedPrefixes } from './cached-prefixes.ts';
import { adapterOf, entryKeyOf, handleHome } from './conversation-keys.ts';
import type { ConversationMemory } from './conversation-memory.ts';
import { toDuration, toMs } from './durations.ts';
import type { HandleHabits } from './handle-habits.ts';
import type { InstanceView } from './instance-view.ts';
import type { GuardMode } from './reuse-planner.ts';

/** A finished turn, as the router knows it. */
export interface FinishedTurn {
  readonly planId: string;
  readonly facts: RequestFacts;
  readonly connector: string;
  readonly prefillId: string | undefined;
  /** That instance, if it is still there. */
  readonly prefill: Instance | undefined;
  /** The decode instance whose reply the client got, as it was when the leg was planned. */
  readonly decode: Instance;
  readonly report: ReportOutcomeRequest;
  /** The reply was whole and a hand-over. */
  readonly handedOver: boolean;
  /** The decode engine streamed its reply. */
  readonly streamed: boolean;
  /** The turn had itself been given a handle. */
  readonly afterHit: boolean;
}

/** What became of a turn's handle, for counters. */
export type HandleFate = 'stored' | 'released' | 'malformed' | 'none' | 'store_unavailable';

/** The owner frees its blocks this much later than the store forgets them. */
const TTL_MARGIN_MS = 30_000;
/** Longest time for a put, off every client's path. */
const PUT_MS = 2000;
const DEFAULT_DECODER_TTL_MS = 480_000;

/** Stores what a turn leaves behind: D's handle with the proof of its tokens, or the reason why there is none. */
export class TurnRecorder {
  readonly #store: Client<typeof KVCacheStore>;
  readonly #view: Pick<InstanceView, 'snapshot'>;
  readonly #memory: ConversationMemory;
  readonly #habits: HandleHabits;
  readonly #cached: CachedPrefixes;
  readonly #guard: GuardMode;
  /** Base engine id that each decode instance was last seen with. */
  readonly #engineIds = new Map<string, string>();

  constructor(
    store: Client<typeof KVCacheStore>,
    view: Pick<InstanceView, 'snapshot'>,
    memory: ConversationMemory,
    habits: HandleHabits,
    cached: CachedPrefixes,
    guard: GuardMode,
  ) {
    this.#store = store;
    this.#view = view;
    this.#memory = memory;
    this.#habits = habits;
    this.#cached = cached;
    this.#guard = guard;
  }

  async record(turn: FinishedTurn): Promise<HandleFate> {
    const { facts, decode, report, prefillId, handedOver, streamed } = turn;
    const { handle } = report;
    if (handedOver) this.#habits.note(decode, streamed, handle !== undefined, handle?.remoteBlockIds?.groups.length);
    this.#noteCached(turn);
    const remember = (noHandle: ReuseOutcome | undefined) => {
      if (facts.conversationId === '') return;
      const hasMedia = facts.media === undefined ? {} : { hasMedia: true };
      this.#memory.set(facts, { prefillId, decodeId: decode.id, noHandle, ...hasMedia });
    };
    if (handle === undefined) {
      if (handedOver) remember(this.#whyNoHandle(turn));
      return 'none';
    }
    const blockSize = decode.engine?.blockSize ?? 0;
    const check = checkHandle(handle, { flag: 'do_remote_decode', blockSize });
    const exact = this.#guard === 'exact';
    const known = check.ok && check.numTokens !== undefined && blockSize > 0;
    if (!check.ok || (exact && !known)) {
      remember(ReuseOutcome.MISS_NO_HANDLE);
      return 'malformed';
    }
    await this.#noteEngineId(decode.id, baseEngineId(handle.remoteEngineId ?? ''));
    // The engine's stamp is on its own clock and only says that there is one: without it, it would not expire.
    const provable = report.chain !== undefined && handle.remoteBlocksExpiryTime !== undefined;
    const inTokens = isInTokens(facts.unprovenMembers) || isProvable(facts.unprovenMembers, facts.media !== undefined);
    const fits = inTokens && keepsWeights(decode, adapterOf(this.#view.snapshot(), facts));
    const keep = handleHome(facts) !== '' && (!exact || (provable && fits));
    const ttlMs = this.#ttlMs(decode, toMs(report.paused));
    if (ttlMs <= 0) {
      remember(ReuseOutcome.MISS_EXPIRED);
      return 'none';
    }
    remember(keep ? undefined : fits ? ReuseOutcome.MISS_UNVERIFIABLE : ReuseOutcome.MISS_UNSUPPORTED);
    try {
      const put = await this.#store.putEntry(this.#message(turn, keep, check.numTokens ?? 0, ttlMs), {
        timeoutMs: PUT_MS,
      });
      if (keep) return 'stored';
      // What is not to be found again is put only to be freed: a deleted entry goes to the release queue.
      const entryId = put.entry?.entryId ?? '';
      await this.#store.deleteEntry({ idempotencyKey: `${turn.planId}:release`, entryId }, { timeoutMs: PUT_MS });
      return 'released';
    } catch {
      return 'store_unavailable';
    }
  }

  /** Whoever computed or read the turn's tokens has them in its prefix cache. */
  #noteCached({ decode, prefill, report: { chain, promptTokens } }: FinishedTurn): void {
    if (chain === undefined) return;
    this.#cached.note(decode, chain.digests, chain.tokenCount);
    if (prefill !== undefined) this.#cached.note(prefill, chain.digests, promptTokens);
  }

  /** An engine has a new id in each life: with a new one, what the instance held before is gone. */
  async #noteEngineId(instanceId: string, engineId: string): Promise<void> {
    const before = this.#engineIds.get(instanceId);
    this.#engineIds.set(instanceId, engineId);
    if (before === undefined || before === engineId) return;
    const message = { idempotencyKey: randomUUID(), instanceId, current: { engineId }, reason: 'restarted' };
    await this.#store.invalidateOwner(message, { timeoutMs: PUT_MS }).catch(() => undefined);
  }

  #message(turn: FinishedTurn, keep: boolean, storedTokens: number, ttlMs: number) {
    const { facts, decode, report, planId, connector } = turn;
    const conversationId = keep ? handleHome(facts) : `baton.release/${planId}`;
    return create(PutEntryRequestSchema, {
      idempotencyKey: `${planId}:put`,
      derivedKey: keep && facts.derivedConversation,
      key: entryKeyOf(facts, adapterOf(this.#view.snapshot(), facts), conversationId),
      owner: create(EntryOwnerSchema, {
        instanceId: decode.id,
        engineId: report.handle?.remoteEngineId ?? '',
        compatGroup: compatGroup(decode),
        incarnation: lifeOf(decode, baseEngineId(report.handle?.remoteEngineId ?? '')),
      }),
      connector,
      storedTokens: Math.max(1, storedTokens),
      engineBlockSize: Math.max(1, decode.engine?.blockSize ?? 0),
      remainingTtl: toDuration(ttlMs),
      afterHit: turn.afterHit,
      ...(report.handle === undefined ? {} : { handle: report.handle }),
      ...(report.chain === undefined || !keep ? {} : { chain: report.chain }),
    });
  }

  /** The engine's own limit is not renewed, so neither is this one; time in which D's reply was held up counts. */
  #ttlMs(decode: Instance, pausedMs: number): number {
    const decoderTtlMs = toMs(decode.kv?.decoderTtl) || DEFAULT_DECODER_TTL_MS;
    return decoderTtlMs - Math.min(TTL_MARGIN_MS, decoderTtlMs / 3) - pausedMs;
  }

  #whyNoHandle({ streamed, decode }: FinishedTurn): ReuseOutcome {
    if (streamed && !this.#habits.streams(decode)) return ReuseOutcome.MISS_UNSUPPORTED_STREAM;
    return ReuseOutcome.MISS_NO_HANDLE;
  }
}

/** The life of a decode instance, with the engine id that only its handles tell. */
function lifeOf({ incarnation }: Instance, engineId: string) {
  const { processStartSeconds, generation = 0 } = incarnation ?? {};
  return create(IncarnationSchema, {
    engineId,
    generation,
    ...(processStartSeconds === undefined ? {} : { processStartSeconds }),
  });
}

/** The id of an engine without the data parallel rank that its handles carry. */
function baseEngineId(engineId: string): string {
  return engineId.replace(/_dp\d+$/, '');
}
