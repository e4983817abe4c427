import { expect, test } from 'vitest';
import { measureRequests } from '../support/request-cost.ts';

/**
 * KiB that V8 allocates for a request. Who makes one cheaper writes the new value here, and who makes one dearer as well, with
 * the reason in the commit.
 */
const ALLOCATED = [
  ['json', 380],
  ['json_unguarded', 305],
  ['stream', 820],
  ['stream_unguarded', 395],
  ['turns', 1330],
  ['turns_unguarded', 1140],
] as const;

/** Without the compilers that leave allocations out where code is hot, each run allocates the same. */
const NODE_FLAGS = ['--no-opt', '--no-maglev'];

test.for(ALLOCATED)(
  '%s: a request allocates no more than a tenth beyond %d KiB',
  { timeout: 120_000 },
  async ([kind, allocated]) => {
    const { bytes } = await measureRequests({ kind, warmUp: 100, requests: 200, nodeFlags: NODE_FLAGS });
    const kib = bytes / 1024;
    expect(kib, 'dearer than it was').toBeLessThan(allocated * 1.1);
    expect(kib, 'cheaper: lower the value').toBeGreaterThan(allocated * 0.8);
  },
);
