import { create } from '@bufbuild/protobuf';
import { type Instance, InstanceSchema, InstanceState, Role } from '../../gen/baton/v1/instance_pb.ts';
import type { InstanceView } from '../../src/services/instance-view.ts';

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

/** The pools, as the test sets them. */
export class Pools implements InstanceView {
  readonly noted: string[] = [];
  readonly #listeners = new Set<() => void>();
  #instances: readonly Instance[];

  constructor(instances: readonly Instance[]) {
    this.#instances = instances;
  }

  readonly snapshot = () => this.#instances;
  readonly onChange = (listener: () => void) => {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  };
  readonly notePassive = (id: string, what: string) => {
    this.noted.push(`${id} ${what}`);
  };
  readonly noteBidirectional = (id: string, state: string) => {
    this.noted.push(`${id} ${state}`);
  };
  readonly noteLearnt = (id: string, { handles }: { readonly handles: string }) => {
    this.noted.push(`${id} ${handles}`);
  };
  readonly drain = (id: string) => {
    this.noted.push(`${id} drain`);
  };
  get listeners(): number {
    return this.#listeners.size;
  }
  set(instances: readonly Instance[]): void {
    this.#instances = instances;
    for (const listener of this.#listeners) listener();
  }
}
