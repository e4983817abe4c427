import { choiceParser, countParser, parsePort, type ValueParser } from '../config/values.ts';
import { isRecord } from '../config/yaml-source.ts';
import { parseEngineWords } from './passed-words.ts';
import type { InstancePort, LaunchInstance, LaunchRole } from './topology.ts';
import { type Found, type MappingReader, parseText, parseTexts } from './value-reader.ts';

/** Where the ports count from that nobody sets per engine. */
export interface PortBases {
  readonly side: Found<number>;
  readonly init: Found<number>;
  readonly alloc: Found<number>;
}

/** The HTTP ports of a pool, and the flag that chose them. */
export interface PoolPorts {
  readonly ports: readonly number[];
  readonly where: string;
}

const FIRST_PORT = { prefill: 7100, decode: 7200 } as const;
const NAMES = { prefill: 'prefiller', decode: 'decoder' } as const;
const INSTANCE_KEYS = [
  'role',
  'name',
  'port',
  'side_port',
  'init_port',
  'alloc_port',
  'tensor_parallel_size',
  'gpus',
  'args',
  'env',
];

/** The engines of `--prefill` and `--decode`: prefiller1 … decoder1 …, each with as many ports of a kind as ranks. */
export function instancesOfFlags(
  pools: Readonly<Record<LaunchRole, PoolPorts>>,
  tensorParallel: Found<number>,
  bases: PortBases,
): readonly LaunchInstance[] {
  const counter = new PortCounter(bases);
  const tensorParallelSize = tensorParallel.value;
  return (['prefill', 'decode'] as const).flatMap((role) =>
    pools[role].ports.map((port, i): LaunchInstance => {
      const next = counter.take(role, tensorParallelSize);
      return {
        name: `${NAMES[role]}${i + 1}`,
        role,
        port,
        sidePort: next.side_port,
        initPort: next.init_port,
        allocPort: next.alloc_port,
        tensorParallelSize,
        gpus: undefined,
        args: [],
        env: {},
        where: { port: pools[role].where, tensor_parallel_size: tensorParallel.where, ...counter.where },
      };
    }),
  );
}

/** The engines under `instances` of a topology file; what an entry leaves out is filled in as for the flags. */
export function instancesOfFile(
  file: MappingReader,
  tensorParallel: Found<number>,
  bases: PortBases,
): readonly LaunchInstance[] {
  const list = file.read('instances', parseList, []);
  const counter = new PortCounter(bases);
  const seen = { prefill: 0, decode: 0 };
  const names = new Set<string>();
  const owners = new Map<string, string>();
  const instances = list.value.flatMap((item, i): readonly LaunchInstance[] => {
    const reader = file.item('instances', i, item);
    if (reader === undefined) return [];
    reader.refuseOthers(INSTANCE_KEYS);
    if (!reader.has('role')) {
      reader.complain('role is missing; write role: prefill or role: decode');
      return [];
    }
    const role = reader.read('role', choiceParser(['prefill', 'decode']), 'prefill').value;
    const index = seen[role]++;
    const name = reader.read('name', parseName, `${NAMES[role]}${index + 1}`);
    if (names.has(name.value)) reader.complain(`"${name.value}" is used twice; give one of them another name`, 'name');
    names.add(name.value);
    const ranks = reader.read('tensor_parallel_size', countParser(1, 1024), tensorParallel.value);
    const size = ranks.value;
    const gpus = reader.read('gpus', parseGpus, undefined).value;
    if (gpus !== undefined && gpus.length !== size)
      reader.complain(`give ${size}, as many as tensor_parallel_size, got ${gpus.length}`, 'gpus');
    for (const gpu of gpus ?? []) {
      const owner = owners.get(gpu);
      if (owner === undefined) owners.set(gpu, name.value);
      else if (owner === name.value) reader.complain(`${gpu} is given twice; each rank needs a GPU of its own`, 'gpus');
      else reader.complain(`${gpu} is a GPU of ${owner} already; give each engine its own`, 'gpus');
    }
    const next = counter.take(role, size);
    const port = reader.read('port', parsePort, FIRST_PORT[role] + index);
    const own = (key: Exclude<InstancePort, 'port'>): Found<number> => {
      const found = reader.read(key, parsePort, next[key]);
      return found.given ? found : { ...found, where: counter.where[key] };
    };
    const side = own('side_port');
    const init = own('init_port');
    const alloc = own('alloc_port');
    return [
      {
        name: name.value,
        role,
        port: port.value,
        sidePort: side.value,
        initPort: init.value,
        allocPort: alloc.value,
        tensorParallelSize: size,
        gpus,
        args: reader.read('args', parseEngineWords, []).value,
        env: reader.read('env', parseEnv, {}).value,
        where: {
          port: port.where,
          side_port: side.where,
          init_port: init.where,
          alloc_port: alloc.where,
          tensor_parallel_size: ranks.given ? ranks.where : tensorParallel.where,
        },
      },
    ];
  });
  for (const role of ['prefill', 'decode'] as const) {
    if (seen[role] === 0)
      file.complain(`needs at least one entry with role: ${role}`, file.has('instances') ? 'instances' : undefined);
  }
  return instances;
}

/** Hands out ports in steps of the number of ranks, so that no two engines ever share one. */
class PortCounter {
  readonly where: Readonly<Record<Exclude<InstancePort, 'port'>, string>>;
  #side: number;
  #init: number;
  #alloc: number;

  constructor({ side, init, alloc }: PortBases) {
    this.where = { side_port: side.where, init_port: init.where, alloc_port: alloc.where };
    this.#side = side.value;
    this.#init = init.value;
    this.#alloc = alloc.value;
  }

  take(role: LaunchRole, ranks: number): Readonly<Record<Exclude<InstancePort, 'port'>, number>> {
    const taken = { side_port: this.#side, init_port: this.#init, alloc_port: this.#alloc };
    this.#side += ranks;
    if (role === 'decode') {
      this.#init += ranks;
      this.#alloc += ranks;
    }
    return taken;
  }
}

const parseList: ValueParser<readonly unknown[]> = (raw) =>
  Array.isArray(raw)
    ? { kind: 'ok', value: raw }
    : { kind: 'bad', message: 'expected a list with one entry per engine, like "- {role: prefill, port: 7100}"' };

// The name becomes a file name.
const parseName: ValueParser<string> = (raw) => {
  const text = parseText(raw);
  if (text.kind === 'ok' && /^[A-Za-z0-9][A-Za-z0-9._-]*$/.test(text.value) && text.value !== 'proxy') return text;
  return { kind: 'bad', message: 'expected letters, digits, ".", "_" and "-", and not "proxy"' };
};

const parseGpus: ValueParser<readonly string[] | undefined> = (raw) => {
  const texts = parseTexts(typeof raw === 'string' ? raw.split(',') : raw);
  return texts.kind === 'bad' ? texts : { kind: 'ok', value: texts.value.map((text) => text.trim()) };
};

const parseEnv: ValueParser<Readonly<Record<string, string>>> = (raw) => {
  if (!isRecord(raw)) return { kind: 'bad', message: 'expected names with values, like {NCCL_DEBUG: INFO}' };
  const env: Record<string, string> = {};
  for (const [name, value] of Object.entries(raw)) {
    const text = parseTexts([value]);
    if (text.kind === 'bad') return { kind: 'bad', message: `${name} needs a text` };
    env[name] = text.value[0] ?? '';
  }
  return { kind: 'ok', value: env };
};
