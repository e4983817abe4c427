import { join } from 'node:path';
import type { Problem } from '../config/problem.ts';
import { lmcacheYaml } from './lmcache-yaml.ts';
import type { LaunchInstance, LaunchSettings } from './topology.ts';

/** Address on which everything that is launched talks to each other. */
export const LOOPBACK = '127.0.0.1';

/** What a connector adds to one engine. */
export interface EngineFlags {
  readonly args: readonly string[];
  /** Variables that the engine needs; `defaults` hold unless the user's environment has them. */
  readonly env: Readonly<Record<string, string>>;
  readonly defaults?: Readonly<Record<string, string>>;
  /** A configuration file, written beside the logs; `env` names it by `path`. */
  readonly file?: { readonly path: string; readonly text: string };
  /** Ports beside the HTTP port. */
  readonly ports: readonly EnginePort[];
}

/** A range of ports that an engine opens, one per rank. */
export interface EnginePort {
  readonly what: string;
  readonly first: number;
  readonly count: number;
  readonly where: string;
}

/** What is known of starting engines with one connector. */
interface ConnectorLaunch {
  /** Python modules that must be there. */
  readonly modules: readonly string[];
  engine(instance: LaunchInstance, ordinal: number, settings: LaunchSettings): EngineFlags;
  /** The arguments of `baton sim` for the same engine. */
  sim(instance: LaunchInstance, settings: LaunchSettings): readonly string[];
  /** The arguments of `baton serve` that name the engines. */
  baton(settings: LaunchSettings): readonly string[];
  /** Ports that baton opens for this connector. */
  batonPorts(settings: LaunchSettings): readonly EnginePort[];
  /** Engines that cannot work with each other. */
  mismatches(settings: LaunchSettings): readonly Problem[];
}

const nixl: ConnectorLaunch = {
  modules: ['vllm', 'nixl'],
  engine: (instance) => ({
    args: kvTransferConfig({
      kv_connector: 'NixlConnector',
      kv_role: instance.role === 'prefill' ? 'kv_producer' : 'kv_consumer',
      // Both ways: the next turn's prefill engine reads what the decode engine holds.
      kv_connector_extra_config: { bidirectional_kv_xfer: true },
    }),
    env: {
      VLLM_NIXL_SIDE_CHANNEL_HOST: LOOPBACK,
      VLLM_NIXL_SIDE_CHANNEL_PORT: String(instance.sidePort),
    },
    ports: [portsOf(instance, 'side channel', instance.sidePort, instance.where.side_port)],
  }),
  sim: ({ sidePort }) => ['--side-port', String(sidePort), '--bidirectional'],
  baton: (settings) => [...urlArgs(settings, 'prefill'), ...urlArgs(settings, 'decode')],
  batonPorts: () => [],
  mismatches: ({ instances, sim }) => [
    ...instances
      .filter(({ tensorParallelSize }) => sim && tensorParallelSize > 1)
      .slice(0, 1)
      .map(({ name, tensorParallelSize, where }) => ({
        where: where.tensor_parallel_size,
        message: `simulated engines (--sim) with nixl have one rank, and ${name} would have ${tensorParallelSize}; give it one, or use --connector lmcache`,
      })),
    ...instances
      .filter(({ tensorParallelSize: size }) =>
        instances.some(({ tensorParallelSize: other }) => size % other !== 0 && other % size !== 0),
      )
      .slice(0, 1)
      .map(({ name, tensorParallelSize, where }) => ({
        where: where.tensor_parallel_size,
        message: `tensor_parallel_size ${tensorParallelSize} of ${name} must divide that of every other engine, or be a multiple of it`,
      })),
  ],
};

