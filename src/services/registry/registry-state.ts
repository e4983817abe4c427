import type { InstanceSpec } from '../../core/instance-spec.ts';

/** An instance as it is kept over a restart: without headers and key, which the settings have. */
export type SavedSpec = Omit<InstanceSpec, 'headers' | 'apiKey'>;

/** A registered instance as it is kept over a restart. */
export interface SavedRegistration {
  readonly spec: SavedSpec;
  /** Milliseconds; absent for one that lives until it is removed. */
  readonly leaseMs?: number | undefined;
  readonly generation: number;
  readonly engineId: string;
}

/** What of a registry outlives its process. */
export interface RegistryState {
  readonly registered: readonly SavedRegistration[];
  /** By source: what it named last. */
  readonly views: Readonly<Record<string, readonly SavedSpec[]>>;
  /** Why an operator, or baton itself, drained an instance, by its id. */
  readonly drains: Readonly<Record<string, string>>;
  /** By source: ids that it names and an operator removed. */
  readonly dismissed: Readonly<Record<string, readonly string[]>>;
  /** The newest generation of ids that were registered. */
  readonly generations: Readonly<Record<string, number>>;
}

/** The part of a description that is kept. */
export function savedSpec({ headers: _, apiKey: __, ...spec }: InstanceSpec): SavedSpec {
  return spec;
}
