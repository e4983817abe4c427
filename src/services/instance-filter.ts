import { type Instance, InstanceState, Role } from '../../gen/baton/v1/instance_pb.ts';
import type { InstanceFilter } from '../../gen/baton/v1/pool_registry_pb.ts';

/** Whether `instance` passes `filter`; an absent filter passes all that are not GONE. */
export function passesFilter(instance: Instance, filter: InstanceFilter | undefined): boolean {
  const states = filter?.states ?? [];
  if (states.length === 0 ? instance.state === InstanceState.GONE : !states.includes(instance.state)) return false;
  if (filter === undefined) return true;
  if (filter.role !== Role.UNSPECIFIED && instance.role !== filter.role && instance.role !== Role.BOTH) return false;
  // Until an engine has told its models it is taken to serve any.
  if (filter.model !== '' && instance.modelsKnown && !instance.models.some(({ id }) => id === filter.model))
    return false;
  return Object.entries(filter.labels).every(([name, value]) => instance.labels[name] === value);
}
