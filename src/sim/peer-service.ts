import type { BlockPool } from './blocks.ts';
import type { PinTable } from './pins.ts';
import type { PeerReply, PeerRequest } from './side-channel.ts';
import type { EngineStats } from './stats.ts';

const expiryGuardSeconds = 5;
const rememberedIds = 10_000;

/** What a peer service reads of its engine. */
export interface PeerServiceDeps {
  readonly engineId: string;
  readonly compat: string;
  readonly pool: BlockPool;
  readonly pins: PinTable;
  readonly stats: EngineStats;
  /** How far a heartbeat moves a lease. */
  readonly extendMs: number;
  readonly now: () => number;
  readonly monotonicSeconds: () => number;
}

/**
 * The producer's side of a hand-over. A read is never refused because the pin is gone: it copies what the blocks hold at
 * that moment, as remote memory access does, and only the counters tell.
 */
export class PeerService {
  private readonly deps: PeerServiceDeps;
  private readonly read = new Set<string>();

  constructor(deps: PeerServiceDeps) {
    this.deps = deps;
  }

  answer(request: PeerRequest): PeerReply {
    const { engineId, pins, stats, now, extendMs } = this.deps;
    if (request.engineId !== engineId) return { error: 'engine id' };
    switch (request.op) {
      case 'beat':
        stats.heartbeats += 1;
        for (const id of request.requestIds) pins.extend(id, now() + extendMs);
        return { error: null, slots: null };
      case 'done':
        if (pins.find(request.requestId) === undefined) stats.notificationsAfterExpiry += 1;
        else if (pins.free(request.requestId)) this.remember(request.requestId);
        return { error: null, slots: null };
      case 'read':
        return this.copyBlocks(request);
      case 'put':
        return { error: 'operation' };
    }
  }

  private copyBlocks(request: Extract<PeerRequest, { op: 'read' }>): PeerReply {
    const { compat, pool, pins, stats, monotonicSeconds } = this.deps;
    if (request.compat !== compat) return { error: 'incompatible' };
    if (!request.blockIds.every((id) => pool.isBlock(id))) return { error: 'block ids' };
    if (request.expiry !== null && monotonicSeconds() > request.expiry - expiryGuardSeconds) {
      stats.refusedReads += 1;
      return { error: 'expired' };
    }
    const isLate = pins.find(request.requestId) === undefined;
    if (isLate) {
      if (this.read.has(request.requestId)) stats.doubleReads += 1;
      else stats.expiredReads += 1;
    }
    const { blockSize } = pool;
    const size = request.blockIds.length * blockSize;
    const slots = { tokens: new Int32Array(size), positions: new Int32Array(size), cells: new Uint32Array(size) };
    request.blockIds.forEach((id, index) => {
      const from = id * blockSize;
      slots.tokens.set(pool.tokens.subarray(from, from + blockSize), index * blockSize);
      slots.positions.set(pool.positions.subarray(from, from + blockSize), index * blockSize);
      slots.cells.set(pool.cells.subarray(from, from + blockSize), index * blockSize);
    });
    return { error: null, slots, isLate };
  }

  private remember(requestId: string): void {
    this.read.add(requestId);
    if (this.read.size <= rememberedIds) return;
    for (const oldest of this.read) {
      this.read.delete(oldest);
      break;
    }
  }
}
