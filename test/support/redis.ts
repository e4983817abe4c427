import { type ChildProcess, spawn, spawnSync } from 'node:child_process';
import { once } from 'node:events';
import { mkdtemp, rm, writeFile } from 'node:fs/promises';
import { connect } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import type { TestContext } from 'vitest';
import { freePort } from './free-port.ts';

const PROGRAM = process.env['BATON_TEST_REDIS'] ?? 'redis-server';

/** Whether a Redis server can be started here. With CI set it must be: what needs it then fails instead of skipping. */
export function hasRedis(): boolean {
  const found = spawnSync(PROGRAM, ['--version'], { stdio: 'ignore' }).status === 0;
  if (!found && process.env['CI'] !== undefined) throw new Error('redis-server is not installed, and CI is set');
  // biome-ignore lint/suspicious/noConsole: a test that does not run must be seen.
  if (!found) console.warn('skipped: redis-server is not installed');
  return found;
}

/** Skips a test aloud where there is no Redis server. */
export function needsRedis(context: Pick<TestContext, 'skip'>): void {
  if (!hasRedis()) context.skip();
}

/** A Redis server of its own on a free loopback port; nothing of it stays. */
export class RedisServer implements AsyncDisposable {
  readonly port: number;
  readonly #dir: string;
  readonly #args: readonly string[];
  #child: ChildProcess | undefined;

  private constructor(port: number, dir: string, args: readonly string[]) {
    this.port = port;
    this.#dir = dir;
    this.#args = args;
  }

  /** Starts one; `args` are of redis-server. */
  static async start(args: readonly string[] = []): Promise<RedisServer> {
    const server = new RedisServer(await freePort(), await mkdtemp(join(tmpdir(), 'baton-redis-')), args);
    await server.restart();
    return server;
  }

  /** Starts a sentinel that alone decides, soon, whether the server on that port is down; it calls it `mymaster`. */
  static async startSentinel(port: number): Promise<RedisServer> {
    const sentinel = new RedisServer(await freePort(), await mkdtemp(join(tmpdir(), 'baton-redis-')), ['--sentinel']);
    await sentinel.restart();
    await sentinel.command(`SENTINEL MONITOR mymaster 127.0.0.1 ${port} 1`);
    await sentinel.command('SENTINEL SET mymaster down-after-milliseconds 500');
    return sentinel;
  }

  get url(): string {
    return `redis://127.0.0.1:${this.port}`;
  }

  /** Starts the server again on its port and its files. */
  async restart(): Promise<void> {
    const isSentinel = this.#args.includes('--sentinel');
    // A sentinel writes into its own file what it learns.
    const file = join(this.#dir, 'redis.conf');
    await writeFile(file, `port ${this.port}\nbind 127.0.0.1\ndir ${this.#dir}\n${isSentinel ? '' : 'save ""\n'}`);
    const child = spawn(PROGRAM, [file, ...this.#args], { stdio: 'ignore' });
    this.#child = child;
    for (;;) {
      if (child.exitCode !== null) throw new Error(`redis-server ended with ${child.exitCode}`);
      const pong = await this.command('PING').catch(() => '');
      if (/^(\+PONG|-NOAUTH)/.test(pong)) return;
      await new Promise((resolve) => setTimeout(resolve, 10));
    }
  }

  /** One command in the inline form; resolves with the raw answer. */
  async command(line: string): Promise<string> {
    const socket = connect(this.port, '127.0.0.1');
    try {
      await once(socket, 'connect');
      socket.write(`${line}\r\n`);
      const [data] = await once(socket, 'data');
      return String(data);
    } finally {
      socket.destroy();
    }
  }

  signal(signal: 'SIGSTOP' | 'SIGCONT'): void {
    this.#child?.kill(signal);
  }

  /** SIGKILL: nothing is saved. */
  async kill(): Promise<void> {
    const child = this.#child;
    if (child === undefined || child.exitCode !== null || child.signalCode !== null) return;
    const ended = once(child, 'exit');
    child.kill('SIGKILL');
    await ended;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.kill();
    await rm(this.#dir, { recursive: true, force: true });
  }
}
