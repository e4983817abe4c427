import type { z } from 'zod';
import { buildConfig } from './build-config.ts';
import type { Known } from './build-input.ts';
import type { Config } from './config.ts';
import { chooseEngines } from './engines.ts';
import { envLayer, flagLayer, type Layer, type RawFlags } from './flag-layers.ts';
import { FLAGS } from './flags.ts';
import { mergeLayers } from './merge.ts';
import type { Problem } from './problem.ts';
import { describeKeys, fileSchema, knownKeys } from './schema.ts';
import { suggest } from './suggest.ts';
import { show } from './values.ts';
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

/** The settings, or every mistake that was found. */
export type LoadResult =
  | { readonly kind: 'ok'; readonly config: Config; readonly warnings: readonly Problem[] }
  | { readonly kind: 'error'; readonly problems: readonly Problem[] };

/** Merges flags over `BATON_*` variables over the file over defaults, and checks the whole. */
export function loadConfig(input: LoadInput): LoadResult {
  const yaml = parseYamlSource(input.fileText ?? '', input.fileName ?? 'baton.yaml');
  if (yaml.kind === 'error') return yaml;
  const flags = flagLayer(input.flags);
  const env = envLayer(input.env);
  const engines = chooseEngines(
    flags,
    env.layer,
    rolesInFile(yaml.source) ?? noDefaults(yaml.source, [env.layer, flags]),
  );
  const merged = mergeLayers(yaml.source, [env.layer, flags], engines);
  const parsed = fileSchema.safeParse(merged.data);
  if (!parsed.success) {
    const problems = parsed.error.issues.flatMap((issue) => describeIssue(issue, merged.locate, merged.data));
    return { kind: 'error', problems: inFileOrder([...engines.problems, ...problems]) };
  }
  const built = buildConfig({
    file: parsed.data,
    fileInstances: merged.fileInstances,
    engines,
    env: input.env,
    known: input.known,
    terminal: input.terminal,
    locate: merged.locate,
  });
  const problems = [...engines.problems, ...built.problems];
  if (problems.length > 0) return { kind: 'error', problems: inFileOrder(problems) };
  return { kind: 'ok', config: built.config, warnings: [...env.warnings, ...engines.warnings, ...built.warnings] };
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

/** One mistake of an entry as problems that name the place in the file; `data` is what was checked. */
export function describeIssue(
  issue: z.core.$ZodIssue,
  locate: (path: readonly PropertyKey[]) => string,
  data: Readonly<Record<string, unknown>>,
): readonly Problem[] {
  if (issue.code === 'unrecognized_keys') {
    return issue.keys.map((key) => ({
      where: locate([...issue.path, key]),
      message: `${formatPath([...issue.path, key])}: unknown key${nearKey(issue.path, key)}`,
    }));
  }
  const where = locate(issue.path);
  return [
    {
      where,
      message: `${pathPrefix(where, issue.path)}${issue.code === 'invalid_type' ? expectedShape(issue, data) : issue.message}`,
    },
  ];
}

// A flag or variable is its own name; only a place in a file needs the path of the key.
function pathPrefix(where: string, path: readonly PropertyKey[]): string {
  return path.length === 0 || !/:\d+:\d+$/.test(where) ? '' : `${formatPath(path)}: `;
}

function expectedShape(issue: z.core.$ZodIssueInvalidType, data: Readonly<Record<string, unknown>>): string {
  let value: unknown = data;
  for (const key of issue.path)
    value = isRecord(value) ? value[String(key)] : Array.isArray(value) ? value[Number(key)] : undefined;
  if (issue.expected === 'array') return `expected a list, got ${show(value)}`;
  return `expected a section with ${knownKeys(issue.path).slice(0, 4).join(', ')} ..., got ${show(value)}`;
}

/** Writes a path as in `timeouts.connect` and `instances[0].url`. */
function formatPath(path: readonly PropertyKey[]): string {
  return path.map((key, i) => (typeof key === 'number' ? `[${key}]` : `${i === 0 ? '' : '.'}${String(key)}`)).join('');
}

function nearKey(section: readonly PropertyKey[], key: string): string {
  const sibling = suggest(key, knownKeys(section));
  if (sibling !== undefined) return `; did you mean ${formatPath([...section, sibling])}?`;
  const elsewhere = describeKeys().find((doc) => doc.path.split('.').at(-1) === key);
  return elsewhere === undefined
    ? `; known here: ${knownKeys(section).join(', ')}`
    : `; did you mean ${elsewhere.path}?`;
}
