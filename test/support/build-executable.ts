import { execFileSync } from 'node:child_process';
import { resolve } from 'node:path';

/** Before the tests of the executable: builds one of this checkout, and has every test run it instead of bin/baton. */
export function setup(): void {
  if (process.env['BATON_BIN'] !== undefined) return;
  const folder = resolve('.test-results', 'executable');
  execFileSync(process.execPath, ['scripts/executable.mjs', folder], { stdio: ['ignore', 'ignore', 'inherit'] });
  process.env['BATON_BIN'] = resolve(folder, 'baton');
}
