import type { Instance } from '../../gen/baton/v1/instance_pb.ts';

/** What an engine's replies showed of it, in one life. */
export interface LearntOfEngine {
  /** Which of them carry handles; empty while unknown. */
  readonly handles: 'all' | 'whole' | 'none' | '';
  /** KV groups of its handles; 0 while it gave none. */
  readonly kvGroups: number;
}

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
  /** Tells what replies showed of an engine, if it is still that generation. */
  readonly noteLearnt: (instanceId: string, learnt: LearntOfEngine, generation: number) => void;
  /** Takes an instance that does harm out of use. */
  readonly drain: (instanceId: string, reason: string) => void;
}
