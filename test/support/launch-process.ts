import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdtempSync, rmSync } from 'node:fs';
import { createServer } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { BATON } from './executable.ts';

/** A running `baton launch`. */
export interface LaunchProcess extends AsyncDisposable {
  readonly url: string;
  readonly pid: number;
  /** Folder of the logs. */
  readonly folder: string;
  /** Everything it wrote so far, both streams. */
  text(): string;
  /** Resolves with the match when the output matches; rejects when it ends before. */
  seen(pattern: RegExp): Promise<RegExpExecArray>;
  /** Processes that it has named as started, by name; each leads a group. */
  groups(): ReadonlyMap<string, number>;
  kill(signal: NodeJS.Signals): void;
  /** Resolves with the exit code, null after a signal. */
  readonly ended: Promise<number | null>;
}

const PORTS = 100;
// Below the ports that the kernel gives to clients.
let nextBase = 21_000 + (process.pid % 100) * PORTS;

/** Finds a hundred consecutive ports of which the first forty are free. */
async function findBase(): Promise<number> {
  for (;;) {
    const base = nextBase;
    nextBase += PORTS;
    const free = await Promise.all(Array.from({ length: 40 }, (_, i) => isFree(base + i)));
    if (free.every(Boolean)) return base;
  }
}

function isFree(port: number): Promise<boolean> {
  return new Promise((done) => {
    const server = createServer();
    server.once('error', () => done(false));
    server.listen(port, '127.0.0.1', () => server.close(() => done(true)));
  });
}

/** Starts `bin/baton launch` on free ports with its logs in a folder of its own; does not wait for anything. */
export async function startLaunch(
  args: readonly string[],
  env: Readonly<Record<string, string>> = {},
): Promise<LaunchProcess> {
  const base = await findBase();
  const folder = mkdtempSync(join(tmpdir(), 'baton-launch-'));
  const ports = {
    'prefill-port': 0,
    'decode-port': 10,
    'side-port': 20,
    port: 30,
    'decoder-init-port': 31,
    'decoder-alloc-port': 34,
    'proxy-port': 37,
  };
  const child = spawn(
    BATON,
    [
      'launch',
      ...Object.entries(ports).flatMap(([flag, offset]) => [`--${flag}`, String(base + offset)]),
      ...['--rpc-port', 'off', '--admin-port', '0', '--log-dir', folder],
      ...args,
    ],
    { env: { ...process.env, ...env }, stdio: ['ignore', 'pipe', 'pipe'] },
  );
  if (child.pid === undefined) throw new Error(`${BATON} could not be started`);
  let text = '';
  const checks = new Set<() => void>();
  for (const stream of [child.stdout, child.stderr]) {
    stream.on('data', (data) => {
      text += String(data);
      for (const check of checks) check();
    });
  }
  const ended = once(child, 'close').then(([code]: unknown[]) => (typeof code === 'number' ? code : null));
  return {
    url: `http://127.0.0.1:${base + ports.port}`,
    pid: child.pid,
    folder,
    text: () => text,
    seen: (pattern) =>
      new Promise((resolve, reject) => {
        const check = (): void => {
          const match = pattern.exec(text);
          if (match !== null) resolve(match);
        };
        checks.add(check);
        check();
        void ended.then((code) => reject(new Error(`ended with ${code} before ${pattern}:\n${text}`)));
      }),
    groups: () =>
      new Map([...text.matchAll(/^(\w+) started: .* pid (\d+),/gm)].map(([, name = '', pid]) => [name, Number(pid)])),
    kill: (signal) => void child.kill(signal),
    ended,
    async [Symbol.asyncDispose]() {
      child.kill('SIGTERM');
      await ended;
      rmSync(folder, { recursive: true, force: true });
    },
  };
}

/** Whether a process group has a member. */
export function groupLives(group: number): boolean {
  try {
    return process.kill(-group, 0);
  } catch {
    return false;
  }
}
