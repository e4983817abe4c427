import type { Duration } from '@bufbuild/protobuf/wkt';
import { durationMs } from '@bufbuild/protobuf/wkt';
import type { Incarnation } from '../../gen/baton/v1/instance_pb.ts';
import type {
  EntryAtRevision,
  EntryFilter,
  EntryKey,
  EntryOwner,
  PutEntryRequest,
  TakeEntryRequest,
} from '../../gen/baton/v1/kv_cache_store_pb.ts';
import type { KvTransferParams } from '../../gen/baton/v1/kv_transfer_pb.ts';
import type { TokenChain } from '../../gen/baton/v1/tokens_pb.ts';
import { MAX_NAME_BYTES } from '../core/body-limits.ts';
import {
  type ChainSeed,
  encodeTokenIds,
  findChainFault,
  findRawBlockFault,
  type PackedChain,
  type ProvablePrompt,
  packChain,
  promptOfChain,
  promptOfIds,
} from '../core/chain.ts';
import { BatonError } from '../core/errors.ts';
import { numTokens } from '../core/kv-transfer.ts';
import type { AtRevision, StoreFilter, StoreKey, StoreLife, StoreLimits, StoreOwner } from '../stores/store.ts';
import { checkSize, invalidField, overLimit } from './call-arguments.ts';
import { sha256 } from './sha256.ts';

/** Who calls the store; from the credential, never from the message. */
export interface StoreCaller {
  /** Tenant of the credential; also names the caller among others. */
  readonly tenant: string;
  /** Whether a key may name any tenant, as a router's credential does. */
  readonly actsForAnyTenant: boolean;
  /** Whether takes without a proof are permitted. */
  readonly mayTakeUnverified: boolean;
  /** Whether blocks may be taken for release and owners invalidated. */
  readonly isOperator: boolean;
}

const MAX_ADAPTER_BYTES = 4096;
const MAX_RAW_BLOCKS = 64;
const MAX_TTL_MS = 24 * 3_600_000;
const MAX_CLAIM_MS = 3_600_000;
const DEFAULT_CLAIM_MS = 120_000;
const DEFAULT_MIN_TOKENS = 64;

/** The required text, at most 512 bytes of it. */
export function requireName(field: string, text: string): string {
  if (text === '') throw invalidField(field, 'is required');
  return checkSize(field, text, MAX_NAME_BYTES);
}

/** The tenant that a request means; TENANT_FORBIDDEN if the caller does not act for it. */
function tenantOf(tenant: string, caller: StoreCaller, field = 'key.tenant'): string {
  if (tenant === '' || tenant === caller.tenant) return caller.tenant;
  if (!caller.actsForAnyTenant) {
    throw new BatonError({
      reason: 'TENANT_FORBIDDEN',
      message: 'the credential does not act for this tenant',
      metadata: { tenant: tenant.slice(0, MAX_NAME_BYTES) },
    });
  }
  return checkSize(field, tenant, MAX_NAME_BYTES);
}

/** Tenant whose entries the caller sees; undefined sees all. */
export function visibleTenant(caller: StoreCaller): string | undefined {
  return caller.actsForAnyTenant ? undefined : caller.tenant;
}

/** The filter with what the caller may see. */
export function readFilter(filter: EntryFilter | undefined, caller: StoreCaller): StoreFilter {
  const named = filter?.tenant ?? '';
  const tenant = named === '' ? visibleTenant(caller) : tenantOf(named, caller, 'filter.tenant');
  return {
    ...(tenant === undefined ? {} : { tenant }),
    ...(filter === undefined || filter.instanceId === '' ? {} : { instanceId: filter.instanceId }),
    ...(filter === undefined || filter.conversationId === '' ? {} : { conversationId: filter.conversationId }),
  };
}

export function readKey(key: EntryKey | undefined, caller: StoreCaller): StoreKey {
  if (key === undefined) throw invalidField('key', 'is required');
  return {
    tenant: tenantOf(key.tenant, caller),
    model: requireName('key.model', key.model),
    adapter: checkSize('key.adapter', key.adapter, MAX_ADAPTER_BYTES),
    cacheSalt: checkSize('key.cache_salt', key.cacheSalt, MAX_NAME_BYTES),
    conversationId: requireName('key.conversation_id', key.conversationId),
  };
}

export function readOwner(owner: EntryOwner | undefined): StoreOwner {
  if (owner === undefined) throw invalidField('owner', 'is required');
  if (owner.incarnation === undefined) throw invalidField('owner.incarnation', 'is required');
  checkSize('owner.incarnation.engine_id', owner.incarnation.engineId, MAX_NAME_BYTES);
  return {
    instanceId: requireName('owner.instance_id', owner.instanceId),
    engineId: requireName('owner.engine_id', owner.engineId),
    life: readLife(owner.incarnation),
    compatGroup: checkSize('owner.compat_group', owner.compatGroup, MAX_NAME_BYTES),
  };
}

function readLife(life: Incarnation): StoreLife {
  return { processStartSeconds: life.processStartSeconds, engineId: life.engineId, generation: life.generation };
}

export function readConnector(connector: string): string {
  if (connector === '') throw invalidField('connector', 'is required');
  if (connector.length > 64 || !/^[a-z0-9]+(-[a-z0-9]+)*$/.test(connector)) {
    throw invalidField('connector', 'is not a kebab-case name');
  }
  return connector;
}

