import { createHash, hash } from 'node:crypto';
import type { Sha256 } from '../core/chain.ts';

const DIGEST_BYTES = 32;
/** Up to here parts are put together: a copy costs less than an object of Node's that takes them one by one. */
const COPIED_BYTES = 64 * 1024;

/** SHA-256 by Node. As text a digest comes in a third of the time that Node needs for one in memory of its own. */
export const sha256: Sha256 = (parts) => {
  const [first] = parts;
  if (first !== undefined && parts.length === 1) return digestOf(first);
  const length = parts.reduce((sum, part) => sum + part.byteLength, 0);
  if (length <= COPIED_BYTES) return digestOf(Buffer.concat(parts, length));
  const all = createHash('sha256');
  for (const part of parts) all.update(part);
  return all.digest();
};

function digestOf(bytes: Uint8Array): Uint8Array {
  const digest = Buffer.allocUnsafe(DIGEST_BYTES);
  digest.write(hash('sha256', bytes, 'latin1'), 'latin1');
  return digest;
}
