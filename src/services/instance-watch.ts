import { create } from '@bufbuild/protobuf';
import { type Instance, InstanceState } from '../../gen/baton/v1/instance_pb.ts';
import {
  type InstanceFilter,
  InstanceRemovedSchema,
  type WatchInstancesResponse,
  WatchInstancesResponseSchema,
} from '../../gen/baton/v1/pool_registry_pb.ts';
import { passesFilter } from './instance-filter.ts';
import type { WatchEvent } from './watch-hub.ts';
import { frameOf } from './watch-messages.ts';

/** An instance as it is at a revision, or that it is listed no more. */
export interface InstanceChange {
  readonly instance: Instance;
  readonly removed: boolean;
}

/** Turns hub events into responses; a change of an instance that the filter hides gives a removal or nothing. */
export async function* toWatchResponses(
  events: AsyncIterable<WatchEvent<InstanceChange>>,
  filter: InstanceFilter | undefined,
  resumed: boolean,
): AsyncGenerator<WatchInstancesResponse, undefined> {
  // What the reader of a resumed watch holds is not known, so there a removal is sent once for every hidden instance.
  const shown = new Set<string>();
  const removed = new Set<string>();
  let viewKnown = !resumed;
  for await (const event of events) {
    if (event.kind === 'reset') {
      shown.clear();
      removed.clear();
      viewKnown = true;
    }
    const body = responseEvent(event);
    if (body !== undefined) yield create(WatchInstancesResponseSchema, { event: body, ...positionOf(event) });
  }
  return undefined;

  function responseEvent(event: WatchEvent<InstanceChange>): WatchInstancesResponse['event'] | undefined {
    switch (event.kind) {
      case 'snapshot-item':
      case 'delta': {
        const { instance } = event.value;
        const { id } = instance;
        if (!event.value.removed && passesFilter(instance, filter)) {
          shown.add(id);
          removed.delete(id);
          return { case: 'upserted', value: instance };
        }
        if (viewKnown ? !shown.delete(id) : removed.has(id)) return undefined;
        shown.delete(id);
        removed.add(id);
        const reason = instance.state === InstanceState.GONE ? instance.stateReason : 'filtered';
        return { case: 'removed', value: create(InstanceRemovedSchema, { instanceId: id, reason }) };
      }
      default:
        return frameOf(event);
    }
  }
}

function positionOf(event: WatchEvent<InstanceChange>): { resumeToken: string; revision: bigint } {
  return { resumeToken: event.token, revision: event.revision };
}
