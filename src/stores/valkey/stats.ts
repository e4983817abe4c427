import type { MissReason } from '../../../gen/baton/v1/kv_cache_store_pb.ts';
import { reasonOf } from '../miss-reason.ts';
import type { StoreStats } from '../store.ts';
import type { Reply } from './reply.ts';

type Counts = Pick<StoreStats, 'entries' | 'bytes' | 'puts' | 'takes' | 'misses' | 'evictions' | 'expirations'>;

/** Reads the counts of the store or of a tenant. */
export function readCounts(fields: ReadonlyMap<string, Buffer>): Counts {
  const number = (name: string): number => Number(fields.get(name)?.toString() ?? 0);
  const misses = new Map<MissReason, number>();
  for (const name of fields.keys()) {
    const reason = /^m(\d+)$/.exec(name)?.[1];
    if (reason !== undefined) misses.set(reasonOf(Number(reason)), number(name));
  }
  return {
    entries: number('e'),
    bytes: number('b'),
    puts: number('pu'),
    takes: number('ta'),
    misses,
    evictions: number('ev'),
    expirations: number('ex'),
  };
}

/** Reads what is known by owner: those with entries, their pinned blocks and their live entries. */
export function readOwners(present: Reply, blocks: Reply, live: Reply): StoreStats['owners'] {
  const [blocksOf, liveOf] = [blocks.pairs(), live.pairs()];
  return [...present.pairs().keys()].toSorted().map((instanceId) => ({
    instanceId,
    entries: Number(liveOf.get(instanceId)?.toString() ?? 0),
    pinnedBlocks: Number(blocksOf.get(instanceId)?.toString() ?? 0),
  }));
}
