import { create } from '@bufbuild/protobuf';
import { type Instance, InstanceSchema, InstanceState, Role } from '../../gen/baton/v1/instance_pb.ts';

/** Members that differ from the default. */
export type InstanceChanges = Partial<Omit<Instance, '$typeName' | '$unknown'>>;

/** A prefill instance as a registry would list it; defaults: READY, nixl, serving the model `m`. */
export const prefillOf = (id: string, changes: InstanceChanges = {}) => instanceOf(id, Role.PREFILL, changes);
/** The same for decode. */
export const decodeOf = (id: string, changes: InstanceChanges = {}) => instanceOf(id, Role.DECODE, changes);
/** The same for an aggregated engine. */
export const bothOf = (id: string, changes: InstanceChanges = {}) => instanceOf(id, Role.BOTH, changes);

function instanceOf(id: string, role: Role, changes: InstanceChanges): Instance {
  const instance = create(InstanceSchema, {
    id,
    url: `http://${id}`,
    role,
    connector: 'nixl',
    state: InstanceState.READY,
    modelsKnown: true,
    models: [{ id: 'm' }],
  });
  return Object.assign(instance, changes);
}
