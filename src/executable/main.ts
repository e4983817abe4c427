// What the executable runs first: the program, with the compiled code of its start, so that V8 has little to compile.
import process from 'node:process';
import { runModules } from './program.ts';
import { PROGRAM } from './sums.ts';

try {
  runModules(PROGRAM.first, PROGRAM.scripts);
} catch (error) {
  process.stderr.write(`baton: ${error instanceof Error ? error.message : String(error)}\n`);
  process.exitCode = 1;
}
