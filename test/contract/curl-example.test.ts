import { execFile } from 'node:child_process';
import { readFileSync } from 'node:fs';
import { promisify } from 'node:util';
import { expect, test } from 'vitest';
import { startBatonProcess } from '../support/baton-process.ts';

const run = promisify(execFile);
const PAGE = readFileSync(new URL('../../examples/curl.md', import.meta.url), 'utf8');

test('every command of examples/curl.md gets the answer that the page says', async () => {
  await using store = await startBatonProcess(['--roles', 'kvstore', '--admin-port', 'off']);
  const env = { ...process.env, STORE: `http://${store.rpc}/baton.v1.KVCacheStore` };
  const commands = [...PAGE.matchAll(/<!-- answer: (.*?) -->\n```sh\n(.*?)```/gs)];
  // Each of them, and none is forgotten.
  expect(commands.length).toBe((PAGE.match(/```sh\n/g) ?? []).length);
  expect(commands.length).toBeGreaterThan(6);
  let claim = '';
  for (const [, answer = '', command = ''] of commands) {
    const { stdout } = await run('sh', ['-c', command.replace('CLAIM', claim)], { env });
    expect(stdout, command).toContain(answer);
    claim = /"claimId":"([^"]+)"/.exec(stdout)?.[1] ?? claim;
  }
});
