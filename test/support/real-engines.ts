import { spawn } from 'node:child_process';
import { existsSync } from 'node:fs';
import { createServer } from 'node:net';
import { tmpdir } from 'node:os';
import { join, resolve } from 'node:path';
import { hasShared, SHARED } from './shared.ts';

/** Which engines a test wants. */
export interface EngineSet {
  readonly version: '0.33' | '0.32';
  /** `bytes`: what was generated is the same tokens when it comes back; `bpe`: it is not; `pictures`: the model sees some. */
  readonly tokens: 'bytes' | 'bpe' | 'pictures';
  readonly prefill: number;
  /** `decoder_kv_blocks_ttl`; default 60 s. */
  readonly decoderTtlSeconds?: number;
}

/** Base URLs of running engines: the prefill pool, one decode, one plain instance with the same weights. */
export interface RealEngines extends AsyncDisposable {
  readonly prefill: readonly string[];
  readonly decode: string;
  readonly plain: string;
  /** How long the decode engine keeps a handle's blocks, e.g. `60s`; prefill engines keep theirs for 60 s. */
  readonly decoderTtl: string;
  /** Kills D and starts it again on its ports; undefined for engines that were given by URL. */
  readonly restartDecode: (() => Promise<void>) | undefined;
}

/** Ports of one set, upwards from its base; the engines' side channels are 2,500 below. */
const PORTS = 10;
const SIDE_OFFSET = 2500;
let nextBase = 18_100;

/** Finds a base with free ports, so that engines which another run left behind do no harm. */
async function findBase(): Promise<number> {
  for (;;) {
    const base = nextBase;
    nextBase += 2 * PORTS;
    const ports = Array.from({ length: PORTS }, (_, i) => [base + i, base + i - SIDE_OFFSET]).flat();
    if ((await Promise.all(ports.map(isFree))).every((free) => free)) return base;
  }
}

function isFree(port: number): Promise<boolean> {
  return new Promise((done) => {
    const server = createServer();
    server.once('error', () => done(false));
    server.listen(port, '127.0.0.1', () => server.close(() => done(true)));
  });
}

/** Whether the engines are those of somebody else, who gave their URLs. */
export function givenByUrl(): boolean {
  return process.env['BATON_REAL_PREFILL'] !== undefined;
}

/** Whether tests on real engines can run here. */
export function hasRealEngines(): boolean {
  return givenByUrl() || hasShared('engines/install.sh');
}

/**
 * Uses the engines of BATON_REAL_PREFILL (comma-separated), BATON_REAL_DECODE and BATON_REAL_PLAIN where they are set;
 * else installs and starts real vLLM with the handed scripts. BATON_REAL_DIR keeps the installation, default a folder in
 * the temporary one.
 */
export async function realEngines(set: EngineSet): Promise<RealEngines> {
  const { BATON_REAL_PREFILL: prefill, BATON_REAL_DECODE: decode, BATON_REAL_PLAIN: plain } = process.env;
  const ttl = set.decoderTtlSeconds ?? 60;
  const decoderTtl = `${ttl}s`;
  if (prefill !== undefined && decode !== undefined && plain !== undefined) {
    const given = { prefill: prefill.split(','), decode, plain, decoderTtl, restartDecode: undefined };
    return { ...given, async [Symbol.asyncDispose]() {} };
  }
  const { home, python, paths, scripts, model } = await realInstallation(set.version, set.tokens);
  const base = await findBase();
  const env = {
    ENGINE_PY: python,
    RUN_DIR: join(home, `run-${base}`),
    MODEL_DIR: model,
    TOKENS: set.tokens,
    LEASE: '60',
    D_TTL: String(ttl),
    ...(paths.length === 0 ? {} : { VLLM_OVERLAY: paths.join(':') }),
  };
  const engines = join(scripts, 'engines.py');
  const prefills = Array.from({ length: set.prefill }, (_, i) => `p${i + 1}:p`);
  await run('python3', [engines, 'up', 'd1:d', 's:plain', ...prefills], { ...env, BASE_PORT: String(base) });
  const url = (offset: number) => `http://127.0.0.1:${base + offset}`;
  return {
    prefill: prefills.map((_, i) => url(2 + i)),
    decode: url(0),
    plain: url(1),
    decoderTtl,
    async restartDecode() {
      await run('python3', [engines, 'kill', 'd1'], env);
      await run('python3', [engines, 'up', 'd1:d'], { ...env, BASE_PORT: String(base) });
    },
    async [Symbol.asyncDispose]() {
      await run('python3', [engines, 'down'], env);
    },
  };
}

