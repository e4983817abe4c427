import type { Instance } from '../../gen/baton/v1/instance_pb.ts';
import { hash32 } from '../../src/core/hash32.ts';
import type { Seated } from '../../src/core/pools.ts';

/** A seat as the router would keep it for an idle instance that never had a turn. */
export function seatOf(instance: Instance, changes: Partial<Seated> = {}): Seated {
  const { id } = instance;
  return { id, hash: hash32(id), instance, inFlight: 0, lastPick: 0, weight: 1, reading: undefined, ...changes };
}
