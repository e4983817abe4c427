import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { createInterface } from 'node:readline';

/** A `baton` child process with its facade's address. */
export interface BatonProcess extends AsyncDisposable {
  readonly url: string;
  readonly adminUrl: string;
  /** Lines it wrote to standard error so far. */
  readonly lines: readonly string[];
}

/** Starts `bin/baton serve` on free ports with JSON logs; resolves when it is up. */
export async function startBatonProcess(
  args: readonly string[],
  env: Readonly<Record<string, string>> = {},
): Promise<BatonProcess> {
  const fixed = ['--host', '127.0.0.1', '--port', '0', '--admin-port', '0', '--rpc-port', '0', '--log-format', 'json'];
  const child = spawn('bin/baton', ['serve', ...fixed, ...args], {
    env: { ...process.env, ...env },
    stdio: ['ignore', 'ignore', 'pipe'],
  });
  const lines: string[] = [];
  const exited = once(child, 'exit');
  const addresses = new Promise<{ facade: string; admin: string }>((resolve, reject) => {
    createInterface({ input: child.stderr }).on('line', (line) => {
      lines.push(line);
      if (line.includes('"baton is up"')) resolve(JSON.parse(line));
    });
    child.on('error', reject);
    child.on('exit', (code) => reject(new Error(`baton ended with ${code}:\n${lines.join('\n')}`)));
  });
  const { facade, admin } = await addresses;
  return {
    url: `http://${facade}`,
    adminUrl: `http://${admin}`,
    lines,
    async [Symbol.asyncDispose]() {
      child.kill('SIGTERM');
      await exited;
    },
  };
}
