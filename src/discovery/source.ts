import type { Config, InstanceConfig } from '../config/config.ts';
import type { LogFields } from '../obs/log.ts';

/** Takes what a source sees. */
export interface SourceSink {
  /** The instances that the source names now, all of them; what it named before and does not name now is to drain. */
  view(instances: readonly InstanceConfig[]): void;
  /** Something that whoever runs the source should know; the last view stays. */
  warn(fields: LogFields, message: string): void;
}

/** A place that tells which instances there are. */
export interface InstanceSource {
  /** Kebab-case; instances belong to the source of this name. */
  readonly name: string;
  /**
   * Follows the place until `signal` aborts, and tells each new view. A place that cannot be read tells none: the last view
   * is kept. Resolves when nothing of it runs any more.
   */
  run(sink: SourceSink, signal: AbortSignal): Promise<void>;
}

/** What a source may be made of. */
export interface SourceParts {
  readonly config: Config;
  /** The instances of the settings, or the simulated ones in their place. */
  readonly instances: readonly InstanceConfig[];
  /** Connectors that this build knows. */
  readonly connectors: readonly string[];
}

/** Makes a source, if the settings want it. */
export type MakeSource = (parts: SourceParts) => InstanceSource | undefined | Promise<InstanceSource | undefined>;
