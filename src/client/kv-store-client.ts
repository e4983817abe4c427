import { randomUUID } from 'node:crypto';
import type { MessageInitShape } from '@bufbuild/protobuf';
import { durationFromMs } from '@bufbuild/protobuf/wkt';
import type { Client } from '@connectrpc/connect';
import {
  type Entry,
  type EntryKeySchema,
  type EntryOwnerSchema,
  type KVCacheStore,
  MissReason,
  type TakeEntryRequestSchema,
  type TakenEntry,
} from '../../gen/baton/v1/kv_cache_store_pb.ts';
import type { KvTransferParams } from '../../gen/baton/v1/kv_transfer_pb.ts';
import { buildChain } from '../core/chain.ts';
import { cutHandle } from '../core/handle-edit.ts';
import { decodeKvTransferParams, encodeKvTransferParams, numTokens } from '../core/kv-transfer.ts';
import { ServerBreaker, type ServerBreakerOptions } from '../rpc/breaker.ts';
import { connectRemote, type RemoteOptions } from '../rpc/clients.ts';
import { batonErrorFrom } from '../rpc/errors.ts';
import { sha256 } from '../services/sha256.ts';

/** How a store is reached and how long it is waited for; times in milliseconds. */
export interface KvStoreOptions extends Omit<RemoteOptions, 'breaker'> {
  /** Longest time for a take. Default 20. */
  readonly budgetMs?: number;
  /** Longest time for what nobody waits for: puts, and the ends of claims. Default 2,000. */
  readonly patientMs?: number;
  readonly breaker?: ServerBreakerOptions;
}

/** What an entry is found by; the tenant is that of the token, unless the token may act for any. */
export type Key = MessageInitShape<typeof EntryKeySchema>;

/** A handle to keep. */
export interface PutOptions {
  readonly key: Key;
  /** The decode engine: id, engine id of its handle and which life it is in. */
  readonly owner: MessageInitShape<typeof EntryOwnerSchema>;
  /** The reply's `kv_transfer_params`, as the JSON text of the engine. */
  readonly handle: string | Uint8Array;
  /** Ids of the prompt and of the reply, in order, end of sequence included: `prompt_token_ids` and `token_ids`. */
  readonly tokenIds: ArrayLike<number>;
  /** Tokens per block of the decode engine. */
  readonly blockSize: number;
  /** How long the blocks are there; take a margin off the engine's `decoder_kv_blocks_ttl`. Default 450,000. */
  readonly ttlMs?: number;
  /** Default `nixl`. */
  readonly connector?: string;
}

/** What is to be taken. */
export interface TakeOptions {
  readonly key: Key;
  /** Ids of the new prompt, as the engine's own `/tokenize` gives them. */
  readonly promptTokenIds: ArrayLike<number>;
  /** Least number of equal tokens that is worth a transfer. Default 64. */
  readonly minTokens?: number;
  /** Group of the engine that will read; default no restriction. */
  readonly compatGroup?: string;
  /** How long the claim may stay open. Default 120,000. */
  readonly claimMs?: number;
  readonly signal?: AbortSignal;
}

/** Why nothing was taken: the name of a MissReason in lower case, or that the store did not answer. */
export interface Missed {
  readonly kind: 'miss';
  readonly reason: string;
}

/** What became of a put. */
export type PutResult =
  | { readonly kind: 'stored'; readonly entryId: string }
  | { readonly kind: 'not_stored'; readonly reason: string };

const STORE_UNAVAILABLE: Missed = { kind: 'miss', reason: 'store_unavailable' };
const MISSES: Readonly<Record<number, string>> = Object.fromEntries(
  Object.entries(MissReason).map(([name, value]) => [value, name.toLowerCase()]),
);

type EndClaim = (action: 'commit' | 'release', reason: string) => Promise<void>;

/**
 * A handle that belongs to its holder until the claim ends. Leaving its scope without a word commits it, which is right
 * whatever happened to the handle: only what provably never reached an engine may be put back.
 */
export class Claim implements AsyncDisposable {
  readonly kind = 'taken';
  readonly entry: Entry;
  /** Leading tokens of the prompt that are proven equal to those the engine holds. */
  readonly matchedTokens: number;
  /** `kv_transfer_params` for the prefill engine, cut where less than the whole handle is equal. */
  readonly handle: string;
  readonly #end: EndClaim;
  #ended = false;

  constructor(taken: TakenEntry, entry: Entry, handle: string, end: EndClaim) {
    this.entry = entry;
    this.matchedTokens = taken.matchedTokens;
    this.handle = handle;
    this.#end = end;
  }

  /** Says that the handle was used, or may have been. */
  commit(): Promise<void> {
    return this.#endOnce('commit', '');
  }

  /** Puts the handle back; `reason` is a snake_case word for what proves that no engine has seen it. */
  release(reason: string): Promise<void> {
    return this.#endOnce('release', reason);
  }

  async #endOnce(action: 'commit' | 'release', reason: string): Promise<void> {
    if (this.#ended) return;
    this.#ended = true;
    await this.#end(action, reason);
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.commit();
  }
}

/**
 * A KVCacheStore for somebody's own router. It never throws for a store that is away, slow or full: a take is then a miss
 * and a put is not stored, because the store is an optimisation. Mistakes in arguments throw.
 */
export class KvStoreClient implements Disposable {
  /** The service itself, for everything else; it throws ConnectErrors. */
  readonly rpc: Client<typeof KVCacheStore>;
  readonly #options: KvStoreOptions;
  readonly #close: () => void;

