import { join } from 'node:path';
import type { Problem } from '../config/problem.ts';
import { connectorLaunchOf, type EnginePort, LOOPBACK } from './engine-flags.ts';
import type { LaunchInstance, LaunchRole, LaunchSettings } from './topology.ts';

/** One process to start. */
export interface ProcessSpec {
  /** `prefiller1`, `decoder1`, …, `proxy`. */
  readonly name: string;
  readonly kind: LaunchRole | 'proxy';
  readonly command: readonly string[];
  /** Variables on top of the environment of `baton launch`. */
  readonly env: Readonly<Record<string, string>>;
  readonly logFile: string;
  /** Answers GET with 2xx as soon as the process can serve. */
  readonly readyUrl: string;
}

/** A port that must be free, with what to change when it is not. */
export interface PortUse {
  readonly host: string;
  readonly port: number;
  /** `decoder1's side channel`. */
  readonly what: string;
  readonly where: string;
}

/** Everything that will be started and written, as plain data. */
export interface LaunchPlan {
  readonly engines: readonly ProcessSpec[];
  readonly proxy: ProcessSpec;
  readonly files: readonly { readonly path: string; readonly text: string }[];
  readonly ports: readonly PortUse[];
  /** Base URL of the OpenAI API, as seen from this machine. */
  readonly url: string;
}

/** What planning knows of the machine. */
export interface PlanContext {
  /** The command that runs this baton; a subcommand is appended. */
  readonly self: readonly string[];
  readonly env: Readonly<Record<string, string | undefined>>;
  /** GPUs in the order in which they are dealt out, as CUDA_VISIBLE_DEVICES names them. */
  readonly gpus: readonly string[];
}

/** Engines on a CPU share its cores unless the user pins them; UCX does without CUDA. */
const CPU_DEFAULTS = { VLLM_CPU_OMP_THREADS_BIND: 'nobind', UCX_TLS: 'tcp,sm,self' } as const;

/** Turns settings into processes, files and ports. */
export function planLaunch(settings: LaunchSettings, context: PlanContext): LaunchPlan {
  const connector = connectorLaunchOf(settings.connector);
  const gpus = new GpuDealer(settings, context.gpus);
  const ordinals = { prefill: 0, decode: 0 };
  const engines = settings.instances.map((instance) => {
    const flags = connector.engine(instance, ++ordinals[instance.role], settings);
    const defaults = { ...flags.defaults, ...(settings.device === 'cpu' ? CPU_DEFAULTS : {}) };
    const spec: ProcessSpec = {
      name: instance.name,
      kind: instance.role,
      command: settings.sim
        ? simCommand(instance, settings, context, connector.sim(instance, settings))
        : vllmCommand(instance, settings, flags.args),
      env: settings.sim
        ? instance.env
        : { ...gpus.env(instance), ...unlessSet(defaults, context.env), ...flags.env, ...instance.env },
      logFile: join(settings.logDir, `${instance.name}.log`),
      readyUrl: `http://${LOOPBACK}:${instance.port}/health`,
    };
    const http = { what: 'HTTP port', first: instance.port, count: 1, where: instance.where.port };
    return { spec, file: settings.sim ? undefined : flags.file, ports: usesOf(instance.name, [http, ...flags.ports]) };
  });
  const url = `http://${clientHost(settings.host)}:${settings.port}`;
  return {
    engines: engines.map(({ spec }) => spec),
    proxy: {
      name: 'proxy',
      kind: 'proxy',
      command: batonCommand(settings, context, connector.baton(settings)),
      env: {},
      logFile: join(settings.logDir, 'proxy.log'),
      readyUrl: `${url}/readiness`,
    },
    files: engines.flatMap(({ file }) => (file === undefined ? [] : [file])),
    ports: [...engines.flatMap(({ ports }) => ports), ...batonUses(settings, connector.batonPorts(settings))],
    url,
  };
}

/** Mistakes that only show in the whole: engines that do not fit each other, ports that overlap or do not exist. */
export function findPlanProblems(settings: LaunchSettings, plan: LaunchPlan): readonly Problem[] {
  const problems: Problem[] = [...connectorLaunchOf(settings.connector).mismatches(settings)];
  const taken = new Map<number, PortUse>();
  const reported = new Set<string>();
  for (const use of plan.ports) {
    const other = taken.get(use.port);
    if (other === undefined) taken.set(use.port, use);
    if (use.port > 65_535 && !reported.has(use.what)) {
      reported.add(use.what);
      problems.push({ where: use.where, message: `${use.what} would be ${use.port}, beyond 65535; start lower` });
    } else if (other !== undefined && !reported.has(use.what)) {
      reported.add(use.what);
      problems.push({
        where: use.where,
        message: `port ${use.port} is ${use.what} and ${other.what}; move one of them (${other.where})`,
      });
    }
  }
  return problems;
}

