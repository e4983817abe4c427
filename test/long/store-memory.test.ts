import { execFile } from 'node:child_process';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { expect, test } from 'vitest';

const root = join(import.meta.dirname, '..', '..');

test('an entry takes little more memory than its payload', async () => {
  const script = join(root, 'scripts', 'store-memory.mjs');
  const { stdout } = await promisify(execFile)(process.execPath, [script, '3000', '4096'], { cwd: root });
  const measured: unknown = JSON.parse(stdout);
  expect(measured).toMatchObject({ entries: 6000, evictions: 0 });
  // As objects with strings entries took 1.9 times their payload.
  expect(measured).toHaveProperty(
    'usedRatio',
    expect.toSatisfy((ratio: number) => ratio > 0.9 && ratio < 1.3),
  );
});
