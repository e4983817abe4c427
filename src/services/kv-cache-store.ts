import { create, type DescMessage, type MessageShape, toBinary } from '@bufbuild/protobuf';
import type { HandlerContext, ServiceImpl } from '@connectrpc/connect';
import {
  type CommitClaimRequest,
  type CommitClaimResponse,
  CommitClaimResponseSchema,
  type DeleteEntryRequest,
  DeleteEntryRequestSchema,
  type DeleteEntryResponse,
  DeleteEntryResponseSchema,
  type GetEntryRequest,
  type GetEntryResponse,
  GetEntryResponseSchema,
  type GetStatsRequest,
  type GetStatsResponse,
  type InvalidateOwnerRequest,
  InvalidateOwnerRequestSchema,
  type InvalidateOwnerResponse,
  InvalidateOwnerResponseSchema,
  type KVCacheStore,
  type ListEntriesRequest,
  type ListEntriesResponse,
  ListEntriesResponseSchema,
  MissReason,
  type PutEntryRequest,
  PutEntryRequestSchema,
  type PutEntryResponse,
  PutEntryResponseSchema,
  type ReleaseClaimRequest,
  type ReleaseClaimResponse,
  ReleaseClaimResponseSchema,
  type TakeEntryRequest,
  TakeEntryRequestSchema,
  type TakeEntryResponse,
  TakeEntryResponseSchema,
  type TakeForReleaseRequest,
  TakeForReleaseRequestSchema,
  type TakeForReleaseResponse,
  TakeForReleaseResponseSchema,
  type WatchEntriesRequest,
  type WatchEntriesResponse,
} from '../../gen/baton/v1/kv_cache_store_pb.ts';
import { KvTransferParamsSchema } from '../../gen/baton/v1/kv_transfer_pb.ts';
import { matchChain } from '../core/chain.ts';
import { BatonError } from '../core/errors.ts';
import {
  type CallId,
  type ClaimGuard,
  type KvStore,
  type Prove,
  type ReleasableListener,
  STORE_LIMITS,
  type StoreLimits,
} from '../stores/store.ts';
import { checkReasonWord, invalidField, requireCallKey } from './call-arguments.ts';
import { operatorRequired } from './credential.ts';
import { EntryWatch } from './entry-watch.ts';
import { isSameLife } from './instance-record.ts';
import {
  bytesOf,
  readChain,
  readClaimDeadline,
  readConnector,
  readFilter,
  readHandle,
  readKey,
  readMinTokens,
  readOwner,
  readPrompt,
  readPutPrecondition,
  readRevision,
  readSpare,
  readTtl,
  requireName,
  type StoreCaller,
  visibleTenant,
} from './kv-store-arguments.ts';
import { blocksOf, entryMessage, lifeMessage, statsMessage, takenMessage } from './kv-store-messages.ts';
import { clampPageSize, decodePageToken, encodePageToken } from './page-token.ts';
import { sha256 } from './sha256.ts';
import { readCheckpointInterval } from './watch-hub.ts';

/** What of a call tells who calls. */
export type StoreCallContext = Pick<HandlerContext, 'requestHeader' | 'values' | 'protocolName'>;

/** What a {@link KvCacheStoreService} runs on. */
export interface KvCacheStoreOptions {
  /** Not owned: whoever opened it closes it. */
  readonly store: KvStore;
  /** From the credential of the call. */
  readonly callerOf: (context: StoreCallContext) => StoreCaller;
  /** The limits the store was opened with. Default those of the contract. */
  readonly limits?: StoreLimits;
  /** Whether the store works for a tenant; others get DISABLED. Default it works for all. */
  readonly isEnabled?: (tenant: string) => boolean;
}

const DEFAULT_RELEASES = 1;
const MAX_RELEASES = 100;

/**
 * The KVCacheStore service over a backend: checks arguments and rights, proves prompts, and speaks messages. It shares
 * no memory with its callers: handles are kept encoded, and each answer is made anew.
 */
