import { execFile } from 'node:child_process';
import { readdirSync } from 'node:fs';
import { resolve } from 'node:path';
import { expect, test } from 'vitest';
import { hasShared, SHARED } from '../support/shared.ts';

/** Cases about decode-to-prefill reuse: the Router answers without it. */
const REUSE_CASES = new Set(['B07', 'B08', 'B11', 'B44', 'B61']);

const FACADE =
  'exec bin/baton serve --host 127.0.0.1 --port $PORT --rpc-port off --admin-port off ' +
  '--prefiller-hosts $P_HOSTS --prefiller-ports $P_PORTS --decoder-hosts $D_HOSTS --decoder-ports $D_PORTS';

test.runIf(hasShared('cases/run.mjs'))("users' bug reports: every case that is not about reuse passes", async () => {
  const folder = resolve(SHARED, 'cases');
  const ids = readdirSync(folder).flatMap((name) => /^(B\d+)\.json$/.exec(name)?.[1] ?? []);
  const wanted = ids.filter((id) => !REUSE_CASES.has(id));
  expect(wanted.length).toBeGreaterThan(30);
  const { output, code } = await run(resolve(folder, 'run.mjs'), wanted);
  const lines = output.split('\n');
  const failed = lines.filter((line) => line.startsWith('FAIL'));
  expect(failed, output).toEqual([]);
  // Cases that a machine cannot run (no IPv6) or that take five minutes are skipped by the runner itself.
  expect(lines.filter((line) => line.startsWith('PASS')).length).toBeGreaterThan(30);
  expect(code).toBe(0);
});

function run(script: string, ids: readonly string[]): Promise<{ output: string; code: number | null }> {
  return new Promise((done) => {
    const env = { ...process.env, FACADE_CMD: FACADE, SLOWX: '2' };
    const child = execFile(process.execPath, [script, ...ids], { env, maxBuffer: 1 << 26 }, (_error, stdout, stderr) =>
      done({ output: `${stdout}\n${stderr}`, code: child.exitCode }),
    );
  });
}
