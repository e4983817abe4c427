import { execFile } from 'node:child_process';
import { cpSync, mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { delimiter, join, resolve } from 'node:path';
import { promisify } from 'node:util';
import { expect, test } from 'vitest';
import { startBatonProcess } from '../support/baton-process.ts';
import { hasTool, skipWithout } from '../support/tools.ts';

const run = promisify(execFile);

test('the Go client: its chain is that of the vectors, and it gets each answer of the contract', async (context) => {
  if (!(await hasTool('go', ['version']))) skipWithout(context, 'go');
  const scratch = mkdtempSync(join(tmpdir(), 'baton-go-client-'));
  context.onTestFinished(() => rmSync(scratch, { recursive: true, force: true }));
  // The steps of the example's README, in a copy of it.
  for (const part of ['examples/go-client', 'proto/baton', 'test/fixtures/chain.json']) {
    cpSync(part, join(scratch, part), { recursive: true });
  }
  const path = [resolve('node_modules/.bin'), process.env['PATH'] ?? ''].join(delimiter);
  const step = (program: string, ...args: string[]) =>
    run(program, args, { cwd: join(scratch, 'examples', 'go-client'), env: { ...process.env, PATH: path } });
  try {
    await step('go', 'mod', 'download');
  } catch (error) {
    throw new Error('the Go modules of examples/go-client could not be downloaded; is there a network?', {
      cause: error,
    });
  }
  await step('./generate.sh');
  await step('go', 'test', './...');
  await using store = await startBatonProcess(['--roles', 'kvstore', '--admin-port', 'off']);
  const { stdout } = await step('go', 'run', '.', `http://${store.rpc}`);
  expect(stdout.trim().split('\n')).toEqual([
    'first take: 100 true',
    'second take: TAKEN',
    'a part: 70 5',
    'wrong prompt: PREFIX_MISMATCH',
    'no prompt: PROMPT_REQUIRED',
  ]);
});
