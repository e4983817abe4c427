import { type ChildProcess, execFile, spawn } from 'node:child_process';
import { closeSync, existsSync, mkdirSync, openSync, readFileSync, writeFileSync } from 'node:fs';
import { createServer } from 'node:net';
import { dirname } from 'node:path';
import type { CheckHost } from './checks.ts';
import type { ProcessSpec } from './plan.ts';
import { REAPER } from './reaper.ts';

/** How a process ended. */
export interface ProcessEnd {
  readonly code: number | null;
  readonly signal: string | null;
  /** Set when it could not be started. */
  readonly error?: string;
}

/** A started process, the leader of its own group. */
export interface LaunchedProcess {
  /** Also the id of its group; undefined when it could not be started. */
  readonly pid: number | undefined;
  /** Resolves when the process itself has ended; others of its group may live on. */
  readonly ended: Promise<ProcessEnd>;
}

/** Ends the groups it knows if this process is gone. */
export interface Reaper {
  watch(group: number): void;
  forget(group: number): void;
  /** Ends the watch without ending a group. */
  close(): Promise<void>;
}

/** What launching asks of the machine. */
export interface LaunchSystem extends CheckHost {
  start(spec: ProcessSpec): LaunchedProcess;
  /** Signals a whole group; false when there is none. 0 only asks. */
  signalGroup(group: number, signal: NodeJS.Signals | 0): boolean;
  /** True when a GET is answered with 2xx. */
  isReady(url: string): Promise<boolean>;
  write(path: string, text: string): void;
  /** The last lines of a log, without empty ones. */
  tail(path: string, lines: number): readonly string[];
  startReaper(graceMs: number): Reaper;
}

/** What the process around gives. */
export interface SystemParts {
  readonly env: Readonly<Record<string, string | undefined>>;
  signalGroup(group: number, signal: NodeJS.Signals | 0): boolean;
}

const CHECK_TIMEOUT_MS = 60_000;
const READY_TIMEOUT_MS = 2000;
const TAIL_BYTES = 16_384;

/** The real machine. */
export function createLaunchSystem({ env, signalGroup }: SystemParts): LaunchSystem {
  return {
    run: (command) => runCommand(command, env),
    portIsFree,
    exists: existsSync,
    start: (spec) => startProcess(spec, env),
    signalGroup,
    isReady,
    write: (path, text) => {
      mkdirSync(dirname(path), { recursive: true });
      writeFileSync(path, text);
    },
    tail: (path, lines) => {
      if (!existsSync(path)) return [];
      const text = readFileSync(path).subarray(-TAIL_BYTES).toString();
      return text
        .split('\n')
        .filter((line) => line.trim() !== '')
        .slice(-lines);
    },
    startReaper: (graceMs) => startReaper(graceMs, env),
  };
}

function runCommand([program = '', ...args]: readonly string[], env: SystemParts['env']): ReturnType<CheckHost['run']> {
  return new Promise((resolve) => {
    execFile(program, args, { env: { ...env }, timeout: CHECK_TIMEOUT_MS }, (error, stdout) => {
      if (error === null) resolve({ code: 0, stdout });
      else if (error.code === 'ENOENT' || error.code === 'EACCES') resolve(undefined);
      else resolve({ code: typeof error.code === 'number' ? error.code : 1, stdout });
    });
  });
}

function portIsFree(host: string, port: number): Promise<boolean> {
  return new Promise((resolve) => {
    const server = createServer();
    server.once('error', () => resolve(false));
    server.listen(port, host, () => server.close(() => resolve(true)));
  });
}

function startProcess({ command, env, logFile }: ProcessSpec, base: SystemParts['env']): LaunchedProcess {
  const [program = '', ...args] = command;
  mkdirSync(dirname(logFile), { recursive: true });
  const log = openSync(logFile, 'w');
  // A group of its own: Ctrl-C reaches only this process, which then stops the others in order, and a signal to the
  // group reaches the workers that an engine starts.
  const child = spawn(program, args, { env: { ...base, ...env }, stdio: ['ignore', log, log], detached: true });
  closeSync(log);
  return { pid: child.pid, ended: endOf(child) };
}

function endOf(child: ChildProcess): Promise<ProcessEnd> {
  return new Promise((resolve) => {
    child.once('error', (error) => {
      const isMissing = 'code' in error && error.code === 'ENOENT';
      resolve({ code: null, signal: null, error: isMissing ? `there is no ${child.spawnfile}` : error.message });
    });
    child.once('exit', (code, signal) => resolve({ code, signal }));
  });
}

async function isReady(url: string): Promise<boolean> {
  try {
    const reply = await fetch(url, { signal: AbortSignal.timeout(READY_TIMEOUT_MS) });
    await reply.body?.cancel();
    return reply.ok;
  } catch {
    return false;
  }
}

function startReaper(graceMs: number, env: SystemParts['env']): Reaper {
  const grace = String(Math.max(1, Math.ceil(graceMs / 1000)));
  const child = spawn('/bin/sh', ['-c', REAPER, 'baton-launch-reaper', grace], {
    env: { ...env },
    stdio: ['pipe', 'ignore', 'ignore'],
    detached: true,
  });
  const ended = endOf(child);
  // It may have been killed; the others are stopped without it.
  child.stdin.on('error', () => {});
  return {
    watch: (group) => void child.stdin.write(`+${group}\n`),
    forget: (group) => void child.stdin.write(`-${group}\n`),
    async close() {
      child.stdin.end();
      await ended;
    },
  };
}
