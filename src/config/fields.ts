import * as z from 'zod';
import type { ValueParser } from './values.ts';

// Compiling a checker costs more than the few settings that it would check faster.
z.config({ jitless: true });

/** What the documentation says about one key. */
export interface FieldDoc {
  readonly about: string;
  /** The default as it would be written in the file. */
  readonly fallback: string;
  /** A change of it counts without a restart. */
  readonly live: boolean;
}

/** A key that is read by `parse`. */
export function reader<T>(parse: ValueParser<T>) {
  return z.unknown().transform((raw, ctx): T => {
    const parsed = parse(raw);
    if (parsed.kind === 'ok') return parsed.value;
    ctx.issues.push({ code: 'custom', message: parsed.message, input: raw });
    return z.NEVER;
  });
}

/** A key with a default, which is written as in the file and read by the same parser. */
export function field<T>(parse: ValueParser<T>, fallback: unknown, about: string) {
  const doc: Omit<FieldDoc, 'live'> = {
    about,
    fallback: typeof fallback === 'string' ? fallback : JSON.stringify(fallback),
  };
  return reader(parse)
    .prefault(fallback)
    .meta({ ...doc });
}

/** A key that may be absent; `fallback` says in words what holds then. */
export function optional<T>(parse: ValueParser<T>, fallback: string, about: string) {
  const doc: Omit<FieldDoc, 'live'> = { about, fallback };
  return reader(parse)
    .optional()
    .meta({ ...doc });
}

/** A group of keys; one whose keys are all commented out reads as null in YAML. */
export function section<T extends z.core.$ZodLooseShape>(shape: T) {
  return z.preprocess((raw) => raw ?? {}, z.strictObject(shape));
}

/** A key, or a group of keys, whose change counts without a restart: whoever uses it reads it at that moment. */
export function live<T extends z.ZodType>(keys: T): T {
  return keys.meta({ ...keys.meta(), live: true });
}
