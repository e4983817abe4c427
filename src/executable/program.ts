import { Script } from 'node:vm';
import { loadBuiltin, requireFrom } from './modules.ts';
import { readPart } from './parts.ts';

/**
 * Runs a program of one script and gives what it exports.
 *
 * @throws DamagedError
 */
export function runProgram(name: string): unknown {
  const run: unknown = runScript(name);
  const module: { exports: unknown } = { exports: {} };
  if (typeof run === 'function') run(loadBuiltin, module, module.exports);
  return module.exports;
}

/**
 * Runs a program of several scripts, the later ones when something of them is wanted. Each has compiled code of it beside
 * itself, so that V8 has little to compile.
 *
 * @throws DamagedError
 */
export function runModules(first: string, scripts: readonly string[]): void {
  const left = [...scripts];
  requireFrom(() => {
    const name = left.shift();
    return name === undefined ? undefined : runScript(name, readPart(`code-${name}`));
  })(first);
}

function runScript(name: string, code?: Buffer): unknown {
  const source = readPart(name).toString('latin1');
  const options = code === undefined ? {} : { cachedData: code };
  return new Script(source, { filename: `${name}.cjs`, ...options }).runInThisContext();
}
