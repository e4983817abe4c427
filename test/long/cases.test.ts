import { execFile } from 'node:child_process';
import { resolve } from 'node:path';
import { describe, expect, test } from 'vitest';
import { hasShared, SHARED } from '../support/shared.ts';

/**
 * Cases about decode-to-prefill reuse. Their stubs serve no `/tokenize` and no token ids, so the exact guard refuses every
 * reuse: it misses what those cases want of the prefill leg, and nothing else.
 */
const REUSE_CASES = new Set(['B07', 'B08', 'B11', 'B44', 'B61']);
const NO_REUSE = /:: (?:earlier turn: )?prefill has no kv_transfer_params\.remote_request_id$/;

const FACADE =
  'exec bin/baton serve --host 127.0.0.1 --port $PORT --rpc-port off --admin-port off ' +
  '--prefiller-hosts $P_HOSTS --prefiller-ports $P_PORTS --decoder-hosts $D_HOSTS --decoder-ports $D_PORTS';

describe.runIf(hasShared('cases/run.mjs'))("users' bug reports", () => {
  test('every case passes with the history guard', async () => {
    const { passed, failed, output, code } = await run(`${FACADE} --reuse-guard history --unsafe-reuse`);
    expect(failed, output).toEqual([]);
    // Cases that a machine cannot run (no IPv6) are skipped by the runner itself.
    expect(passed.length, output).toBeGreaterThan(35);
    expect(code).toBe(0);
  });

  test('none is wrong with the exact guard', async () => {
    const { passed, failed, output } = await run(FACADE);
    const wrong = failed.filter((line) => !REUSE_CASES.has(line.split(' ')[1] ?? '') || !NO_REUSE.test(line));
    expect(wrong, output).toEqual([]);
    expect(passed.length, output).toBeGreaterThan(30);
  });
});

interface Run {
  readonly passed: readonly string[];
  readonly failed: readonly string[];
  readonly output: string;
  readonly code: number | null;
}

function run(facade: string): Promise<Run> {
  return new Promise((done) => {
    const env = { ...process.env, FACADE_CMD: facade, SLOWX: '2' };
    const script = resolve(SHARED, 'cases/run.mjs');
    const child = execFile(process.execPath, [script], { env, maxBuffer: 1 << 26 }, (_error, stdout, stderr) => {
      const lines = stdout.split('\n');
      const withWord = (word: string) => lines.filter((line) => line.startsWith(word));
      const output = `${stdout}\n${stderr}`;
      done({ passed: withWord('PASS'), failed: withWord('FAIL'), output, code: child.exitCode });
    });
  });
}