export class KvCacheStoreService implements ServiceImpl<typeof KVCacheStore>, Disposable {
  readonly #store: KvStore;
  readonly #callerOf: (context: StoreCallContext) => StoreCaller;
  readonly #limits: StoreLimits;
  readonly #isEnabled: (tenant: string) => boolean;
  readonly #watch: EntryWatch;

  constructor(options: KvCacheStoreOptions) {
    this.#store = options.store;
    this.#callerOf = options.callerOf;
    this.#limits = options.limits ?? STORE_LIMITS;
    this.#isEnabled = options.isEnabled ?? (() => true);
    this.#watch = new EntryWatch(options.store, this.#limits.tenantWatches);
  }

  /** Ends all watches. */
  [Symbol.dispose](): void {
    this.#watch[Symbol.dispose]();
  }

  /**
   * Calls `listener` with an instance and its number of queued entries whenever its release queue grew, in the turn of
   * the call that made it; it must not throw. Returns what ends that.
   */
  readonly onReleasable = (listener: ReleasableListener): (() => void) => this.#store.onReleasable(listener);

  async putEntry(request: PutEntryRequest, context: StoreCallContext): Promise<PutEntryResponse> {
    const caller = this.#callerOf(context);
    requireCallKey(request.idempotencyKey);
    const key = readKey(request.key, caller);
    const owner = readOwner(request.owner);
    const handle = readHandle(request);
    const connector = readConnector(request.connector);
    const ttlMs = readTtl(request.remainingTtl);
    const precondition = readPutPrecondition(request);
    const chain = request.chain === undefined ? undefined : readChain(request.chain, this.#limits);
    if (!this.#isEnabled(key.tenant)) {
      throw new BatonError({
        reason: 'QUOTA_EXCEEDED',
        message: 'the store is switched off for this tenant',
        metadata: { quota: 'tenant_entries', max: '0' },
      });
    }
    const handleBytes = toBinary(KvTransferParamsSchema, handle);
    const { handle: _, chain: proof, ...short } = request;
    const long = chain === undefined ? [handleBytes] : [handleBytes, bytesOf(chain.words), bytesOf(chain.tail)];
    const plain = { ...short, ...(proof === undefined ? {} : { chain: { ...proof, digests: [], tailTokenIds: [] } }) };
    const result = await this.#store.put({
      id: callIdOf(request.idempotencyKey, [caller.tenant, key.tenant], PutEntryRequestSchema, plain, long),
      derivedKey: request.derivedKey,
      entry: {
        key,
        owner,
        connector,
        handle: handleBytes,
        storedTokens: request.storedTokens,
        ...(chain === undefined ? {} : { chain }),
        engineBlockSize: request.engineBlockSize,
        blocks: blocksOf(handle, request.storedTokens, request.engineBlockSize),
        ttlMs,
        ...(request.afterHit ? { afterHit: true } : {}),
      },
      ...(precondition === undefined ? {} : { precondition }),
    });
    return create(PutEntryResponseSchema, {
      entry: entryMessage(result.entry),
      displacedEntryIds: [...result.displaced],
    });
  }

  async takeEntry(request: TakeEntryRequest, context: StoreCallContext): Promise<TakeEntryResponse> {
    const caller = this.#callerOf(context);
    requireCallKey(request.idempotencyKey);
    const key = readKey(request.key, caller);
    const deadlineMs = readClaimDeadline(request.claimDeadline);
    const precondition =
      request.precondition === undefined ? undefined : readRevision('precondition', request.precondition);
    if (request.allowUnverified && !caller.mayTakeUnverified) {
      throw new BatonError({
        reason: 'UNVERIFIED_NOT_PERMITTED',
        message: 'the credential does not permit takes without a proof',
      });
    }
    const read = readPrompt(request.prompt, key, this.#limits);
    if (read === undefined && !request.allowUnverified) {
      throw new BatonError({ reason: 'PROMPT_REQUIRED', message: 'the take has no prompt to be proven against' });
    }
    if (!this.#isEnabled(key.tenant)) return missMessage(MissReason.DISABLED, 0);
    const plain = read === undefined ? request : { ...request, prompt: read.rest };
    const scopes = [caller.tenant, key.tenant];
    const prove: Prove | undefined = read && ((chain, limit) => matchChain(read.prompt, chain, limit));
    const result = await this.#store.take({
      id: callIdOf(request.idempotencyKey, scopes, TakeEntryRequestSchema, plain, read && [read.bytes]),
      key,
      ...(prove === undefined ? {} : { prove }),
      minTokens: readMinTokens(request.minTokens),
      ...(request.keepTokens === undefined ? {} : { keepTokens: request.keepTokens }),
      compatGroup: request.compatGroup,
      deadlineMs,
      ...(precondition === undefined ? {} : { precondition }),
    });
    if (result.kind === 'miss') return missMessage(result.reason, result.matchedTokens);
    return create(TakeEntryResponseSchema, { result: { case: 'taken', value: takenMessage(result.taken) } });
  }

  async commitClaim(request: CommitClaimRequest, context: StoreCallContext): Promise<CommitClaimResponse> {
    const guard = guardOf(this.#callerOf(context));
    await this.#store.commit(requireName('claim_id', request.claimId), guard);
    return create(CommitClaimResponseSchema);
  }

  async releaseClaim(request: ReleaseClaimRequest, context: StoreCallContext): Promise<ReleaseClaimResponse> {
    const guard = guardOf(this.#callerOf(context));
    checkReasonWord(request.reason);
    const entry = await this.#store.release(requireName('claim_id', request.claimId), guard);
    return create(ReleaseClaimResponseSchema, entry === undefined ? {} : { entry: entryMessage(entry) });
  }

  async takeForRelease(request: TakeForReleaseRequest, context: StoreCallContext): Promise<TakeForReleaseResponse> {
    const caller = this.#operatorOf(context, 'TakeForRelease');
    requireCallKey(request.idempotencyKey);
    const taken = await this.#store.takeForRelease({
      id: callIdOf(request.idempotencyKey, [caller.tenant], TakeForReleaseRequestSchema, request),
      instanceId: requireName('instance_id', request.instanceId),
      max: request.max === 0 ? DEFAULT_RELEASES : Math.min(request.max, MAX_RELEASES),
      queuedOnly: request.queuedOnly,
      spareAfterHitMs: readSpare(request.spareAfterHit),
      deadlineMs: readClaimDeadline(request.claimDeadline),
    });
    return create(TakeForReleaseResponseSchema, { taken: taken.map(takenMessage) });
  }

  async getEntry(request: GetEntryRequest, context: StoreCallContext): Promise<GetEntryResponse> {
    const caller = this.#callerOf(context);
    const { selector } = request;
    if (selector.case === undefined) throw invalidField('selector', 'is required');
    if (selector.case === 'entryId') {
      const entryId = requireName('entry_id', selector.value);
      return entriesMessage(await this.#store.get({ kind: 'entry', entryId, tenant: visibleTenant(caller) }));
    }
    const key = readKey(selector.value, caller);
    if (!this.#isEnabled(key.tenant)) return entriesMessage({ entries: [], miss: MissReason.DISABLED });
    return entriesMessage(await this.#store.get({ kind: 'key', key }));
  }

  async listEntries(request: ListEntriesRequest, context: StoreCallContext): Promise<ListEntriesResponse> {
    const page = await this.#store.list({
      filter: readFilter(request.filter, this.#callerOf(context)),
      after: decodePageToken(request.pageToken),
      size: clampPageSize(request.pageSize),
    });
    return create(ListEntriesResponseSchema, {
      entries: page.entries.map(entryMessage),
      nextPageToken: page.next === undefined ? '' : encodePageToken(page.next),
      revision: page.revision,
    });
  }

  async deleteEntry(request: DeleteEntryRequest, context: StoreCallContext): Promise<DeleteEntryResponse> {
    const caller = this.#callerOf(context);
    requireCallKey(request.idempotencyKey);
    const deleted = await this.#store.delete({
      id: callIdOf(request.idempotencyKey, [caller.tenant], DeleteEntryRequestSchema, request),
      entryId: requireName('entry_id', request.entryId),
      tenant: visibleTenant(caller),
      revision: request.revision,
    });
    return create(DeleteEntryResponseSchema, { deleted });
  }

  async invalidateOwner(request: InvalidateOwnerRequest, context: StoreCallContext): Promise<InvalidateOwnerResponse> {
    const caller = this.#operatorOf(context, 'InvalidateOwner');
    requireCallKey(request.idempotencyKey);
    checkReasonWord(request.reason);
    const { current } = request;
    const dropped = await this.#store.invalidateOwner({
      id: callIdOf(request.idempotencyKey, [caller.tenant], InvalidateOwnerRequestSchema, request),
      instanceId: requireName('instance_id', request.instanceId),
      keep: (life) => current !== undefined && isSameLife(lifeMessage(life), current),
    });
    return create(InvalidateOwnerResponseSchema, dropped);
  }

  watchEntries(
    request: WatchEntriesRequest,
    context: StoreCallContext & Pick<HandlerContext, 'signal'>,
  ): AsyncIterable<WatchEntriesResponse> {
    const caller = this.#callerOf(context);
    return this.#watch.watch({
      caller: caller.tenant,
      token: request.resumeToken,
      filter: readFilter(request.filter, caller),
      checkpointMs: readCheckpointInterval(request.checkpointInterval),
      signal: context.signal,
    });
  }

  async getStats(request: GetStatsRequest, context: StoreCallContext): Promise<GetStatsResponse> {
    return this.readStats(this.#callerOf(context), request);
  }

  /** The counts without a call, for metrics; without arguments those of all tenants. */
  async readStats(caller: StoreCaller = EVERYTHING, request: Partial<GetStatsRequest> = {}): Promise<GetStatsResponse> {
    const stats = await this.#store.stats(readFilter(request.filter, caller));
    const watches = this.#watch.openWatches(caller.actsForAnyTenant ? undefined : caller.tenant);
    return statsMessage(stats, this.#store.runId, this.#limits, watches);
  }

  #operatorOf(context: StoreCallContext, method: string): StoreCaller {
    const caller = this.#callerOf(context);
    if (caller.isOperator) return caller;
    throw operatorRequired(`baton.v1.KVCacheStore/${method}`);
  }
}

