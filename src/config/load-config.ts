import type * as z from 'zod';
import { buildConfig } from './build-config.ts';
import type { Built, Known } from './build-input.ts';
import type { Config } from './config.ts';
import { chooseEngines, type EngineChoice } from './engines.ts';
import { envLayer, flagLayer, type Layer, type RawFlags } from './flag-layers.ts';
import { FLAGS } from './flags.ts';
import { describeIssue } from './issues.ts';
import { type Merged, mergeLayers, withoutBad } from './merge.ts';
import type { Problem } from './problem.ts';
import { type FileConfig, fileSchema } from './schema.ts';
import { isRecord, parseYamlSource, type YamlSource } from './yaml-source.ts';

/** Everything that the settings are made from. */
export interface LoadInput {
  readonly flags: RawFlags;
  readonly env: Readonly<Record<string, string | undefined>>;
  /** Text of the YAML file; absent when there is none. */
  readonly fileText?: string;
  /** How the file is called in messages; `baton.yaml` by default. */
  readonly fileName?: string;
  readonly known: Known;
  /** True when log lines go to a terminal, which makes them pretty by default. */
  readonly terminal: boolean;
}

/** Settings without a mistake. */
export interface Loaded {
  readonly kind: 'ok';
  readonly config: Config;
  readonly warnings: readonly Problem[];
  /** What they were made from. */
  readonly input: LoadInput;
  readonly source: YamlSource;
  /** All keys as they are in force, whichever layer they are from. */
  readonly keys: FileConfig;
}

/** The settings, or every mistake that was found. */
export type LoadResult = Loaded | { readonly kind: 'error'; readonly problems: readonly Problem[] };

/** Merges flags over `BATON_*` variables over the file over defaults, and checks the whole. */
export function loadConfig(input: LoadInput): LoadResult {
  const yaml = parseYamlSource(input.fileText ?? '', input.fileName ?? 'baton.yaml');
  return yaml.kind === 'error' ? yaml : loadSource(yaml.source, input);
}

/** The same, of a file that is read already. */
export function loadSource(source: YamlSource, input: LoadInput): LoadResult {
  const flags = flagLayer(input.flags);
  const { layer: env, warnings } = envLayer(input.env);
  const engines = chooseEngines(flags, env, rolesInFile(source) ?? noDefaults(source, [env, flags]));
  const merged = mergeLayers(source, [env, flags], engines);
  const parsed = fileSchema.safeParse(merged.data);
  if (!parsed.success) {
    const { issues } = parsed.error;
    const problems = issues.flatMap((issue) => describeIssue(issue, merged.locate, merged.data));
    return refuse([...engines.problems, ...problems, ...problemsOfTheRest(merged, issues, input, engines)]);
  }
  const built = build(parsed.data, merged, input, engines);
  const problems = [...engines.problems, ...built.problems];
  if (problems.length > 0) return refuse(problems);
  return {
    kind: 'ok',
    config: built.config,
    warnings: [...warnings, ...engines.warnings, ...built.warnings],
    input,
    source,
    keys: parsed.data,
  };
}

function build(file: FileConfig, merged: Merged, { env, known, terminal }: LoadInput, engines: EngineChoice): Built {
  const { fileInstances, locate } = merged;
  return buildConfig({ file, fileInstances, engines, env, known, terminal, locate });
}

/** What is wrong beside the keys that cannot be read at all, so that a file is corrected in one go. */
function problemsOfTheRest(
  whole: Merged,
  issues: readonly z.core.$ZodIssue[],
  input: LoadInput,
  engines: EngineChoice,
): readonly Problem[] {
  const { merged, doubtful } = withoutBad(whole, issues);
  const parsed = fileSchema.safeParse(merged.data);
  // Which services run decides what every other key means.
  if (!parsed.success || doubtful.has('roles')) return [];
  const sections = new Map<string, string>();
  const locate = (path: readonly PropertyKey[]) => {
    const where = merged.locate(path);
    sections.set(where, String(path[0]));
    return where;
  };
  const { problems } = build(parsed.data, { ...merged, locate }, input, engines);
  // What looks wrong in a section of which a key was left out may be right with it.
  return problems.filter(({ where }) => !doubtful.has(sections.get(where) ?? ''));
}

function refuse(problems: readonly Problem[]): LoadResult {
  return { kind: 'error', problems: inFileOrder(problems) };
}

// Flags and variables first, then the file from top to bottom, as it is corrected.
function inFileOrder(problems: readonly Problem[]): readonly Problem[] {
  const lineOf = ({ where }: Problem): number => Number(/:(\d+):\d+$/.exec(where)?.[1] ?? 0);
  return problems.toSorted((a, b) => lineOf(a) - lineOf(b));
}

// Only what decides which defaults hold; the schema judges the rest.
function rolesInFile(source: YamlSource): readonly string[] | undefined {
  const instances = source.data['instances'];
  if (!Array.isArray(instances)) return undefined;
  return instances.map((item: unknown) => (isRecord(item) ? String(item['role']) : ''));
}

/** The example's engines are not there for a pool that comes from elsewhere. */
function noDefaults(source: YamlSource, layers: readonly Layer[]): readonly string[] | undefined {
  const inFile = isRecord(source.data['discovery']) ? source.data['discovery'] : {};
  const dns = isRecord(inFile['dns']) ? inFile['dns'] : {};
  const kubernetes = isRecord(inFile['kubernetes']) ? inFile['kubernetes'] : {};
  const named =
    [inFile['file'], dns['prefill'], dns['decode'], dns['both'], kubernetes['selector']].some(
      (value) => value !== undefined,
    ) ||
    FLAGS.some(
      ({ name, paths }) => paths?.[0]?.[0] === 'discovery' && layers.some(({ values }) => values[name] !== undefined),
    );
  return named ? [] : undefined;
}
