import type { InstanceConfig } from './config.ts';
import type { InstanceDefaults } from './discovery.ts';
import { instanceSchema } from './engine-keys.ts';
import { buildInstances, type InstanceItem, placeOfInstance } from './instances.ts';
import { describeIssue } from './issues.ts';
import type { Problem } from './problem.ts';
import { parseYamlSource } from './yaml-source.ts';

/** What a pool file names, or why nothing of it can be used. */
export type PoolFile =
  | {
      readonly kind: 'ok';
      readonly instances: readonly InstanceConfig[];
      /** Each with its line; the entry at fault is left out. */
      readonly problems: readonly Problem[];
    }
  | { readonly kind: 'error'; readonly problems: readonly Problem[] };

/** Reads `instances:` of a YAML or JSON text; an entry with a mistake is left out, the rest stays. */
export function readPoolFile(
  text: string,
  fileName: string,
  options: { readonly defaults: InstanceDefaults; readonly connectors: readonly string[] },
): PoolFile {
  const yaml = parseYamlSource(text, fileName);
  if (yaml.kind === 'error') return yaml;
  const { data, locate } = yaml.source;
  const list = data['instances'];
  const refused = (message: string): PoolFile => ({
    kind: 'error',
    problems: [{ where: locate(['instances']) || fileName, message }],
  });
  // An empty file is more likely one that is being written than one that names no engine.
  if (!Object.hasOwn(data, 'instances')) return refused('expected a list under "instances:"; [] for none');
  if (!Array.isArray(list)) return refused('expected a list of instances, each with url and role');
  const problems: Problem[] = Object.keys(data)
    .filter((key) => key !== 'instances')
    .map((key) => ({ where: locate([key]), message: `${key}: unknown key; a pool file has only "instances"` }));
  const items: InstanceItem[] = [];
  for (const [i, entry] of list.entries()) {
    const parsed = instanceSchema.safeParse(entry);
    if (parsed.success) {
      items.push({ item: parsed.data, ...placeOfInstance(i, locate) });
      continue;
    }
    for (const issue of parsed.error.issues) {
      problems.push(...describeIssue({ ...issue, path: ['instances', i, ...issue.path] }, locate, data));
    }
  }
  const instances = buildInstances(items, options.defaults, options.connectors, { problems, warnings: problems });
  // Where nothing is right something else is wrong, and a whole pool would drain for it.
  return { kind: list.length > 0 && instances.length === 0 ? 'error' : 'ok', instances, problems };
}
