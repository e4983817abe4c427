import type { Instance } from '../../gen/baton/v1/instance_pb.ts';

/** A live picture of the pools: the registry in this process, or a watch on one elsewhere. */
export interface InstanceView {
  /** The instances as last known; the same array until something changes. */
  readonly snapshot: () => readonly Instance[];
  /** @returns a function that ends the subscription. */
  readonly onChange: (listener: () => void) => () => void;
  /** Tells what a request learnt about an instance, so that it is looked at soon. */
  readonly notePassive: (instanceId: string, what: 'refused' | 'ok') => void;
  /** Tells what a trial found out about reading from decode engines. */
  readonly noteBidirectional: (instanceId: string, state: 'on' | 'off') => void;
  /** Takes an instance that does harm out of use. */
  readonly drain: (instanceId: string, reason: string) => void;
}
