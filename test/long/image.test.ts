import { execFile } from 'node:child_process';
import { cpSync, mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync, symlinkSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join, resolve } from 'node:path';
import { promisify } from 'node:util';
import { expect, onTestFinished, type TestContext, test } from 'vitest';
import { startBatonProcess } from '../support/baton-process.ts';
import { hasTool, skipWithout } from '../support/tools.ts';

// No container engine runs where the tests do: the steps of the Dockerfile are done by hand, on what its base image has.

const run = promisify(execFile);

/** What the build stage finds: the files that .dockerignore lets through, and the packages. */
function layContext(folder: string): void {
  mkdirSync(folder);
  const lines = readFileSync('.dockerignore', 'utf8').match(/^!.*$/gm) ?? [];
  const patterns = lines.map((line) => new RegExp(`^${line.slice(1).replaceAll('.', '\\.').replace('*', '.*')}$`));
  for (const name of readdirSync('.')) {
    if (patterns.some((pattern) => pattern.test(name))) cpSync(name, join(folder, name), { recursive: true });
  }
  symlinkSync(resolve('node_modules'), join(folder, 'node_modules'));
}

/** The command that the build stage runs on the sources, with `image` for its `/image`. */
function buildStep(image: string): string {
  const text = readFileSync('Dockerfile', 'utf8').replaceAll(/^ *#.*\n/gm, '');
  const [, step = ''] = /\nRUN (node -p (?:.*\\\n)*.*)\n/.exec(text) ?? [];
  return step.replaceAll('\\\n', '').replaceAll('/image/', `${image}/`);
}

/** Unpacks what the base image has of Debian's libraries. */
async function layBase(context: TestContext, folder: string, root: string): Promise<void> {
  await run('apt-get', ['download', '-qq', 'libc6', 'libgcc-s1', 'libstdc++6'], { cwd: folder }).catch(() =>
    skipWithout(context, 'the registry of Debian'),
  );
  const packages = readdirSync(folder).filter((name) => name.endsWith('.deb'));
  for (const name of packages) await run('dpkg', ['-x', join(folder, name), root]);
}

/** A command that runs what the image runs: as its user, on a read-only root, with /proc and an empty /tmp. */
function containerCommand(folder: string, root: string): string {
  const text = readFileSync('Dockerfile', 'utf8');
  const user = /^USER (\d+:\d+)$/m.exec(text)?.[1] ?? '';
  const entry = /^ENTRYPOINT \["(.*)"\]$/m.exec(text)?.[1] ?? '';
  const inside = [
    `mount --bind ${root} ${root}`,
    `mount -o remount,bind,ro ${root}`,
    `mount -t proc proc ${root}/proc`,
    `mount -t tmpfs tmpfs ${root}/tmp`,
    `exec chroot --userspec=${user} ${root} ${entry} "$@"`,
  ].join(' && ');
  const file = join(folder, 'container');
  writeFileSync(file, `#!/bin/sh\nexec unshare --mount sh -c '${inside}' container "$@"\n`, { mode: 0o755 });
  return file;
}

test('what the Dockerfile makes runs on its base, without rights, on a read-only root', async (context) => {
  for (const tool of ['apt-get', 'dpkg', 'chroot']) {
    if (!(await hasTool(tool, ['--version']))) skipWithout(context, tool);
  }
  if (!(await hasTool('unshare', ['--mount', 'true']))) skipWithout(context, 'the right to mount');
  const scratch = mkdtempSync(join(tmpdir(), 'baton-image-'));
  onTestFinished(() => rmSync(scratch, { recursive: true, force: true }));
  const [sources, image, root] = [join(scratch, 'src'), join(scratch, 'image'), join(scratch, 'root')];

  layContext(sources);
  const env = { ...process.env, PATH: `${resolve('node_modules/.bin')}:${process.env['PATH']}`, COMMIT: 'c0ffee' };
  await run('sh', ['-ec', buildStep(image)], { cwd: sources, env });
  for (const folder of ['', 'proc', 'tmp']) mkdirSync(join(root, folder));
  await layBase(context, scratch, root);
  const command = containerCommand(scratch, root);
  mkdirSync(join(root, 'usr', 'bin'), { recursive: true });
  cpSync(join(image, 'usr', 'bin', 'baton'), join(root, 'usr', 'bin', 'baton'));
  // The reason for a line of the Dockerfile: without it baton would not start.
  await expect(run(command, ['--version'])).rejects.toMatchObject({
    stderr: expect.stringContaining('libatomic.so.1'),
  });
  cpSync(image, root, { recursive: true });

  expect((await run(command, ['--version'])).stdout).toMatch(/^baton \S+ \(commit c0ffee, node v26\./);
  // The connector that brings a library of its own, which it puts into /tmp.
  const flags = ['--sim', '--kv-connector', 'lmcache', '--proxy-port', '0', '--registry-state', '/etc/registry.json'];
  await expect(startBatonProcess(flags, {}, command)).rejects.toThrow('/etc/registry.json');
  await using baton = await startBatonProcess(flags.slice(0, -2), {}, command);
  const body = JSON.stringify({ model: 'sim-model', messages: [{ role: 'user', content: 'Hello' }] });
  const headers = { 'content-type': 'application/json' };
  const reply = await fetch(`${baton.url}/v1/chat/completions`, { method: 'POST', headers, body });
  expect(reply.status).toBe(200);
});
