import { setFlagsFromString } from 'node:v8';
import { runInNewContext } from 'node:vm';

/** Bytes that are in use after a full collection: those of the heap, and those of buffers outside it. */
export function memoryInUse(): { readonly heap: number; readonly buffers: number } {
  setFlagsFromString('--expose-gc');
  const collect: unknown = runInNewContext('gc');
  if (typeof collect !== 'function') throw new Error('there is no gc');
  for (let round = 0; round < 4; round++) collect();
  const { heapUsed, external } = process.memoryUsage();
  return { heap: heapUsed, buffers: external };
}
