import process from 'node:process';
import { Script } from 'node:vm';
import { readPart } from './parts.ts';

/**
 * Runs a program of the executable and gives what it exports. With `code`, compiled code of it, V8 has less to compile.
 *
 * @throws Error with a sentence where the file was damaged or changed after it was built
 */
export function runProgram(name: string, code?: Buffer): unknown {
  const source = readPart(name).toString('latin1');
  const options = code === undefined ? {} : { cachedData: code };
  const run: unknown = new Script(source, { filename: `${name}.cjs`, ...options }).runInThisContext();
  const module: { exports: unknown } = { exports: {} };
  if (typeof run === 'function') run(loadBuiltin, module, module.exports);
  return module.exports;
}

/** Node's own modules; a program looks for some others and does without them. */
function loadBuiltin(name: string): object {
  const found: unknown = process.getBuiltinModule(name);
  if (typeof found !== 'object' && typeof found !== 'function') throw missing(name);
  if (found === null) throw missing(name);
  return found;
}

function missing(name: string): Error {
  return Object.assign(new Error(`Cannot find module '${name}'`), { code: 'MODULE_NOT_FOUND' });
}
