import process from 'node:process';

/** Gives a module by its name: one of the program's own (`./x.js`), or one of Node's. */
export type Require = (name: string) => object;

/**
 * Makes `require` for the modules of a program, which are in scripts (scripts/split-program.mjs). `readNext` runs the next
 * script; it is asked when a module is wanted that is in none of those before, and gives undefined after the last.
 */
export function requireFrom(readNext: () => unknown): Require {
  const known = new Map<string, unknown>();
  const loaded = new Map<string, object>();
  const find = (name: string): unknown => {
    for (;;) {
      const found = known.get(name);
      if (found !== undefined) return found;
      const next = readNext();
      if (typeof next !== 'object' || next === null) throw missing(name);
      for (const [own, module] of Object.entries(next)) known.set(own, module);
    }
  };
  const require: Require = (name) => {
    if (!name.startsWith('./')) return loadBuiltin(name);
    const before = loaded.get(name);
    if (before !== undefined) return before;
    const module = find(name);
    const exports = {};
    loaded.set(name, exports);
    if (typeof module === 'function') module(require, exports);
    return exports;
  };
  return require;
}

/** Node's own modules; a program looks for some others and does without them. */
export function loadBuiltin(name: string): object {
  const found: unknown = process.getBuiltinModule(name);
  if (typeof found !== 'object' && typeof found !== 'function') throw missing(name);
  if (found === null) throw missing(name);
  return found;
}

function missing(name: string): Error {
  return Object.assign(new Error(`Cannot find module '${name}'`), { code: 'MODULE_NOT_FOUND' });
}
