import { spawn } from 'node:child_process';
import { existsSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join, resolve } from 'node:path';
import { SHARED } from './shared.ts';

/** Base URLs of running engines: one prefill, one decode, one plain instance with the same weights. */
export interface RealEngines extends AsyncDisposable {
  readonly prefill: string;
  readonly decode: string;
  readonly plain: string;
  readonly log: readonly string[];
}

/**
 * Uses the engines of BATON_REAL_PREFILL, BATON_REAL_DECODE and BATON_REAL_PLAIN where they are set; else installs and
 * starts real vLLM with the handed scripts (BATON_REAL_DIR keeps the installation, default in the temporary folder).
 */
export async function realEngines(): Promise<RealEngines> {
  const { BATON_REAL_PREFILL: prefill, BATON_REAL_DECODE: decode, BATON_REAL_PLAIN: plain } = process.env;
  if (prefill !== undefined && decode !== undefined && plain !== undefined) {
    return { prefill, decode, plain, log: ['engines: given by URL'], async [Symbol.asyncDispose]() {} };
  }
  const home = process.env['BATON_REAL_DIR'] ?? join(tmpdir(), 'baton-real-engines');
  const venv = join(home, 'venv');
  const overlay = join(venv, 'overlay-0.33');
  const scripts = resolve(SHARED, 'engines');
  const log: string[] = [];
  if (!existsSync(overlay)) log.push(await run('bash', [join(scripts, 'install.sh'), venv, 'overlay'], {}));
  const basePort = 18100;
  const env = {
    ENGINE_PY: join(venv, 'bin/python'),
    RUN_DIR: join(home, 'run'),
    VLLM_OVERLAY: overlay,
    BASE_PORT: String(basePort),
    LEASE: '60',
  };
  const engines = join(scripts, 'engines.py');
  log.push(await run('python3', [engines, 'up', 'p1:p', 'd1:d', 's:plain'], env));
  const url = (offset: number) => `http://127.0.0.1:${basePort + offset}`;
  return {
    prefill: url(0),
    decode: url(1),
    plain: url(2),
    log,
    async [Symbol.asyncDispose]() {
      await run('python3', [engines, 'down'], env);
    },
  };
}

function run(command: string, args: readonly string[], env: Readonly<Record<string, string>>): Promise<string> {
  return new Promise((done, fail) => {
    const child = spawn(command, args, { env: { ...process.env, ...env }, stdio: ['ignore', 'pipe', 'pipe'] });
    let output = '';
    for (const stream of [child.stdout, child.stderr]) stream.on('data', (data) => (output += String(data)));
    child.on('error', fail);
    child.on('close', (code) => {
      if (code === 0) done(output.trim());
      else fail(new Error(`${command} ended with ${code}:\n${output.slice(-4000)}`));
    });
  });
}