const lmcache: ConnectorLaunch = {
  modules: ['vllm', 'lmcache', 'nixl'],
  engine: (instance, ordinal, settings) => {
    const prefill = instance.role === 'prefill';
    const path = join(settings.logDir, `${instance.name}.lmcache.yaml`);
    return {
      args: [
        // LMCache's example runs without CUDA graphs and without vLLM's own prefix cache.
        '--enforce-eager',
        '--no-enable-prefix-caching',
        ...kvTransferConfig({
          kv_connector: 'LMCacheConnectorV1',
          kv_role: prefill ? 'kv_producer' : 'kv_consumer',
          kv_connector_extra_config: {
            discard_partial_chunks: false,
            lmcache_rpc_port: `${prefill ? 'producer' : 'consumer'}${ordinal}`,
            // The look-up leaves out the appended first token, so that the last chunk has the hash that P stored.
            ...(prefill ? {} : { skip_last_n_tokens: 1 }),
          },
        }),
      ],
      env: {
        LMCACHE_CONFIG_FILE: path,
        // Chunk keys are Python hashes: they are equal only with the same seed everywhere.
        PYTHONHASHSEED: '0',
        VLLM_ENABLE_V1_MULTIPROCESSING: '1',
        VLLM_WORKER_MULTIPROC_METHOD: 'spawn',
      },
      ...(settings.device === 'cuda' ? { defaults: { UCX_TLS: 'cuda_ipc,cuda_copy,tcp' } } : {}),
      file: { path, text: lmcacheYaml(instance, settings, LOOPBACK) },
      ports: prefill
        ? []
        : [
            portsOf(instance, 'LMCache handshake port', instance.initPort, instance.where.init_port),
            portsOf(instance, 'LMCache allocation port', instance.allocPort, instance.where.alloc_port),
          ],
    };
  },
  sim: (instance, { noticePort }) => [
    ...['--ranks', String(instance.tensorParallelSize)],
    ...(instance.role === 'prefill'
      ? ['--notices', `tcp://${LOOPBACK}:${noticePort}`]
      : [
          ...['--init-port', rankPorts(instance, instance.initPort)],
          ...['--alloc-port', rankPorts(instance, instance.allocPort)],
        ]),
  ],
  baton: (settings) => {
    const first = settings.instances.find(({ role }) => role === 'decode');
    if (first === undefined) return [];
    return [
      ...urlArgs(settings, 'prefill'),
      ...urlArgs(settings, 'decode'),
      ...['--decoder-init-port', rankPorts(first, first.initPort)],
      ...['--decoder-alloc-port', rankPorts(first, first.allocPort)],
      ...['--proxy-host', LOOPBACK],
      ...['--proxy-port', String(settings.noticePort)],
    ];
  },
  batonPorts: ({ noticePort }) => [{ what: 'notice port', first: noticePort, count: 1, where: '--proxy-port' }],
  mismatches: ({ instances }) => [...rankMismatches(instances), ...gapsBetweenDecoders(instances)],
};

/** Every connector that can be launched, by its configuration name. A new one is one entry here. */
const CONNECTOR_LAUNCHES = { nixl, lmcache } as const satisfies Record<string, ConnectorLaunch>;

/** Names of the connectors that can be launched. */
export const LAUNCH_CONNECTORS: readonly string[] = Object.keys(CONNECTOR_LAUNCHES);

/** What is known of a connector; its name was checked against {@link LAUNCH_CONNECTORS} before. */
export function connectorLaunchOf(name: string): ConnectorLaunch {
  return name === 'lmcache' ? CONNECTOR_LAUNCHES.lmcache : CONNECTOR_LAUNCHES.nixl;
}

function kvTransferConfig(config: Readonly<Record<string, unknown>>): readonly string[] {
  return ['--kv-transfer-config', JSON.stringify(config)];
}

function portsOf(instance: LaunchInstance, what: string, first: number, where: string): EnginePort {
  return { what, first, count: instance.tensorParallelSize, where };
}

function rankPorts({ tensorParallelSize }: LaunchInstance, first: number): string {
  return Array.from({ length: tensorParallelSize }, (_, rank) => first + rank).join(',');
}

function urlArgs(settings: LaunchSettings, role: 'prefill' | 'decode'): readonly string[] {
  return settings.instances
    .filter((instance) => instance.role === role)
    .flatMap(({ port }) => [`--${role}`, `http://${LOOPBACK}:${port}`]);
}

/** LMCache's ranks talk to their like: rank i of P writes to port i of D, and one notice is awaited from each. */
function rankMismatches(instances: readonly LaunchInstance[]): readonly Problem[] {
  const [first] = instances;
  const other = instances.find(({ tensorParallelSize }) => tensorParallelSize !== first?.tensorParallelSize);
  if (first === undefined || other === undefined) return [];
  return [
    {
      where: other.where.tensor_parallel_size,
      message: `with lmcache every engine needs the same tensor_parallel_size, ${first.name} has ${first.tensorParallelSize} and ${other.name} ${other.tensorParallelSize}`,
    },
  ];
}

/** baton is told the first decode engine's ports and counts the others up, by as many as there are ranks. */
function gapsBetweenDecoders(instances: readonly LaunchInstance[]): readonly Problem[] {
  const decoders = instances.filter(({ role }) => role === 'decode');
  const [first] = decoders;
  if (first === undefined) return [];
  return decoders.flatMap(({ name, where, initPort, allocPort, tensorParallelSize: ranks }, i) => {
    const wanted = [
      ['init_port', initPort, first.initPort + i * ranks],
      ['alloc_port', allocPort, first.allocPort + i * ranks],
    ] as const;
    return wanted
      .filter(([, have, want]) => have !== want)
      .map(([key, have, want]) => ({
        where: where[key],
        message: `with lmcache these ports count up from the first decode engine's, so ${key} of ${name} is ${want}, got ${have}`,
      }));
  });
}
