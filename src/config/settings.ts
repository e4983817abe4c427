import { isDeepStrictEqual } from 'node:util';
import type { Config } from './config.ts';

/**
 * The settings that are in force. A snapshot never changes; another one takes its place when they are read again. Whoever
 * uses a key reads it here at that moment, and what lasts keeps the snapshot that it began with.
 */
export class Settings {
  readonly #listeners = new Set<() => void>();
  #current: Config;

  constructor(config: Config) {
    this.#current = config;
  }

  get current(): Config {
    return this.#current;
  }

  /** Puts another snapshot in force. */
  replace(config: Config): void {
    this.#current = config;
    for (const listener of [...this.#listeners]) listener();
  }

  /** Calls `listener` after each change, for what has to act at once; returns what ends that. */
  onChange(listener: () => void): () => void {
    this.#listeners.add(listener);
    return () => void this.#listeners.delete(listener);
  }
}

/** An object whose members are those that `read` answers at the moment; the names must not change. */
export function follow<T extends object>(read: () => T): T {
  const view = { ...read() };
  for (const key of Object.keys(view)) {
    Object.defineProperty(view, key, { enumerable: true, get: (): unknown => Reflect.get(read(), key) });
  }
  return view;
}

/** Makes something of a part of the settings; the answer gives the same thing until that part changes. */
export function derive<P, T>(settings: Settings, part: (config: Config) => P, make: (part: P) => T): () => T {
  let seen = settings.current;
  let known = part(seen);
  let value = make(known);
  return () => {
    const { current } = settings;
    if (current === seen) return value;
    seen = current;
    const next = part(current);
    if (isDeepStrictEqual(next, known)) return value;
    known = next;
    value = make(next);
    return value;
  };
}
