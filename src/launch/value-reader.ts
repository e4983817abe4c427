import type { Problem } from '../config/problem.ts';
import { suggest } from '../config/suggest.ts';
import { ok, type Parsed, show, type ValueParser } from '../config/values.ts';
import { isRecord, type YamlSource } from '../config/yaml-source.ts';

/** A value with the flag or the place in a file where it was written; `given` is false for a default. */
export interface Found<T> {
  readonly value: T;
  readonly where: string;
  readonly given: boolean;
}

/** Reads the values of one mapping of a YAML file and collects what is wrong with them. */
export class MappingReader {
  readonly #data: Readonly<Record<string, unknown>>;
  readonly #path: readonly PropertyKey[];
  readonly #source: YamlSource;
  readonly #problems: Problem[];

  constructor(
    source: YamlSource,
    path: readonly PropertyKey[],
    data: Readonly<Record<string, unknown>>,
    problems: Problem[],
  ) {
    this.#source = source;
    this.#path = path;
    this.#data = data;
    this.#problems = problems;
  }

  has(key: string): boolean {
    return this.#data[key] !== undefined && this.#data[key] !== null;
  }

  /** Where a key stands, or where it would stand. */
  where(key?: string): string {
    return this.#source.locate(key === undefined ? this.#path : [...this.#path, key]);
  }

  /** The value of a key; `fallback` when it is absent or was reported as wrong. */
  read<T>(key: string, parse: ValueParser<T>, fallback: T): Found<T> {
    if (!this.has(key)) return { value: fallback, where: this.where(key), given: false };
    const parsed = parse(this.#data[key]);
    if (parsed.kind === 'bad') this.complain(parsed.message, key);
    return { value: parsed.kind === 'ok' ? parsed.value : fallback, where: this.where(key), given: true };
  }

  /** Reads an entry of the list under `key`; undefined, and reported, when it is no mapping. */
  item(key: string, index: number, data: unknown): MappingReader | undefined {
    const path = [...this.#path, key, index];
    if (isRecord(data)) return new MappingReader(this.#source, path, data, this.#problems);
    this.#problems.push({
      where: this.#source.locate(path),
      message: `${key}: expected keys with values, got ${show(data)}`,
    });
    return undefined;
  }

  complain(message: string, key?: string): void {
    this.#problems.push({ where: this.where(key), message: key === undefined ? message : `${key}: ${message}` });
  }

  /** Reports the keys that are not in `known`. */
  refuseOthers(known: readonly string[]): void {
    for (const key of Object.keys(this.#data)) {
      if (known.includes(key)) continue;
      const near = suggest(key, known);
      this.complain(
        `unknown key; ${near === undefined ? `known here: ${known.join(', ')}` : `did you mean ${near}?`}`,
        key,
      );
    }
  }
}

/** Reads a text that is not empty. */
export function parseText(raw: unknown): Parsed<string> {
  if (typeof raw === 'string' && raw.trim() !== '') return ok(raw);
  if (typeof raw === 'number') return ok(String(raw));
  return { kind: 'bad', message: `expected a text, got ${show(raw)}` };
}

/** Reads a list of texts; numbers and booleans are taken as they are written. */
export function parseTexts(raw: unknown): Parsed<readonly string[]> {
  const items: readonly unknown[] = Array.isArray(raw) ? raw : [raw];
  const texts: string[] = [];
  for (const item of items) {
    if (typeof item !== 'string' && typeof item !== 'number' && typeof item !== 'boolean')
      return { kind: 'bad', message: `expected a list of texts, got ${show(raw)}` };
    texts.push(String(item));
  }
  return ok(texts);
}