/** The handle of a put; it must not contradict what the put says of it, because takes are answered from that. */
export function readHandle({ handle, storedTokens, engineBlockSize }: PutEntryRequest): KvTransferParams {
  if (handle === undefined) throw invalidField('handle', 'is required');
  if (storedTokens === 0) throw invalidField('stored_tokens', 'is required');
  if (engineBlockSize === 0) throw invalidField('engine_block_size', 'is required');
  const named = numTokens(handle);
  if (named !== undefined && named !== storedTokens) {
    throw invalidField('stored_tokens', `is not what the handle names: remote_num_tokens is ${named}`);
  }
  const groups = handle.remoteBlockIds?.groups ?? [];
  const [blocks] = groups;
  const needed = Math.ceil(storedTokens / engineBlockSize);
  if (engineBlockSize > 1 && groups.length === 1 && blocks !== undefined && blocks.ids.length < needed) {
    const detail = `${blocks.ids.length} blocks; stored_tokens fill ${needed} of engine_block_size`;
    throw invalidField('handle.remote_block_ids', `are too few: ${detail}`);
  }
  return handle;
}

/** Milliseconds for which the blocks of a put are there. */
export function readTtl(ttl: PutEntryRequest['remainingTtl']): number {
  if (ttl === undefined) throw invalidField('remaining_ttl', 'is required');
  return readDuration('remaining_ttl', ttl, MAX_TTL_MS, '24 h');
}

/** Milliseconds for which a claim stays open. */
export function readClaimDeadline(deadline: Duration | undefined): number {
  if (deadline === undefined) return DEFAULT_CLAIM_MS;
  return readDuration('claim_deadline', deadline, MAX_CLAIM_MS, '1 h');
}

/** Milliseconds for which entries of conversations that go on are spared. */
export function readSpare(spare: Duration | undefined): number {
  return spare === undefined ? 0 : readDuration('spare_after_hit', spare, MAX_TTL_MS, '24 h');
}

/** Least number of equal tokens that a take is worth. */
export function readMinTokens(minTokens: number): number {
  return minTokens === 0 ? DEFAULT_MIN_TOKENS : minTokens;
}

export function readRevision(field: string, at: EntryAtRevision): AtRevision {
  if (at.revision === 0n) throw invalidField(`${field}.revision`, 'is required');
  return { entryId: requireName(`${field}.entry_id`, at.entryId), revision: at.revision };
}

export function readPutPrecondition(request: PutEntryRequest): 'absent' | AtRevision | undefined {
  const condition = request.precondition?.condition;
  if (request.precondition === undefined || condition === undefined) return undefined;
  if (condition.case === undefined) throw invalidField('precondition', 'has no condition');
  return condition.case === 'absent' ? 'absent' : readRevision('precondition.revision', condition.value);
}

/** The chain of a put, in memory of its own. */
export function readChain(chain: TokenChain, limits: StoreLimits): PackedChain {
  checkChain('chain', chain, limits);
  return packChain(chain);
}

/** The prompt of a take. */
export interface ReadPrompt {
  readonly prompt: ProvablePrompt;
  /** Its long part as bytes; a fingerprint has these and `rest` in place of the message, whose encoding takes longer. */
  readonly bytes: Uint8Array;
  readonly rest: TakeEntryRequest['prompt'];
}

/** Reads the prompt of a take; undefined without one. */
export function readPrompt(
  prompt: TakeEntryRequest['prompt'],
  seed: ChainSeed,
  limits: StoreLimits,
): ReadPrompt | undefined {
  switch (prompt.case) {
    case undefined:
      return undefined;
    case 'tokenIds': {
      const { tokenIds } = prompt.value;
      if (tokenIds.length > limits.promptTokens) throw overLimit('prompt_tokens', limits.promptTokens);
      const bytes = encodeTokenIds(tokenIds);
      return { prompt: promptOfIds(tokenIds, seed, sha256, bytes), bytes, rest: { case: undefined } };
    }
    case 'promptChain': {
      const { chain, rawBlocks } = prompt.value;
      if (chain === undefined) throw invalidField('prompt_chain.chain', 'is required');
      checkChain('prompt_chain.chain', chain, limits);
      if (rawBlocks.length > MAX_RAW_BLOCKS) {
        throw invalidField('prompt_chain.raw_blocks', `has more than ${MAX_RAW_BLOCKS} blocks`);
      }
      const fault = findRawBlockFault(chain, rawBlocks);
      if (fault !== undefined) throw invalidField(`prompt_chain.raw_blocks.${fault.field}`, fault.what);
      const { words } = packChain(chain);
      const rest = { case: prompt.case, value: { ...prompt.value, chain: { ...chain, digests: [] } } };
      return { prompt: promptOfChain(chain, rawBlocks, words), bytes: bytesOf(words), rest };
    }
  }
}

/** The bytes of words, in no memory of their own. */
export function bytesOf(words: Uint32Array): Uint8Array {
  return new Uint8Array(words.buffer, words.byteOffset, words.byteLength);
}

function checkChain(field: string, chain: TokenChain, limits: StoreLimits): void {
  if (chain.digests.length > limits.chainDigests) throw overLimit('chain_digests', limits.chainDigests);
  const fault = findChainFault(chain);
  if (fault !== undefined) throw invalidField(`${field}.${fault.field}`, fault.what);
}

function readDuration(field: string, duration: Duration, maxMs: number, max: string): number {
  const ms = durationMs(duration);
  if (ms <= 0) throw invalidField(field, 'is not positive');
  if (ms > maxMs) throw invalidField(field, `is more than ${max}`);
  return ms;
}
