import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { constants, tmpdir } from 'node:os';
import { join } from 'node:path';
import process from 'node:process';

/** A library that Node loads: where it is put for that, and its bytes. */
interface Addon {
  /** As people know it. */
  readonly name: string;
  readonly bytes: Uint8Array;
  /** Default: the folder for temporary files. */
  readonly folder?: string;
}

/**
 * Loads a native library from a file of its own that is gone again afterwards: the system maps libraries from files alone.
 *
 * @throws Error with a sentence where the folder cannot be written, or forbids programs
 */
export function loadAddon({ name, bytes, folder = tmpdir() }: Addon): unknown {
  let own: string;
  try {
    own = mkdtempSync(join(folder, 'baton-'));
  } catch (error) {
    throw refused(`cannot write the ${name} library to ${folder}`, error);
  }
  const library = { exports: {} };
  try {
    const file = join(own, 'library.node');
    try {
      writeFileSync(file, bytes, { mode: 0o500, flag: 'wx' });
    } catch (error) {
      throw refused(`cannot write the ${name} library to ${folder}`, error);
    }
    try {
      process.dlopen(library, file, constants.dlopen.RTLD_LAZY);
    } catch (error) {
      throw refused(`cannot load the ${name} library from ${folder}`, error);
    }
  } finally {
    rmSync(own, { recursive: true, force: true });
  }
  return library.exports;
}

function refused(what: string, error: unknown): Error {
  const why = error instanceof Error ? (error.message.split('\n')[0] ?? '') : String(error);
  return new Error(`${what} (${why}): set TMPDIR to a folder that can be written and may hold programs`);
}
