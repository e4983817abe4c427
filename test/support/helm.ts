import { execFile } from 'node:child_process';
import { join } from 'node:path';
import { promisify } from 'node:util';
import type { TestContext } from 'vitest';
import { CHART } from './manifests.ts';
import { hasTool, skipWithout } from './tools.ts';

const run = promisify(execFile);

/** Where helm is: in PATH, or where `go install` puts it. */
async function findHelm(): Promise<string | undefined> {
  if (await hasTool('helm', ['version'])) return 'helm';
  const gopath = await run('go', ['env', 'GOPATH']).then(
    ({ stdout }) => stdout.trim(),
    () => '',
  );
  const installed = join(gopath, 'bin', 'helm');
  return gopath !== '' && (await hasTool(installed, ['version'])) ? installed : undefined;
}

/** Runs helm on the chart; rejects with what it says. Skips the test aloud where there is no helm. */
export async function helm(
  context: TestContext,
  command: 'template' | 'lint',
  args: readonly string[],
): Promise<string> {
  const program = (await findHelm()) ?? skipWithout(context, 'helm');
  const release = command === 'template' ? ['baton'] : [];
  // Without a cluster to ask, helm takes an old version.
  const all = [command, ...release, CHART, '--namespace', 'baton', '--kube-version', '1.31', ...args];
  const { stdout } = await run(program, all, { maxBuffer: 1 << 24 });
  return stdout;
}

/** Renders the chart as the manifests for people without helm are committed: without what only helm reads. */
export async function renderPlain(context: TestContext, values: string): Promise<string> {
  const text = await helm(context, 'template', ['--values', values]);
  return text
    .split('\n')
    .filter((line) => !/^# Source:|^ +(app\.kubernetes\.io\/managed-by|helm\.sh\/chart):/.test(line))
    .join('\n');
}
