import { isMap, isPair, isScalar, isSeq, LineCounter, parseDocument, visit } from 'yaml';
import type { Problem } from './problem.ts';
import { YAML_MISTAKES } from './yaml-mistakes.ts';

/** A YAML file as plain data, and the place of each of its keys. */
export interface YamlSource {
  readonly data: Readonly<Record<string, unknown>>;
  /** Says `file:line:column` of a key or list item, or of the nearest one above it that exists; empty if there is none. */
  locate(path: readonly PropertyKey[]): string;
}

/** The result of reading a YAML text. */
export type YamlResult =
  | { readonly kind: 'ok'; readonly source: YamlSource }
  | { readonly kind: 'error'; readonly problems: readonly Problem[] };

/** Parses YAML 1.2 and keeps the positions; an empty text is an empty mapping. */
export function parseYamlSource(text: string, fileName: string): YamlResult {
  const lines = new LineCounter();
  // Nothing is printed: a warning of the parser would repeat what the file holds, keys too.
  const document = parseDocument(text, { lineCounter: lines, prettyErrors: false, logLevel: 'error' });
  const at = (offset: number): string => {
    const { line, col } = lines.linePos(offset);
    return `${fileName}:${line}:${col}`;
  };
  const problems = document.errors.map(
    ({ pos, code }): Problem => ({ where: at(pos[0]), message: YAML_MISTAKES[code] }),
  );
  visit(document, {
    Alias(_, alias) {
      if (alias.resolve(document) === undefined) {
        problems.push({
          where: at(alias.range?.[0] ?? 0),
          message: `*${alias.source}: no anchor &${alias.source} stands before it`,
        });
      }
    },
  });
  if (problems.length > 0) return { kind: 'error', problems };
  const locate = (path: readonly PropertyKey[]): string => {
    const offset = offsetOf(document.contents, path);
    return offset === undefined ? '' : at(offset);
  };
  if (document.contents !== null && !isMap(document.contents) && !isEmptyScalar(document.contents)) {
    return {
      kind: 'error',
      problems: [{ where: locate([]), message: 'expected keys with values, like "policy: round_robin"' }],
    };
  }
  try {
    const data: unknown = document.toJS();
    return { kind: 'ok', source: { data: isRecord(data) ? data : {}, locate } };
  } catch {
    // A few aliases can stand for more than there is memory.
    return { kind: 'error', problems: [{ where: locate([]), message: 'the aliases (*) stand for too much' }] };
  }
}

/** Tells whether a value is a mapping. */
export function isRecord(value: unknown): value is Readonly<Record<string, unknown>> {
  return typeof value === 'object' && value !== null && !Array.isArray(value);
}

function isEmptyScalar(node: unknown): boolean {
  return isScalar(node) && node.value === null;
}

function offsetOf(root: unknown, path: readonly PropertyKey[]): number | undefined {
  let node: unknown = root;
  let offset = path.length === 0 ? (startOf(node) ?? 0) : undefined;
  for (const key of path) {
    if (isMap(node)) {
      const pair: unknown = node.items.find(
        (item) => isPair(item) && isScalar(item.key) && String(item.key.value) === String(key),
      );
      if (!isPair(pair)) break;
      offset = startOf(pair.key) ?? offset;
      node = pair.value;
    } else if (isSeq(node) && typeof key === 'number') {
      node = node.items[key];
      offset = startOf(node) ?? offset;
    } else {
      break;
    }
  }
  return offset;
}

function startOf(node: unknown): number | undefined {
  return isMap(node) || isSeq(node) || isScalar(node) ? node.range?.[0] : undefined;
}