  constructor(options: KvStoreOptions) {
    const { breaker, ...remote } = options;
    const services = connectRemote({ ...remote, breaker: new ServerBreaker(breaker) });
    this.rpc = services.kvCacheStore;
    this.#options = options;
    this.#close = () => services[Symbol.dispose]();
  }

  /** Claims the stored handle that has the most of the prompt in common. */
  async take(options: TakeOptions): Promise<Claim | Missed> {
    const { key, promptTokenIds, minTokens = 0, compatGroup = '', claimMs = 120_000, signal } = options;
    const request: MessageInitShape<typeof TakeEntryRequestSchema> = {
      idempotencyKey: randomUUID(),
      key,
      prompt: { case: 'tokenIds', value: { tokenIds: Array.from(promptTokenIds) } },
      minTokens,
      compatGroup,
      claimDeadline: durationFromMs(claimMs),
    };
    const { budgetMs = 20 } = this.#options;
    try {
      const answer = await this.rpc.takeEntry(request, {
        timeoutMs: budgetMs,
        ...(signal === undefined ? {} : { signal }),
      });
      if (answer.result.case === 'taken') return this.#claimOf(answer.result.value);
      const reason = answer.result.value?.reason ?? MissReason.UNSPECIFIED;
      return { kind: 'miss', reason: MISSES[reason] ?? 'unknown' };
    } catch (error) {
      if (isMistake(error)) throw error;
      this.#giveBack(request);
      return STORE_UNAVAILABLE;
    }
  }

  /** Keeps the handle of a finished turn for the next one. */
  async put(options: PutOptions): Promise<PutResult> {
    const { key, owner, tokenIds, blockSize, ttlMs = 450_000, connector = 'nixl' } = options;
    const json = typeof options.handle === 'string' ? new TextEncoder().encode(options.handle) : options.handle;
    const handle = decodeKvTransferParams(json);
    const storedTokens = handle === undefined ? undefined : numTokens(handle);
    if (handle === undefined || storedTokens === undefined || storedTokens < 1) {
      throw new TypeError('handle is not the kv_transfer_params of an engine: it names no remote_num_tokens');
    }
    const seed = { model: key.model ?? '', adapter: key.adapter ?? '', cacheSalt: key.cacheSalt ?? '' };
    const request = {
      idempotencyKey: randomUUID(),
      key,
      owner,
      connector,
      handle,
      storedTokens,
      chain: buildChain(tokenIds, seed, sha256),
      engineBlockSize: blockSize,
      remainingTtl: durationFromMs(ttlMs),
    };
    try {
      const { entry } = await this.rpc.putEntry(request, { timeoutMs: this.#patientMs });
      return { kind: 'stored', entryId: entry?.entryId ?? '' };
    } catch (error) {
      if (isMistake(error)) throw error;
      return { kind: 'not_stored', reason: reasonOf(error) };
    }
  }

  [Symbol.dispose](): void {
    this.#close();
  }

  get #patientMs(): number {
    return this.#options.patientMs ?? 2000;
  }

  async #claimOf(taken: TakenEntry): Promise<Claim | Missed> {
    const { claimId, entry, handle } = taken;
    const usable = entry && handle && usableHandle(handle, entry, taken.matchedTokens);
    if (entry === undefined || usable === undefined) {
      await this.#endClaim(claimId, 'commit', '');
      return { kind: 'miss', reason: 'no_handle' };
    }
    const text = new TextDecoder().decode(encodeKvTransferParams(usable));
    return new Claim(taken, entry, text, (action, reason) => this.#endClaim(claimId, action, reason));
  }

  /** A claim that the store does not hear of any more ends by its deadline, as a commit. */
  async #endClaim(claimId: string, action: 'commit' | 'release', reason: string): Promise<void> {
    const options = { timeoutMs: this.#patientMs };
    const call =
      action === 'commit'
        ? this.rpc.commitClaim({ claimId }, options)
        : this.rpc.releaseClaim({ claimId, reason }, options);
    await call.catch(() => undefined);
  }

  /** A take whose answer got lost may have happened: its repeat tells the claim, which nobody will use. */
  #giveBack(request: MessageInitShape<typeof TakeEntryRequestSchema>): void {
    this.rpc
      .takeEntry(request, { timeoutMs: this.#patientMs })
      .then(({ result }) =>
        result.case === 'taken' ? this.#endClaim(result.value.claimId, 'release', 'answer_lost') : undefined,
      )
      .catch(() => undefined);
  }
}

/** Opens a client; it connects at the first call, and again whenever the connection is lost. */
export function connectKvStore(options: KvStoreOptions): KvStoreClient {
  return new KvStoreClient(options);
}

function usableHandle(handle: KvTransferParams, entry: Entry, matchedTokens: number): KvTransferParams | undefined {
  return matchedTokens >= entry.storedTokens ? handle : cutHandle(handle, matchedTokens, entry.engineBlockSize);
}

const MISTAKES: ReadonlySet<string> = new Set([
  ...['INVALID_ARGUMENT', 'PROMPT_REQUIRED', 'TENANT_FORBIDDEN', 'CREDENTIAL_REQUIRED'],
]);

function isMistake(error: unknown): boolean {
  return MISTAKES.has(batonErrorFrom(error, 'INTERNAL').reason);
}

function reasonOf(error: unknown): string {
  const { reason } = batonErrorFrom(error, 'STORE_UNAVAILABLE');
  return reason.toLowerCase();
}
