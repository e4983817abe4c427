import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { StartError } from '../../src/roles/listen.ts';
import type { Running } from '../../src/roles.ts';

/** The command that runs baton: of this checkout, or the executable that the whole run is to be made with. */
export const BATON = process.env['BATON_BIN'] ?? 'bin/baton';

/** What settings are made from, as a command line would give them. */
export interface Settings {
  readonly flags: Readonly<Record<string, string | readonly string[]>>;
  readonly yaml: string | undefined;
  readonly env: Readonly<Record<string, string>>;
}

/** Starts the executable of BATON_BIN as `startBaton` starts baton in this process. */
export async function startExecutable(
  { flags, yaml, env }: Settings,
  log: Record<string, unknown>[],
): Promise<Running> {
  const folder = mkdtempSync(join(tmpdir(), 'baton-settings-'));
  const file = join(folder, 'test.yaml');
  if (yaml !== undefined) writeFileSync(file, yaml);
  const all = { ...flags, ...(yaml === undefined ? {} : { config: file }), 'log-level': 'debug', 'log-format': 'json' };
  const child = spawn(BATON, ['serve', ...Object.entries(all).flatMap(flagWords)], {
    // Nothing but what the test gives: the executable needs no Node and no PATH.
    env: { ...env },
    stdio: ['ignore', 'ignore', 'pipe'],
  });
  const ended = once(child, 'close').finally(() => rmSync(folder, { recursive: true, force: true }));
  const said: string[] = [];
  const up = new Promise<Running['addresses']>((resolve, reject) => {
    createInterface({ input: child.stderr }).on('line', (line) => {
      if (!line.startsWith('{')) return void said.push(line.replace(/^baton: /, ''));
      const entry = JSON.parse(line);
      log.push(entry);
      if (entry.msg === 'baton is up') resolve(addressesOf(entry));
    });
    void ended.then(() => reject(new StartError(said.join('\n'))), reject);
  });
  const addresses = await up;
  return {
    addresses,
    reload: () => void child.kill('SIGHUP'),
    async stop({ settle = false } = {}) {
      child.kill(settle ? 'SIGTERM' : 'SIGINT');
      await ended;
    },
  };
}

function flagWords([name, value]: readonly [string, string | readonly string[]]): readonly string[] {
  if (typeof value !== 'string') return value.flatMap((each) => [`--${name}`, each]);
  return value === 'true' ? [`--${name}`] : [`--${name}`, value];
}

function addressesOf(entry: Readonly<Record<string, string>>): Running['addresses'] {
  const names = ['facade', 'rpc', 'rpcSocket', 'admin', 'notices'];
  return Object.fromEntries(Object.entries(entry).filter(([name]) => names.includes(name)));
}
