import type { Problem } from '../config/problem.ts';
import {
  choiceParser,
  countParser,
  listParser,
  parseDuration,
  parseListenHost,
  parseListenPort,
  parsePort,
  show,
  unknownName,
  type ValueParser,
} from '../config/values.ts';
import { parseYamlSource } from '../config/yaml-source.ts';
import { LAUNCH_FLAGS, type LaunchFlagValues } from './flags.ts';
import { instancesOfFile, instancesOfFlags, type PortBases } from './instances.ts';
import { parseBatonWords, parseEngineWords } from './passed-words.ts';
import type { BenchSettings, LaunchInstance, LaunchSettings } from './topology.ts';
import { type Found, MappingReader, parseText } from './value-reader.ts';

/** What the settings are made from. */
export interface SettingsInput {
  readonly flags: LaunchFlagValues;
  /** The file that `--topology` names. */
  readonly file?: { readonly name: string; readonly text: string };
  /** Connectors that can be launched, and those that the simulated engines speak. */
  readonly connectors: readonly string[];
  readonly simConnectors: readonly string[];
}

/** The settings, or every mistake that was found. */
export type SettingsResult =
  | { readonly kind: 'ok'; readonly settings: LaunchSettings }
  | { readonly kind: 'error'; readonly problems: readonly Problem[] };

const FILE_KEYS = [
  'instances',
  'engine_args',
  'baton_args',
  ...LAUNCH_FLAGS.filter(({ inFile }) => inFile === true).map(({ flag }) => keyOf(flag)),
];

/** Reads flags over the topology file over the defaults, which are the 2P2D of LMCache's xPyD example. */
export function resolveSettings(input: SettingsInput): SettingsResult {
  const problems: Problem[] = [];
  const file = input.file === undefined ? undefined : openFile(input.file, problems);
  if (input.file !== undefined && file === undefined) return { kind: 'error', problems };
  const pick = <T>(flag: string, parse: ValueParser<T>, fallback: T): Found<T> =>
    readSetting(input.flags, file, flag, parse, fallback, problems);
  const isSet = (flag: string): boolean => input.flags[flag] !== undefined;
  const words = (whose: 'engine' | 'baton', parse: ValueParser<readonly string[]>): readonly string[] => {
    const byFlag = parse(input.flags[`${whose}-arg`] ?? []);
    if (byFlag.kind === 'bad') problems.push({ where: `--${whose}-arg`, message: byFlag.message });
    const inFile = file?.read(`${whose}_args`, parse, []).value ?? [];
    return byFlag.kind === 'bad' ? inFile : [...inFile, ...byFlag.value];
  };

  const sim = isSet('sim');
  const connector = pick('connector', connectorParser(input.connectors), 'nixl');
  if (sim && !input.simConnectors.includes(connector.value)) {
    const others = input.connectors.filter((name) => input.simConnectors.includes(name));
    problems.push({
      where: connector.where,
      message: `simulated engines (--sim) do not speak ${connector.value}, only ${others.join(', ')}`,
    });
  }
  const tensorParallel = pick('tensor-parallel-size', countParser(1, 1024), 1);
  const bases: PortBases = {
    side: pick('side-port', parsePort, 5600),
    init: pick('decoder-init-port', parsePort, 7300),
    alloc: pick('decoder-alloc-port', parsePort, 7400),
  };
  const instances =
    file === undefined
      ? instancesOfFlags(
          {
            prefill: poolOf('prefill', 7100, pick, isSet, problems),
            decode: poolOf('decode', 7200, pick, isSet, problems),
          },
          tensorParallel,
          bases,
        )
      : readInstances(file, input.flags, tensorParallel, bases, problems);

  const settings: LaunchSettings = {
    instances,
    connector: connector.value,
    model: pick('model', parseText, sim ? 'sim-model' : 'meta-llama/Llama-3.1-8B-Instruct').value,
    device: pick('device', choiceParser(['cuda', 'cpu']), 'cuda').value,
    python: pick('python', parseText, 'python3').value,
    engineArgs: words('engine', parseEngineWords),
    batonArgs: words('baton', parseBatonWords),
    sim,
    host: pick('host', parseListenHost, '127.0.0.1').value,
    port: pick('port', parsePort, 9100).value,
    rpcPort: pick('rpc-port', parseListenPort, 50_051).value,
    adminPort: pick('admin-port', parseListenPort, 29_000).value,
    noticePort: pick('proxy-port', parsePort, 7500).value,
    logDir: pick('log-dir', parseText, '.').value,
    readyTimeoutMs: pick('ready-timeout', parseDuration, 20 * 60 * 1000).value,
    stopTimeoutMs: pick('stop-timeout', parseDuration, 15_000).value,
    dryRun: isSet('dry-run'),
    bench: readBench(pick, isSet, problems),
  };
  return problems.length > 0 ? { kind: 'error', problems: inFileOrder(problems) } : { kind: 'ok', settings };
}

