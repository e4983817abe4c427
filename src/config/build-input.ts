import type { Config } from './config.ts';
import type { EngineChoice } from './engines.ts';
import type { Problem } from './problem.ts';
import type { FileConfig } from './schema.ts';

/** The names that this build of baton implements. */
export interface Known {
  readonly policies: readonly string[];
  readonly connectors: readonly string[];
  readonly stores: readonly string[];
}

/** What a checked file becomes settings with. */
export interface BuildInput {
  readonly file: FileConfig;
  /** How many of `file.instances` were written in the file; the others come from `engines`. */
  readonly fileInstances: number;
  readonly engines: EngineChoice;
  readonly env: Readonly<Record<string, string | undefined>>;
  readonly known: Known;
  readonly terminal: boolean;
  locate(path: readonly PropertyKey[]): string;
}

/** The settings with the mistakes that only show when several keys are seen together. */
export interface Built {
  readonly config: Config;
  readonly problems: readonly Problem[];
  readonly warnings: readonly Problem[];
}

/** Where mistakes and doubts are told. */
export interface Sink {
  readonly problems: Problem[];
  readonly warnings: Problem[];
}