/** Where real vLLM is installed. */
interface RealInstallation {
  /** Folder of everything that the tests keep. */
  readonly home: string;
  readonly python: string;
  /** PYTHONPATH: another version than the one that is installed, and what a model wants besides. */
  readonly paths: readonly string[];
  /** Folder of the handed scripts. */
  readonly scripts: string;
  /** Folder of the tiny model. */
  readonly model: string;
}

/** Installs real vLLM with the handed scripts and makes the tiny model, unless an earlier run has. */
export async function realInstallation(
  version: EngineSet['version'],
  tokens: EngineSet['tokens'],
): Promise<RealInstallation> {
  const home = process.env['BATON_REAL_DIR'] ?? join(tmpdir(), 'baton-real-engines');
  const venv = join(home, 'venv');
  const overlay = join(venv, 'overlay-0.33');
  const scripts = resolve(SHARED, 'engines');
  if (!existsSync(join(overlay, 'vllm-0.33.0+cpu.dist-info'))) {
    await run('bash', [join(scripts, 'install.sh'), venv, 'overlay'], {});
  }
  const python = join(venv, 'bin/python');
  const model = join(home, `model-${tokens}`);
  const vision = tokens === 'pictures' ? [await visionParts(home, venv)] : [];
  if (!existsSync(join(model, tokens === 'pictures' ? 'processor_config.json' : 'config.json'))) {
    const text = join(scripts, 'make_model.py');
    const [script, ...args] = tokens === 'pictures' ? [VISION_MODEL, text, model] : [text, model, '--tokens', tokens];
    await run(python, [script, ...args], { HF_HUB_OFFLINE: '1', PYTHONPATH: vision.join(':') });
  }
  return { home, python, paths: [...(version === '0.33' ? [overlay] : []), ...vision], scripts, model };
}

const VISION_MODEL = join(import.meta.dirname, 'vision_model.py');
/** The one that goes with the handed lock's torch. */
const TORCHVISION = 'torchvision==0.28.0';

/** A folder with what vLLM wants for models that see. */
async function visionParts(home: string, venv: string): Promise<string> {
  const folder = join(home, 'torchvision');
  if (!existsSync(join(folder, 'torchvision'))) {
    const args = ['pip', 'install', '-q', '--python', join(venv, 'bin/python'), '--no-deps', '--target', folder];
    await run(join(venv, 'bin/uv'), [...args, TORCHVISION], {});
  }
  return folder;
}

function run(command: string, args: readonly string[], env: Readonly<Record<string, string>>): Promise<string> {
  return new Promise((done, fail) => {
    const child = spawn(command, args, { env: { ...process.env, ...env }, stdio: ['ignore', 'pipe', 'pipe'] });
    let output = '';
    for (const stream of [child.stdout, child.stderr]) {
      stream.on('data', (data) => {
        output += String(data);
      });
    }
    child.on('error', fail);
    // The engines inherit the pipes: the command has ended when it exits, not when they close.
    child.on('exit', (code) => {
      if (code === 0) done(output.trim());
      else fail(new Error(`${command} ${args.join(' ')} ended with ${code}:\n${output.slice(-4000)}`));
    });
  });
}
