import { constants } from 'node:fs';
import { type FileHandle, lstat, open, readFile, rename, rm } from 'node:fs/promises';
import { dirname } from 'node:path';

/** What a file belongs to, for messages. */
export type FileOwner = 'store' | 'registry';

/**
 * The right to use a file, held by one process. Ends with {@link Symbol.asyncDispose}; what a process left that was
 * killed is taken over.
 *
 * @throws Error where a running process holds it, or the folder cannot be written
 */
export async function lockFile(file: string, owner: FileOwner): Promise<AsyncDisposable> {
  const lock = `${file}.lock`;
  for (let tries = 0; ; tries++) {
    try {
      const handle = await open(lock, 'wx', 0o600);
      await handle.writeFile(`${process.pid} ${await lifeOf(process.pid)}`);
      await handle.close();
      return { [Symbol.asyncDispose]: () => rm(lock, { force: true }) };
    } catch (error) {
      const code = codeOf(error);
      if (code === 'ENOENT') throw new Error(`the folder of ${file} does not exist`);
      if (code !== 'EEXIST') throw new Error(`${lock} cannot be written (${code})`);
    }
    const [holder = '', ...life] = (await readFile(lock, 'utf8').catch(() => '')).split(' ');
    if (tries > 0 || (isRunning(Number(holder)) && (await holdsOn(Number(holder), life.join(' '))))) {
      throw new Error(
        `${file} is used by another process (${holder}); give each ${owner} a file of its own, or remove ${lock} if none runs`,
      );
    }
    await rm(lock, { force: true });
  }
}

/**
 * Whether a file begins with the family name of its kind, or is not there; false for an empty one.
 *
 * @throws Error for what is somebody else's: it is not touched, and is no place for such a file either
 */
export async function isOwnFile(file: string, family: string, owner: FileOwner): Promise<boolean> {
  const refused = (what: string) => new Error(`${file} ${what}; name a file for the ${owner} alone`);
  const stats = await lstat(file).catch((error: unknown) => {
    if (codeOf(error) === 'ENOENT') return undefined;
    throw refused(`cannot be read (${codeOf(error)})`);
  });
  // Without a file the start of an earlier process may have got as far as moving it.
  if (stats === undefined) return true;
  if (!stats.isFile()) throw refused(stats.isDirectory() ? 'is a directory' : 'is no plain file');
  const handle = await open(file, 'r');
  try {
    const head = Buffer.alloc(family.length);
    const { bytesRead } = await handle.read(head, 0, family.length, 0);
    if (bytesRead === 0) return false;
    if (head.toString('latin1') !== family) throw refused(`is not one that a ${owner} wrote`);
    return true;
  } finally {
    await handle.close();
  }
}

/** Writes a file in place of an earlier one; it is there whole or not at all. */
export async function replaceFile(file: string, fill: (handle: FileHandle) => Promise<void>): Promise<void> {
  const draft = `${file}.draft`;
  const handle = await open(draft, constants.O_WRONLY | constants.O_CREAT | constants.O_TRUNC, 0o600);
  try {
    await handle.chmod(0o600);
    await fill(handle);
    await handle.sync();
  } finally {
    await handle.close();
  }
  await rename(draft, file);
  await syncFolder(file);
}

/** Makes renames in the folder of a file last. */
export async function syncFolder(file: string): Promise<void> {
  const folder = await open(dirname(file), 'r');
  try {
    await folder.sync();
  } finally {
    await folder.close();
  }
}

/** Whether the process with an id is the one of that life, and uses files: one that has ended and waits for its parent does not. */
async function holdsOn(pid: number, life: string): Promise<boolean> {
  const [state = ''] = await statOf(pid);
  return state !== 'Z' && state !== 'X' && (await lifeOf(pid)) === life;
}

/** Tells two processes with one id apart, as the first process of each container is; empty where the system does not say. */
async function lifeOf(pid: number): Promise<string> {
  const [boot, stat] = await Promise.all([readSystem('/proc/sys/kernel/random/boot_id'), statOf(pid)]);
  // Field 22 is the time of the start.
  const start = stat[19] ?? '';
  return start === '' ? '' : `${boot.trim()} ${start}`;
}

/** The fields of a process from the third on, its state; they are counted behind the name, which may hold spaces. */
async function statOf(pid: number): Promise<readonly string[]> {
  const stat = await readSystem(`/proc/${pid}/stat`);
  return stat === '' ? [] : stat.slice(stat.lastIndexOf(')') + 2).split(' ');
}

function readSystem(path: string): Promise<string> {
  return readFile(path, 'utf8').catch(() => '');
}

function isRunning(pid: number): boolean {
  if (!Number.isInteger(pid) || pid <= 0) return false;
  try {
    process.kill(pid, 0);
    return true;
  } catch (error) {
    return codeOf(error) === 'EPERM';
  }
}

/** The code of a system error, or what was thrown as text. */
export function codeOf(error: unknown): string {
  return error instanceof Error && 'code' in error ? String(error.code) : String(error);
}
