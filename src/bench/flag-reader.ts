import type { Problem } from '../config/problem.ts';
import { bad, ok, type ValueParser } from '../config/values.ts';
import type { BenchFlagValues } from './flags.ts';

/** Reads the values of a command line and collects what is wrong with them. */
export class FlagReader {
  readonly problems: Problem[] = [];
  readonly #values: BenchFlagValues;

  constructor(values: BenchFlagValues) {
    this.#values = values;
  }

  isSet(flag: string): boolean {
    return this.#values[flag] !== undefined;
  }

  /** The value of a flag; `fallback` where it is absent or was reported as wrong. */
  read<T, F>(flag: string, parse: ValueParser<T>, fallback: F): T | F {
    const raw = this.#values[flag];
    if (raw === undefined) return fallback;
    const parsed = parse(raw);
    if (parsed.kind === 'ok') return parsed.value;
    this.complain(flag, parsed.message);
    return fallback;
  }

  complain(flag: string, message: string): void {
    this.problems.push({ where: `--${flag}`, message });
  }
}

/** Takes `inf` besides what `parse` takes. */
export function orInfinite(parse: ValueParser<number>): ValueParser<number> {
  return (raw) => (raw === 'inf' ? ok(Number.POSITIVE_INFINITY) : parse(raw));
}

/** Reads an http or https URL; a slash at its end and `/v1` are left away. */
export const parseBaseUrl: ValueParser<string> = (raw) => {
  const text = String(raw).trim();
  if (!/^https?:\/\//.test(text) || !URL.canParse(text))
    return bad(`expected a URL like http://127.0.0.1:8000, got ${text}`);
  return ok(text.replace(/\/+$/, '').replace(/\/v1$/, ''));
};

const HEADER = /^([\w!#$%&'*+.^`|~-]+)\s*[=:]\s*([^\r\n]*)$/;

/** Reads headers, each `name=value` or `name: value`. */
export const parseHeaders: ValueParser<Readonly<Record<string, string>>> = (raw) => {
  const headers: Record<string, string> = {};
  for (const text of Array.isArray(raw) ? raw.map(String) : [String(raw)]) {
    const [, name, value] = HEADER.exec(text) ?? [];
    if (name === undefined || value === undefined) return bad(`expected name=value, got ${text.split(/[=:]/)[0]}`);
    headers[name.toLowerCase()] = value.trim();
  }
  return ok(headers);
};
