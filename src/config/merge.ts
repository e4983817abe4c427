import type * as z from 'zod';
import type { EngineChoice } from './engines.ts';
import type { Layer } from './flag-layers.ts';
import { FLAGS } from './flags.ts';
import { isRecord, type YamlSource } from './yaml-source.ts';

/** The file with flags and variables laid over it, still unchecked. */
export interface Merged {
  readonly data: Readonly<Record<string, unknown>>;
  /** How many of `instances` come from the file; those of flags, variables and defaults follow. */
  readonly fileInstances: number;
  /** Says where the value at a path was written: a flag, a variable or a place in the file; empty for a default. */
  locate(path: readonly PropertyKey[]): string;
}

/** Lays the layers over the file, the last one winning, and appends the engines that flags and variables name. */
export function mergeLayers(yaml: YamlSource, layers: readonly Layer[], choice: EngineChoice): Merged {
  const origins = new Map<string, string>();
  let data: Readonly<Record<string, unknown>> = expandPolicy(yaml.data);
  for (const layer of layers) {
    for (const flag of FLAGS) {
      const value = layer.values[flag.name];
      if (value === undefined) continue;
      for (const path of flag.paths ?? []) {
        data = setAt(data, path, value);
        origins.set(path.join('.'), layer.nameOf(flag.name));
      }
    }
  }
  const inFile = data['instances'] ?? [];
  const fileInstances = Array.isArray(inFile) ? inFile.length : 0;
  if (Array.isArray(inFile) && (choice.engines.length > 0 || inFile.length > 0)) {
    data = { ...data, instances: [...inFile, ...choice.engines.map(({ role, url }) => ({ role, url }))] };
    for (const [i, engine] of choice.engines.entries()) origins.set(`instances.${fileInstances + i}`, engine.where);
  }
  return {
    data,
    fileInstances,
    locate: (path) => {
      for (let length = path.length; length > 0; length -= 1) {
        const origin = origins.get(path.slice(0, length).join('.'));
        if (origin !== undefined) return origin;
      }
      return yaml.locate(path);
    },
  };
}

// `policy: name` stands for both, so that a flag can replace one of them.
function expandPolicy(data: Readonly<Record<string, unknown>>): Readonly<Record<string, unknown>> {
  const policy = data['policy'];
  return typeof policy === 'string' ? { ...data, policy: { prefill: policy, decode: policy } } : data;
}

/** What is left when the keys of `issues` are taken out; `doubtful` are the sections that had one. */
export function withoutBad(
  merged: Merged,
  issues: readonly z.core.$ZodIssue[],
): { readonly merged: Merged; readonly doubtful: ReadonlySet<string> } {
  const paths = issues.flatMap((issue) =>
    issue.code === 'unrecognized_keys' ? issue.keys.map((key) => [...issue.path, key]) : [issue.path],
  );
  const doubtful = new Set<string>();
  let { data } = merged;
  for (const path of paths) {
    const name = path.join('.');
    for (const [prefix, section] of LEANING) if (name.startsWith(prefix)) doubtful.add(section);
    const [section, item] = path;
    data = section === 'instances' ? withStandIn(data, item) : setAt(data, path.map(String), undefined);
  }
  return { merged: { ...merged, data }, doubtful };
}

/** What cannot be judged without a key: the beginning of the key's path, and the section. */
const LEANING: readonly (readonly [string, string])[] = [
  ['roles', 'roles'],
  ['instances', 'engine_auth'],
  ['instances', 'lmcache'],
  ['pools', 'engine_auth'],
  ['lmcache', 'lmcache'],
  ['rpc.', 'rpc'],
  ['rpc_client', 'rpc_client'],
  ['admin', 'admin'],
  ['store.valkey', 'store'],
  ['reuse', 'reuse'],
  ['discovery', 'discovery'],
];

/** An instance that says nothing in the place of one, so that the others keep their numbers. */
function withStandIn(data: Merged['data'], item: PropertyKey | undefined): Merged['data'] {
  const { instances, ...others } = data;
  if (!Array.isArray(instances) || typeof item !== 'number') return others;
  const standIn = { url: `http://instance-${item}.invalid`, role: 'both' };
  return { ...others, instances: instances.with(item, standIn) };
}

/** Data with another value at a path; undefined takes the key out. */
export function setAt(
  data: Readonly<Record<string, unknown>>,
  path: readonly string[],
  value: unknown,
): Readonly<Record<string, unknown>> {
  const [key, ...rest] = path;
  if (key === undefined) return data;
  if (rest.length === 0) {
    const { [key]: _old, ...others } = data;
    return value === undefined ? others : { ...data, [key]: value };
  }
  const inner = data[key] ?? {};
  // Something else than a section is left as it is, for the schema to refuse.
  return isRecord(inner) ? { ...data, [key]: setAt(inner, rest, value) } : data;
}
