import { FLAGS } from './flags.ts';
import type { Problem } from './problem.ts';
import { suggest } from './suggest.ts';

/** Raw values by flag name, not yet checked; a switch given as a flag is the text `true`. */
export type RawFlags = Readonly<Record<string, string | readonly string[]>>;

/** The values of one source, with the name under which the user knows each. */
export interface Layer {
  readonly values: RawFlags;
  nameOf(flag: string): string;
}

/** The variable that stands for a flag: `rpc-port` is BATON_RPC_PORT. */
export function envName(flag: string): string {
  return `BATON_${flag.toUpperCase().replaceAll('-', '_')}`;
}

/** Makes the layer of the command line. */
export function flagLayer(values: RawFlags): Layer {
  return { values, nameOf: (flag) => `--${flag}` };
}

/** Reads the `BATON_*` variables; an empty one counts as not set. */
export function envLayer(env: Readonly<Record<string, string | undefined>>): {
  readonly layer: Layer;
  readonly warnings: readonly Problem[];
} {
  const values: Record<string, string | readonly string[]> = {};
  const warnings: Problem[] = [];
  const known: string[] = [];
  for (const flag of FLAGS) {
    const names = [flag.name, ...(flag.alias === undefined ? [] : [flag.alias])].map(envName);
    known.push(...names);
    const name = names.find((candidate) => (env[candidate] ?? '').trim() !== '');
    const text = name === undefined ? undefined : env[name];
    if (name === undefined || text === undefined) continue;
    // Kubernetes sets BATON_PORT=tcp://10.0.0.1:8000 in every pod beside a service that is called "baton".
    if (name.endsWith('_PORT') && /^[a-z]+:\/\//.test(text)) {
      warnings.push({ where: name, message: 'ignored, because Kubernetes set it for a service of that name' });
      continue;
    }
    values[flag.name] =
      flag.kind === 'list-replace' || flag.kind === 'list-add' ? text.trim().split(/\s+/) : text.trim();
  }
  for (const name of Object.keys(env)) {
    if (!name.startsWith('BATON_') || known.includes(name)) continue;
    // A near miss is a slip; anything else belongs to Kubernetes or to the user's own scripts.
    const near = suggest(name, known, 2);
    if (near !== undefined) warnings.push({ where: name, message: `ignored; did you mean ${near}?` });
  }
  return { layer: { values, nameOf: envName }, warnings };
}
