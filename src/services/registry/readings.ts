import { create } from '@bufbuild/protobuf';
import {
  type ListInstancesRequest,
  type ListInstancesResponse,
  ListInstancesResponseSchema,
  type WatchInstancesRequest,
  type WatchInstancesResponse,
} from '../../../gen/baton/v1/pool_registry_pb.ts';
import { passesFilter } from '../instance-filter.ts';
import { toWatchResponses } from '../instance-watch.ts';
import { clampPageSize, decodePageToken, encodePageToken } from '../page-token.ts';
import { readCheckpointInterval } from '../watch-hub.ts';
import type { InstancePool } from './instance-pool.ts';

/** One page of the instances of a pool, in the order of their ids. */
export function listPage(pool: InstancePool, request: ListInstancesRequest): ListInstancesResponse {
  const after = decodePageToken(request.pageToken);
  const size = clampPageSize(request.pageSize);
  const matching = [...pool.snapshot]
    .filter((instance) => passesFilter(instance, request.filter) && (after === undefined || instance.id > after))
    .sort((a, b) => (a.id < b.id ? -1 : 1));
  const page = matching.slice(0, size);
  const last = page.at(-1);
  return create(ListInstancesResponseSchema, {
    instances: page.map((instance) => pool.withAge(instance)),
    nextPageToken: last !== undefined && matching.length > size ? encodePageToken(last.id) : '',
    revision: pool.revision,
    stale: false,
  });
}

/** The instances of a pool and what changes about them, until the signal ends it. */
export function watchPool(
  pool: InstancePool,
  { checkpointInterval, filter, resumeToken }: WatchInstancesRequest,
  signal: AbortSignal,
): AsyncIterable<WatchInstancesResponse> {
  const events = pool.watches.watch({
    token: resumeToken,
    // A copy: what changes while it is told comes as a delta.
    snapshot: () =>
      pool.snapshot
        .filter((instance) => passesFilter(instance, filter))
        .map((instance) => ({ instance: pool.withAge(instance), removed: false })),
    checkpointMs: readCheckpointInterval(checkpointInterval),
    signal,
  });
  return toWatchResponses(events, filter, resumeToken !== '');
}
