import { create, fromBinary } from '@bufbuild/protobuf';
import { durationFromMs } from '@bufbuild/protobuf/wkt';
import { type Incarnation, IncarnationSchema } from '../../gen/baton/v1/instance_pb.ts';
import {
  type Entry,
  EntrySchema,
  type GetStatsResponse,
  GetStatsResponseSchema,
  type TakenEntry,
  TakenEntrySchema,
} from '../../gen/baton/v1/kv_cache_store_pb.ts';
import { type KvTransferParams, KvTransferParamsSchema } from '../../gen/baton/v1/kv_transfer_pb.ts';
import { CHAIN_ALGORITHM } from '../core/chain.ts';
import type { EntryView, StoreLife, StoreLimits, StoreStats, Taken } from '../stores/store.ts';

/** An entry as the contract tells it; durations are cut to whole milliseconds, so that no time is promised too much. */
export function entryMessage(view: EntryView): Entry {
  return create(EntrySchema, {
    entryId: view.entryId,
    key: { ...view.key },
    owner: {
      instanceId: view.owner.instanceId,
      engineId: view.owner.engineId,
      incarnation: lifeMessage(view.owner.life),
      compatGroup: view.owner.compatGroup,
    },
    connector: view.connector,
    storedTokens: view.storedTokens,
    chainTokens: view.chainTokens,
    cachedTokens: Math.min(view.storedTokens, view.chainTokens),
    engineBlockSize: view.engineBlockSize,
    chainAlgorithm: view.hasChain ? CHAIN_ALGORITHM : '',
    remainingTtl: durationFromMs(Math.floor(view.remainingMs)),
    age: durationFromMs(Math.floor(view.ageMs)),
    claimed: view.claimed,
    afterHit: view.afterHit === true,
    revision: view.revision,
  });
}

/** A life of an instance as the contract tells it. */
export function lifeMessage(life: StoreLife): Incarnation {
  return create(IncarnationSchema, {
    engineId: life.engineId,
    generation: life.generation,
    ...(life.processStartSeconds === undefined ? {} : { processStartSeconds: life.processStartSeconds }),
  });
}

/** A claimed handle; the message is the caller's own. */
export function takenMessage(taken: Taken): TakenEntry {
  return create(TakenEntrySchema, {
    claimId: taken.claimId,
    claimRemaining: durationFromMs(Math.floor(taken.claimRemainingMs)),
    entry: entryMessage(taken.entry),
    handle: fromBinary(KvTransferParamsSchema, taken.handle),
    matchedTokens: taken.matchedTokens,
  });
}

/** Counts and limits as the contract tells them. */
export function statsMessage(stats: StoreStats, runId: string, limits: StoreLimits, watches: number): GetStatsResponse {
  return create(GetStatsResponseSchema, {
    runId,
    entries: stats.entries,
    claims: stats.claims,
    bytes: BigInt(stats.bytes),
    releaseQueue: stats.releaseQueue,
    watches,
    puts: BigInt(stats.puts),
    takes: BigInt(stats.takes),
    misses: [...stats.misses].map(([reason, count]) => ({ reason, count: BigInt(count) })),
    evictions: BigInt(stats.evictions),
    expirations: BigInt(stats.expirations),
    owners: stats.owners.map((owner) => ({ ...owner, pinnedBlocks: BigInt(owner.pinnedBlocks) })),
    limits: { ...limits, tenantBytes: BigInt(limits.tenantBytes), totalBytes: BigInt(limits.totalBytes) },
  });
}

/** Blocks that a handle names; where it names none, as many as its tokens fill. */
export function blocksOf(handle: KvTransferParams, storedTokens: number, blockSize: number): number {
  const ids = handle.remoteBlockIds;
  const named = ids === undefined ? 0 : ids.flat.length + ids.groups.reduce((sum, group) => sum + group.ids.length, 0);
  return named > 0 ? named : Math.ceil(storedTokens / blockSize);
}
