// What the executable runs first: the program, with the compiled code of its start, so that V8 has little to compile.
import process from 'node:process';
import { Script } from 'node:vm';
import { readPart } from './parts.ts';

/** Node's own modules; the program looks for some others and does without them. */
function loadBuiltin(name: string): object {
  const found: unknown = process.getBuiltinModule(name);
  if (typeof found !== 'object' && typeof found !== 'function') throw missing(name);
  if (found === null) throw missing(name);
  return found;
}

function missing(name: string): Error {
  return Object.assign(new Error(`Cannot find module '${name}'`), { code: 'MODULE_NOT_FOUND' });
}

try {
  const source = readPart('program').toString('latin1');
  const script = new Script(source, { filename: 'baton.cjs', cachedData: readPart('code') });
  const run: unknown = script.runInThisContext();
  if (typeof run === 'function') run(loadBuiltin, { exports: {} }, {});
} catch (error) {
  process.stderr.write(`baton: ${error instanceof Error ? error.message : String(error)}\n`);
  process.exitCode = 1;
}