/** How many GPUs the engines need: those that are named, and one for each rank of the others. */
export function countGpus(settings: LaunchSettings): number {
  const named = new Set(settings.instances.flatMap(({ gpus }) => gpus ?? []));
  const unnamed = settings.instances.filter(({ gpus }) => gpus === undefined);
  return named.size + unnamed.reduce((sum, { tensorParallelSize }) => sum + tensorParallelSize, 0);
}

function vllmCommand(instance: LaunchInstance, settings: LaunchSettings, args: readonly string[]): readonly string[] {
  const { tensorParallelSize: ranks } = instance;
  return [
    settings.python,
    ...['-m', 'vllm.entrypoints.openai.api_server'],
    ...['--model', settings.model],
    ...['--host', LOOPBACK, '--port', String(instance.port)],
    ...(ranks > 1 ? ['--tensor-parallel-size', String(ranks)] : []),
    ...args,
    // argparse takes the last of two: the user's words win.
    ...settings.engineArgs,
    ...instance.args,
  ];
}

function simCommand(
  instance: LaunchInstance,
  settings: LaunchSettings,
  context: PlanContext,
  own: readonly string[],
): readonly string[] {
  return [
    ...context.self,
    'sim',
    ...['--role', instance.role],
    ...['--port', String(instance.port), '--model', settings.model, '--connector', settings.connector],
    ...own,
    // Slow enough that a stream is seen to grow.
    ...['--fixed-ms', '5', '--prefill-ms-per-token', '0.05', '--decode-ms-per-token', '5'],
    ...settings.engineArgs,
    ...instance.args,
  ];
}

function batonCommand(settings: LaunchSettings, context: PlanContext, engines: readonly string[]): readonly string[] {
  // What drains must be through before the process is killed.
  const drainMs = Math.max(1, Math.floor(settings.stopTimeoutMs * 0.8));
  return [
    ...context.self,
    'serve',
    ...['--host', settings.host, '--port', String(settings.port)],
    ...['--rpc-port', String(settings.rpcPort), '--admin-port', String(settings.adminPort)],
    ...['--kv-connector', settings.connector],
    ...engines,
    ...(settings.stopTimeoutMs === 0 ? [] : ['--drain-timeout', `${drainMs}ms`]),
    // No load balancer stands before it.
    ...['--drain-settle', '0'],
    ...settings.batonArgs,
  ];
}

function unlessSet(
  defaults: Readonly<Record<string, string>>,
  env: PlanContext['env'],
): Readonly<Record<string, string>> {
  return Object.fromEntries(Object.entries(defaults).filter(([name]) => (env[name] ?? '') === ''));
}

function usesOf(name: string, ports: readonly EnginePort[]): readonly PortUse[] {
  return ports.flatMap(({ what, first, count, where }) =>
    Array.from({ length: count }, (_, i) => ({ host: LOOPBACK, port: first + i, what: `${name}'s ${what}`, where })),
  );
}

function batonUses(settings: LaunchSettings, more: readonly EnginePort[]): readonly PortUse[] {
  const own: readonly (readonly [string, string, LaunchSettings['rpcPort'], string])[] = [
    ['port', settings.host, settings.port, '--port'],
    ['RPC port', LOOPBACK, settings.rpcPort, '--rpc-port'],
    ['admin port', LOOPBACK, settings.adminPort, '--admin-port'],
  ];
  return [
    ...own.flatMap(([what, host, port, where]) =>
      typeof port === 'number' && port > 0 ? [{ host, port, what: `baton's ${what}`, where }] : [],
    ),
    ...usesOf('baton', more),
  ];
}

/** A listener on every address is reached by loopback. */
function clientHost(host: string): string {
  if (host === '0.0.0.0') return LOOPBACK;
  if (host === '::') return '[::1]';
  return host.includes(':') ? `[${host}]` : host;
}

/** Deals the GPUs out in order, without those that an entry of the topology names. */
class GpuDealer {
  readonly #device: LaunchSettings['device'];
  readonly #free: string[];

  constructor(settings: LaunchSettings, gpus: readonly string[]) {
    this.#device = settings.device;
    const named = settings.instances.flatMap(({ gpus: own }) => own ?? []);
    this.#free = gpus.filter((gpu) => !named.includes(gpu));
  }

  env(instance: LaunchInstance): Readonly<Record<string, string>> {
    if (this.#device === 'cpu') return {};
    const dealt = instance.gpus ?? this.#free.splice(0, instance.tensorParallelSize);
    return { CUDA_VISIBLE_DEVICES: dealt.join(',') };
  }
}
