import type { ListenPort } from '../config/values.ts';

/** Which pool an engine is started for. */
export type LaunchRole = 'prefill' | 'decode';

/** One engine to start, with all of its ports. */
export interface LaunchInstance {
  /** Unique; the log is `<name>.log`. */
  readonly name: string;
  readonly role: LaunchRole;
  /** HTTP port. */
  readonly port: number;
  /** NIXL side channel, the first of `tensorParallelSize` ports. */
  readonly sidePort: number;
  /** LMCache handshake and allocation ports, the first of `tensorParallelSize` each; only decode engines open them. */
  readonly initPort: number;
  readonly allocPort: number;
  readonly tensorParallelSize: number;
  /** Names as in CUDA_VISIBLE_DEVICES; undefined lets the plan deal them out. */
  readonly gpus: readonly string[] | undefined;
  /** Arguments of this engine, behind those of all engines. */
  readonly args: readonly string[];
  readonly env: Readonly<Record<string, string>>;
  /** Says where a port of this engine or its number of ranks was chosen: a flag, or a place in the topology file. */
  readonly where: Readonly<Record<InstancePort | 'tensor_parallel_size', string>>;
}

/** The ports of an engine that can be chosen. */
export type InstancePort = 'port' | 'side_port' | 'init_port' | 'alloc_port';

/** What the benchmark sends. */
export interface BenchSettings {
  readonly prompts: number;
  /** About. */
  readonly inputTokens: number;
  readonly outputTokens: number;
  /** Requests a second; 0 sends all at once. */
  readonly rate: number;
}

/** Everything that `baton launch` was told, defaults filled in. */
export interface LaunchSettings {
  readonly instances: readonly LaunchInstance[];
  readonly connector: string;
  readonly model: string;
  readonly device: 'cuda' | 'cpu';
  readonly python: string;
  readonly engineArgs: readonly string[];
  readonly batonArgs: readonly string[];
  readonly sim: boolean;
  readonly host: string;
  readonly port: number;
  readonly rpcPort: ListenPort;
  readonly adminPort: ListenPort;
  /** Where LMCache's prefill engines report to; used by that connector alone. */
  readonly noticePort: number;
  readonly logDir: string;
  readonly readyTimeoutMs: number;
  readonly stopTimeoutMs: number;
  readonly dryRun: boolean;
  /** Undefined when no benchmark was asked for. */
  readonly bench: BenchSettings | undefined;
}
