import { isDeepStrictEqual } from 'node:util';
import { describeKeys } from './describe-keys.ts';
import { type Loaded, loadSource } from './load-config.ts';
import { setAt } from './merge.ts';
import type { Problem } from './problem.ts';
import { isRecord } from './yaml-source.ts';

/** What a changed file means for the settings that are in force. */
export type ReloadPlan =
  | {
      readonly kind: 'ok';
      /** The settings to go on with: what can be changed as it is now, the rest as it was. */
      readonly loaded: Loaded;
      /** Keys that have another value. */
      readonly applied: readonly string[];
      /** Keys that have another value in the file and keep the one that they had. */
      readonly restart: readonly string[];
    }
  | { readonly kind: 'error'; readonly problems: readonly Problem[] };

/** Lists of which an entry has no value of its own to compare: they are looked at as a whole. */
const LIVE_KEYS: ReadonlyMap<string, boolean> = new Map(
  describeKeys().map(({ path, live }) => [path.split('[]', 1)[0] ?? path, live]),
);

/**
 * Compares the settings that are in force with those that were read anew, key by key as the whole of flags, variables and
 * file says. What comes out is checked as a whole too: keys that wait for a restart may not go with the others.
 */
export function planReload(running: Loaded, next: Loaded): ReloadPlan {
  const changed = [...LIVE_KEYS].filter(
    ([path]) => !isDeepStrictEqual(valueAt(running.keys, path), valueAt(next.keys, path)),
  );
  const applied = changed.flatMap(([path, live]) => (live ? [path] : []));
  const restart = changed.flatMap(([path, live]) => (live ? [] : [path]));
  if (restart.length === 0) return { kind: 'ok', loaded: next, applied, restart };
  let { data } = next.source;
  for (const path of restart) data = setAt(data, path.split('.'), valueAt(running.source.data, path));
  const mixed = loadSource({ ...next.source, data }, next.input);
  if (mixed.kind === 'ok') return { kind: 'ok', loaded: mixed, applied, restart };
  const note = `as long as ${restart.join(', ')} wait for a restart`;
  return {
    kind: 'error',
    problems: mixed.problems.map((problem) => ({ ...problem, message: `${problem.message} (${note})` })),
  };
}

function valueAt(data: unknown, path: string): unknown {
  let value = data;
  for (const key of path.split('.')) value = isRecord(value) ? value[key] : undefined;
  return value;
}
