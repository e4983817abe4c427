import * as z from 'zod';
import type { FieldDoc } from './fields.ts';
import { fileSchema } from './schema.ts';

/** One key of the file, with a path such as `timeouts.connect` or `instances[].url`. */
export interface KeyDoc extends FieldDoc {
  readonly path: string;
}

/** Lists every key of the file in its order. */
export function describeKeys(): readonly KeyDoc[] {
  return walk(fileSchema, '', false);
}

/** Lists the keys allowed in the section at `path`, for suggestions; empty when it is no section. */
export function knownKeys(path: readonly PropertyKey[]): readonly string[] {
  let schema: unknown = fileSchema;
  for (const key of path) {
    const inner = unwrap(schema);
    schema =
      inner instanceof z.ZodArray ? inner.element : inner instanceof z.ZodObject ? inner.shape[String(key)] : undefined;
  }
  const inner = unwrap(schema);
  return inner instanceof z.ZodObject ? Object.keys(inner.shape) : [];
}

function walk(schema: unknown, path: string, inherited: boolean): readonly KeyDoc[] {
  const doc = schema instanceof z.ZodType ? schema.meta() : undefined;
  const isLive = inherited || doc?.['live'] === true;
  const inner = unwrap(schema);
  if (inner instanceof z.ZodObject) {
    return Object.entries(inner.shape).flatMap(([key, child]) =>
      walk(child, path === '' ? key : `${path}.${key}`, isLive),
    );
  }
  if (inner instanceof z.ZodArray) return walk(inner.element, `${path}[]`, isLive);
  return [{ path, about: String(doc?.['about']), fallback: String(doc?.['fallback']), live: isLive }];
}

// Leaves are pipes as well (a transform), but theirs end in no object or array.
function unwrap(schema: unknown): unknown {
  let inner = schema;
  while (inner instanceof z.ZodPipe || inner instanceof z.ZodOptional) {
    inner = inner instanceof z.ZodPipe ? inner.out : inner.unwrap();
  }
  return inner;
}
