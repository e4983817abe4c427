import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { createInterface } from 'node:readline';
import { BATON } from './executable.ts';

/** Where a process listens, by the names of its log line. */
export interface BatonAddresses {
  readonly facade: string;
  readonly admin: string;
  readonly rpc: string;
}

/** A `baton` child process. What it does not listen on has an empty address. */
export interface BatonProcess extends AsyncDisposable {
  /** Base URL of the front door. */
  readonly url: string;
  readonly adminUrl: string;
  /** `host:port` of the RPC port. */
  readonly rpc: string;
  /** Lines it wrote to standard error so far. */
  readonly lines: readonly string[];
  /** Sends a signal; resolves with the exit code once it has ended, null after SIGKILL. */
  readonly end: (signal: 'SIGTERM' | 'SIGKILL') => Promise<number | null>;
  /** Sends a signal that does not end it. */
  readonly signal: (signal: 'SIGSTOP' | 'SIGCONT' | 'SIGHUP') => void;
}

/** Starts `baton serve`, of this checkout or another one, on free ports with JSON logs; resolves when it is up. Disposing ends it. */
export async function startBatonProcess(
  args: readonly string[],
  env: Readonly<Record<string, string>> = {},
  command = BATON,
): Promise<BatonProcess> {
  const fixed = ['--host', '127.0.0.1', '--port', '0', '--admin-port', '0', '--rpc-port', '0', '--log-format', 'json'];
  const child = spawn(command, ['serve', ...fixed, ...args], {
    // Nothing before these processes has to notice that they stop.
    env: { ...process.env, BATON_DRAIN_SETTLE: '0', ...env },
    stdio: ['ignore', 'ignore', 'pipe'],
  });
  const lines: string[] = [];
  const exited = once(child, 'exit');
  const addresses = new Promise<Partial<BatonAddresses>>((resolve, reject) => {
    createInterface({ input: child.stderr }).on('line', (line) => {
      lines.push(line);
      if (line.includes('"baton is up"')) resolve(JSON.parse(line));
    });
    child.on('error', reject);
    child.on('exit', (code) => reject(new Error(`baton ended with ${code}:\n${lines.join('\n')}`)));
  });
  const { facade, admin, rpc = '' } = await addresses;
  const end = async (signal: 'SIGTERM' | 'SIGKILL') => {
    child.kill(signal);
    await exited;
    return child.exitCode;
  };
  return {
    url: facade === undefined ? '' : `http://${facade}`,
    adminUrl: admin === undefined ? '' : `http://${admin}`,
    rpc,
    lines,
    end,
    signal: (signal) => void child.kill(signal),
    [Symbol.asyncDispose]: async () => void (await end('SIGTERM')),
  };
}
