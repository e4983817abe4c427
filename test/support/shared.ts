import { existsSync } from 'node:fs';
import { resolve } from 'node:path';

/** Folder with the handed material; tests that need it skip aloud without it. */
export const SHARED = resolve(process.env['BATON_SHARED'] ?? '../shared');

/** Whether `path` below the handed folder exists; says so when it does not. */
export function hasShared(path: string): boolean {
  const found = existsSync(resolve(SHARED, path));
  if (!found)
    process.emitWarning(`SKIPPED: ${path} is not in BATON_SHARED (${process.env['BATON_SHARED'] ?? '../shared'})`);
  return found;
}
