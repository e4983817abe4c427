import { setFlagsFromString } from 'node:v8';

/**
 * What a process that serves a busy store tells V8, so that calls wait for no long garbage collection. Measured over the
 * socket (docs/performance/store.md).
 */
const SETTINGS = [
  // V8 watches which lines of code make objects that live on, and makes theirs in the old generation from then on. It takes
  // those that decode messages for such lines, though a message lives for a millisecond: the old generation then fills five
  // times as fast (4.5 MB instead of 0.9 MB between two young collections).
  '--no-allocation-site-pretenuring',
  // What is left of HTTP/2 streams is collected with the old generation alone. At the end of that all stands still for as
  // long as there is of it, so it comes when the heap has doubled, and not, as small heaps do, three times as large.
  '--heap-growing-percent=100',
];

/** Has the process collect the messages of calls early and in small parts; to be called before much is done. */
export function keepCollectionsShort(): void {
  for (const setting of SETTINGS) setFlagsFromString(setting);
}
