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

/** Turns hub events into responses; a change of an instance that the filter hides gives a removal or nothing. */
export async function* toWatchResponses(
  events: AsyncIterable<WatchEvent<Instance>>,
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

  function responseEvent(event: WatchEvent<Instance>): WatchInstancesResponse['event'] | undefined {
    switch (event.kind) {
      case 'snapshot-item':
      case 'delta': {
        const { id } = event.value;
        if (passesFilter(event.value, filter)) {
          shown.add(id);
          removed.delete(id);
          return { case: 'upserted', value: event.value };
        }
        if (viewKnown ? !shown.delete(id) : removed.has(id)) return undefined;
        shown.delete(id);
        removed.add(id);
        const reason = event.value.state === InstanceState.GONE ? event.value.stateReason : 'filtered';
        return { case: 'removed', value: create(InstanceRemovedSchema, { instanceId: id, reason }) };
      }
      default:
        return frameOf(event);
    }
  }
}

function positionOf(event: WatchEvent<Instance>): { resumeToken: string; revision: bigint } {
  return { resumeToken: event.token, revision: event.revision };
}
