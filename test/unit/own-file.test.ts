import { spawn } from 'node:child_process';
import { mkdtemp, readFile, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import { lockFile } from '../../src/stores/own-file.ts';

const stat = async (pid: number) => (await readFile(`/proc/${pid}/stat`, 'utf8')).split(') ')[1]?.split(' ') ?? [];

test.runIf(process.platform === 'linux')(
  'a lock of a process that runs holds, one that only waits for its parent does not',
  async () => {
    await using stack = new AsyncDisposableStack();
    const folder = await mkdtemp(join(tmpdir(), 'baton-lock-'));
    stack.defer(() => rm(folder, { recursive: true, force: true }));
    const file = join(folder, 'state');
    // The shell becomes a program that never asks how its child ended.
    const parent = spawn('sh', ['-c', 'sleep 60 & echo $!; exec sleep 60'], { stdio: ['ignore', 'pipe', 'ignore'] });
    stack.defer(() => void parent.kill('SIGKILL'));
    const pid = Number(
      await new Promise<string>((resolve) => parent.stdout.once('data', (data) => resolve(String(data)))),
    );
    const boot = (await readFile('/proc/sys/kernel/random/boot_id', 'utf8')).trim();
    await writeFile(`${file}.lock`, `${pid} ${boot} ${(await stat(pid))[19]}`);
    await expect(lockFile(file, 'registry')).rejects.toThrow(`is used by another process (${pid})`);
    // Its parent is a process of this test, and so is it.
    process.kill(pid, 'SIGKILL');
    await expect.poll(async () => (await stat(pid))[0]).toBe('Z');
    await using lock = await lockFile(file, 'registry');
    expect(lock).toBeDefined();
    expect(await readFile(`${file}.lock`, 'utf8')).toMatch(new RegExp(`^${process.pid} `));
  },
);
