import { execFile } from 'node:child_process';
import { promisify } from 'node:util';
import type { TestContext } from 'vitest';

const run = promisify(execFile);

/** Whether a program starts. */
export function hasTool(program: string, args: readonly string[]): Promise<boolean> {
  return run(program, [...args]).then(
    () => true,
    () => false,
  );
}

/** Skips the test aloud for want of a tool; with CI set that is a failure, because .ci/run installs them. */
export function skipWithout(context: TestContext, what: string): never {
  if (process.env['CI'] !== undefined) throw new Error(`${what} is missing, and CI installs it`);
  process.stderr.write(`SKIPPED: ${context.task.name}: ${what} is missing\n`);
  return context.skip(`${what} is missing`);
}