/** The caller that a router in this process is: it has told tenants apart before, and frees blocks. */
export const EVERYTHING: StoreCaller = {
  tenant: '',
  actsForAnyTenant: true,
  mayTakeUnverified: true,
  isOperator: true,
};

/** Claims for release belong to operators, all others to their tenant. */
function guardOf(caller: StoreCaller): ClaimGuard {
  return ({ tenant, forRelease }) =>
    forRelease ? caller.isOperator : caller.actsForAnyTenant || tenant === caller.tenant;
}

/**
 * Names a call within its scopes; the fingerprint covers the whole request: the message, and beside it the bytes of what was
 * left out of it because it is long and was encoded before.
 */
function callIdOf<Desc extends DescMessage>(
  key: string,
  scopes: readonly string[],
  schema: Desc,
  request: MessageShape<Desc>,
  more: readonly Uint8Array[] = [],
): CallId {
  const parts = [toBinary(schema, request), ...more];
  // The lengths keep a byte of the one from passing for a byte of the other.
  const lengths = Buffer.from(`${parts.map((part) => part.length).join(',')}:`);
  const fingerprint = sha256([lengths, ...parts]);
  return { scope: scopes.map((scope) => `${scope.length}:${scope}`).join(''), key, fingerprint };
}

function missMessage(reason: MissReason, matchedTokens: number): TakeEntryResponse {
  return create(TakeEntryResponseSchema, { result: { case: 'miss', value: { reason, matchedTokens } } });
}

function entriesMessage(result: Awaited<ReturnType<KvStore['get']>>): GetEntryResponse {
  return create(GetEntryResponseSchema, {
    entries: result.entries.map(entryMessage),
    ...(result.miss === undefined ? {} : { miss: { reason: result.miss } }),
  });
}
