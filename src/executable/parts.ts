import { getRawAsset } from 'node:sea';
import { crc32 } from 'node:zlib';
import { SUMS } from './sums.ts';

/** True in the executable of one file, which has everything that it needs inside. */
export const IS_EXECUTABLE = Object.keys(SUMS).length > 0;

/** The file of the executable was damaged or changed after it was built; the message is a sentence that says so. */
class DamagedError extends Error {
  override readonly name = 'DamagedError';
}

/** Whether this is a {@link DamagedError}, by its name: each bundle of the executable has a class of its own. */
export const isDamage = (error: unknown): error is Error => error instanceof Error && error.name === 'DamagedError';

/**
 * Reads a part of the executable, which must not be written to.
 *
 * @throws DamagedError
 */
export function readPart(name: string): Buffer {
  const part = Buffer.from(getRawAsset(name));
  checkPart(name, part, SUMS);
  return part;
}

/** Compares a part with what it was when the executable was built; finds damage, not a forger. */
export function checkPart(name: string, part: Uint8Array, sums: Readonly<Record<string, number>>): void {
  if (crc32(part) !== sums[name])
    throw new DamagedError(
      `this executable is damaged: its part ${name} is not what was built; copy or download it again`,
    );
}
