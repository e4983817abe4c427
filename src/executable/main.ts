// What the executable runs first: the program, with the compiled code of its start, so that V8 has little to compile.
import process from 'node:process';
import { readPart } from './parts.ts';
import { runProgram } from './program.ts';

try {
  runProgram('program', readPart('code'));
} catch (error) {
  process.stderr.write(`baton: ${error instanceof Error ? error.message : String(error)}\n`);
  process.exitCode = 1;
}
