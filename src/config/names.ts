import { withKey } from './issues.ts';
import type { Problem } from './problem.ts';
import { unknownName } from './values.ts';

// vLLM writes NixlConnector, LMCacheConnectorV1; people write nixl-push and nixl_push.
/** A connector's name without what its spellings differ in. */
export function connectorKey(name: string): string {
  return wordKey(name.replace(/connector(v\d+)?$/i, ''));
}

/** A name without what its spellings differ in. */
export function wordKey(name: string): string {
  return name.toLowerCase().replaceAll(/[-_]/g, '');
}

/** Where a name is written, and its key. */
export interface NamePlace {
  readonly where: string;
  readonly path: readonly PropertyKey[];
}

/** The known name that a written one means; an unknown one is a problem, and stays as it is. */
export function resolveName(
  name: string,
  known: readonly string[],
  key: (name: string) => string,
  { where, path }: NamePlace,
  sink: { readonly problems: Problem[] },
): string {
  const match = known.find((candidate) => wordKey(candidate) === key(name));
  if (match === undefined) sink.problems.push({ where, message: withKey(where, path, unknownName(name, known)) });
  return match ?? name;
}
