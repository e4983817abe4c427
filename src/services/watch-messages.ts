import { create } from '@bufbuild/protobuf';
import {
  type WatchCheckpoint,
  WatchCheckpointSchema,
  type WatchReset,
  WatchResetSchema,
  type WatchSnapshotComplete,
  WatchSnapshotCompleteSchema,
} from '../../gen/baton/v1/watch_pb.ts';
import type { WatchEvent } from './watch-hub.ts';

/** What every watch has beside its values. */
export type WatchFrame =
  | { readonly case: 'reset'; readonly value: WatchReset }
  | { readonly case: 'snapshotComplete'; readonly value: WatchSnapshotComplete }
  | { readonly case: 'checkpoint'; readonly value: WatchCheckpoint };

/** An event without a value as the contracts tell it. */
export function frameOf(event: Exclude<WatchEvent<unknown>, { readonly value: unknown }>): WatchFrame {
  switch (event.kind) {
    case 'reset':
      return { case: 'reset', value: create(WatchResetSchema, { reason: event.reason }) };
    case 'snapshot-complete':
      return { case: 'snapshotComplete', value: create(WatchSnapshotCompleteSchema, { count: event.count }) };
    case 'checkpoint':
      return { case: 'checkpoint', value: create(WatchCheckpointSchema) };
  }
}
