import { MissReason } from '../../gen/baton/v1/kv_cache_store_pb.ts';

const REASONS = new Map<number, MissReason>(
  Object.values(MissReason).flatMap((value) => (typeof value === 'number' ? [[value, value]] : [])),
);

/** The reason with this number, which a backend has kept. */
export function reasonOf(number: number): MissReason {
  return REASONS.get(number) ?? MissReason.UNSPECIFIED;
}