// Flags first, then the file from top to bottom, as it is corrected.
function inFileOrder(problems: readonly Problem[]): readonly Problem[] {
  const lineOf = ({ where }: Problem): number => Number(/:(\d+):\d+$/.exec(where)?.[1] ?? 0);
  return problems.toSorted((a, b) => lineOf(a) - lineOf(b));
}

function openFile(
  file: { readonly name: string; readonly text: string },
  problems: Problem[],
): MappingReader | undefined {
  const yaml = parseYamlSource(file.text, file.name);
  if (yaml.kind === 'error') {
    problems.push(...yaml.problems);
    return undefined;
  }
  const reader = new MappingReader(yaml.source, [], yaml.source.data, problems);
  reader.refuseOthers(FILE_KEYS);
  return reader;
}

type Pick = <T>(flag: string, parse: ValueParser<T>, fallback: T) => Found<T>;

function readSetting<T>(
  flags: LaunchFlagValues,
  file: MappingReader | undefined,
  flag: string,
  parse: ValueParser<T>,
  fallback: T,
  problems: Problem[],
): Found<T> {
  // A default is named as the flag the user can add.
  const where = `--${flag}`;
  const raw = flags[flag];
  if (raw === undefined) {
    const key = keyOf(flag);
    return FILE_KEYS.includes(key) && file?.has(key) === true
      ? file.read(key, parse, fallback)
      : { value: fallback, where, given: false };
  }
  const parsed = parse(typeof raw === 'string' ? raw : raw.join(' '));
  if (parsed.kind === 'bad') problems.push({ where, message: parsed.message });
  return { value: parsed.kind === 'ok' ? parsed.value : fallback, where, given: true };
}

function poolOf(
  role: 'prefill' | 'decode',
  firstPort: number,
  pick: Pick,
  isSet: (flag: string) => boolean,
  problems: Problem[],
): { readonly ports: readonly number[]; readonly where: string } {
  const count = pick(role, countParser(1, 1000), 2);
  const ports = pick(`${role}-port`, listParser(parsePort), [firstPort]);
  const [first = firstPort, ...more] = ports.value;
  if (more.length === 0) return { ports: Array.from({ length: count.value }, (_, i) => first + i), where: ports.where };
  if (isSet(role) && ports.value.length !== count.value) {
    problems.push({
      where: `--${role} and --${role}-port`,
      message: `give one port, from which the others count up, or ${count.value} of them, got ${ports.value.length}`,
    });
  }
  return { ports: ports.value, where: ports.where };
}

function readInstances(
  file: MappingReader,
  flags: LaunchFlagValues,
  tensorParallel: Found<number>,
  bases: PortBases,
  problems: Problem[],
): readonly LaunchInstance[] {
  for (const flag of ['prefill', 'decode', 'prefill-port', 'decode-port']) {
    if (flags[flag] !== undefined)
      problems.push({ where: `--${flag}`, message: 'cannot be combined with --topology, which lists the engines' });
  }
  return instancesOfFile(file, tensorParallel, bases);
}

function readBench(pick: Pick, isSet: (flag: string) => boolean, problems: Problem[]): BenchSettings | undefined {
  const bench: BenchSettings = {
    prompts: pick('bench-prompts', countParser(1, 100_000), 30).value,
    inputTokens: pick('bench-input-len', countParser(1, 1_000_000), 7500).value,
    outputTokens: pick('bench-output-len', countParser(1, 1_000_000), 200).value,
    rate: pick('bench-rate', parseRate, 1).value,
  };
  if (isSet('bench')) return bench;
  const extra = LAUNCH_FLAGS.find(({ flag }) => flag.startsWith('bench-') && isSet(flag));
  if (extra !== undefined) problems.push({ where: `--${extra.flag}`, message: 'is only for --bench' });
  return undefined;
}

function parseRate(raw: unknown): ReturnType<ValueParser<number>> {
  const value = typeof raw === 'string' && /^\d+(\.\d+)?$/.test(raw.trim()) ? Number(raw) : Number.NaN;
  return Number.isFinite(value)
    ? { kind: 'ok', value }
    : { kind: 'bad', message: `expected a number of requests a second, got ${show(raw)}` };
}

/** Takes a connector as people and as vLLM write it: nixl, NixlConnector, LMCacheConnectorV1. */
function connectorParser(known: readonly string[]): ValueParser<string> {
  const fold = (name: string): string =>
    name
      .toLowerCase()
      .replace(/connector(v\d+)?$/, '')
      .replaceAll(/[-_\s]/g, '');
  return (raw) => {
    const word = typeof raw === 'string' ? raw : show(raw);
    const match = known.find((name) => fold(name) === fold(word));
    return match === undefined ? { kind: 'bad', message: unknownName(word, known) } : { kind: 'ok', value: match };
  };
}

function keyOf(flag: string): string {
  return flag.replaceAll('-', '_');
}
