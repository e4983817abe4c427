import process from 'node:process';
import type { StopSignal } from './cli/run.ts';
import type { Config } from './config/config.ts';
import { IS_EXECUTABLE, isDamage, readPart } from './executable/parts.ts';
import type { Logger } from './obs/log.ts';
import type { ReloadSource } from './roles/reload.ts';
import type { Running } from './roles.ts';

const SIGNALS = { SIGINT: 130, SIGTERM: 143 } as const;

/** Resolves at the first signal; the second one ends the process at once, whatever is still running. */
function stopRequested(): Promise<StopSignal> {
  return new Promise((resolve) => {
    let asked = false;
    for (const signal of ['SIGINT', 'SIGTERM'] as const) {
      process.on(signal, () => {
        if (asked) process.exit(SIGNALS[signal]);
        asked = true;
        resolve(signal);
      });
    }
  });
}

// Loaded only when it is needed: help and check-config answer without opening the servers' libraries.
async function start(config: Config, log: Logger, reload: ReloadSource): Promise<Running> {
  const { startBaton } = await import('./roles.ts');
  return startBaton(config, { log, reload });
}

/** Reads to the first line end, so that a key can be typed. */
async function readLine(): Promise<Uint8Array> {
  const chunks: Uint8Array[] = [];
  for await (const chunk of process.stdin) {
    if (!(chunk instanceof Uint8Array)) continue;
    const end = chunk.indexOf(0x0a);
    chunks.push(end < 0 ? chunk : chunk.subarray(0, end + 1));
    if (end >= 0) break;
  }
  return Buffer.concat(chunks);
}

function signalGroup(group: number, signal: NodeJS.Signals | 0): boolean {
  try {
    return process.kill(-group, signal);
  } catch {
    // No such group, or one of somebody else.
    return false;
  }
}

// A signal during the start counts as well, so nothing is loaded before this.
const stopping = stopRequested();

// A closed terminal must not cut every request, nor must a reload that comes early.
let hangUp: () => void = () => process.stderr.write('baton: SIGHUP changes nothing here: no settings are read again\n');
process.on('SIGHUP', () => hangUp());

/** Opened when something is written: a server's output is its log, and that is elsewhere. */
function writeOut(text: string): void {
  // A reader that has left (baton help | head) is no reason to crash.
  if (process.stdout.listenerCount('error') === 0) process.stdout.on('error', () => {});
  process.stdout.write(text);
}

async function main(): Promise<number> {
  const [{ runCli }, { readOrigin }] = await Promise.all([import('./cli/run.ts'), import('./config/version.ts')]);
  return runCli({
    argv: process.argv.slice(2),
    env: process.env,
    origin: readOrigin,
    nodeVersion: process.version,
    // Loaders and other options of Node go along.
    self: IS_EXECUTABLE ? [process.execPath] : [process.execPath, ...process.execArgv, process.argv[1] ?? ''],
    licenses: () => (IS_EXECUTABLE ? readPart('licenses').toString() : undefined),
    terminal: process.stderr.isTTY === true,
    readLine,
    out: writeOut,
    err: (text) => process.stderr.write(text),
    start,
    signalGroup,
    stopRequested: () => stopping,
    onHangUp: (listener) => {
      hangUp = listener;
    },
  });
}

// No await outside a function: the executable is a CommonJS script.
void main().then(
  (code) => {
    process.exitCode = code;
  },
  (error: unknown) => {
    if (!isDamage(error)) throw error;
    process.stderr.write(`baton: ${error.message}\n`);
    process.exitCode = 1;
  },
);
