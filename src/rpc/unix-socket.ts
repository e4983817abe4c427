import type { Stats } from 'node:fs';
import { lstat, unlink } from 'node:fs/promises';
import { connect } from 'node:net';
import { dirname } from 'node:path';

/** Why a path cannot become the socket of this process; the message is for people. */
export class SocketPathError extends Error {
  override readonly name = 'SocketPathError';
}

// sun_path of Linux holds 108 bytes with the zero at the end, that of macOS 104.
const MAX_PATH_BYTES = 103;

/** Makes room at a path: what a process left there that is not running any more goes, everything else is an error. */
export async function clearSocketPath(path: string): Promise<void> {
  if (Buffer.byteLength(path) > MAX_PATH_BYTES) {
    throw new SocketPathError(`the path of a socket has at most ${MAX_PATH_BYTES} bytes: ${path}`);
  }
  if ((await statIfThere(dirname(path))) === undefined) {
    throw new SocketPathError(`the folder of the socket ${path} does not exist`);
  }
  const found = await statIfThere(path);
  if (found === undefined) return;
  if (!found.isSocket()) throw new SocketPathError(`${path} is there already and is no socket`);
  if (await answers(path)) throw new SocketPathError(`another process listens on ${path}`);
  await unlink(path);
}

async function statIfThere(path: string): Promise<Stats | undefined> {
  try {
    return await lstat(path);
  } catch (error) {
    if (error instanceof Error && 'code' in error && error.code === 'ENOENT') return undefined;
    throw error;
  }
}

/** Runs `listen` so that a socket file it makes is readable and writable for the owner alone from its first moment. */
export function forOwnerAlone(listen: () => void): void {
  const umask = process.umask(0o177);
  try {
    listen();
  } finally {
    process.umask(umask);
  }
}

/** Only a refusal tells that nobody is there: a full queue is no reason to take the path away. */
function answers(path: string): Promise<boolean> {
  return new Promise((resolve) => {
    const socket = connect(path);
    const settle = (answer: boolean) => {
      socket.destroy();
      resolve(answer);
    };
    socket.once('connect', () => settle(true));
    socket.once('error', (error) => settle(!('code' in error && error.code === 'ECONNREFUSED')));
  });
}
