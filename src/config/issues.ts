import type * as z from 'zod';
import { describeKeys, knownKeys } from './describe-keys.ts';
import type { Problem } from './problem.ts';
import { suggest } from './suggest.ts';
import { show } from './values.ts';
import { isRecord } from './yaml-source.ts';

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
  const message = issue.code === 'invalid_type' ? expectedShape(issue, data) : issue.message;
  return [{ where, message: withKey(where, issue.path, message) }];
}

/** Puts the path of a key before a message, where `where` does not name it: a flag or variable is its own name. */
export function withKey(where: string, path: readonly PropertyKey[], message: string): string {
  return path.length === 0 || !/:\d+:\d+$/.test(where) ? message : `${formatPath(path)}: ${message}`;
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
