import type { Problem } from '../config/problem.ts';
import { connectorLaunchOf } from './engine-flags.ts';
import { countGpus, type PortUse } from './plan.ts';
import type { LaunchSettings } from './topology.ts';

/** What the checks ask the machine. */
export interface CheckHost {
  /** Runs a command to its end; undefined when there is no such program. */
  run(command: readonly string[]): Promise<{ readonly code: number; readonly stdout: string } | undefined>;
  portIsFree(host: string, port: number): Promise<boolean>;
  exists(path: string): boolean;
}

/** The GPUs that engines may use, as CUDA_VISIBLE_DEVICES names them; that variable goes before the driver's list. */
export async function findGpus(
  env: Readonly<Record<string, string | undefined>>,
  host: CheckHost,
  settings: Pick<LaunchSettings, 'instances'>,
): Promise<readonly string[]> {
  const visible = env['CUDA_VISIBLE_DEVICES'];
  if (visible !== undefined) return linesOf(visible, ',');
  // In the words of those that are named: a GPU must not be dealt out again under its other name.
  const words = namedGpus(settings).some((gpu) => wayOf(gpu) === 'UUID') ? 'uuid' : 'index';
  const listed = await host.run(['nvidia-smi', `--query-gpu=${words}`, '--format=csv,noheader']);
  return listed?.code === 0 ? linesOf(listed.stdout, '\n') : [];
}

const namedGpus = ({ instances }: Pick<LaunchSettings, 'instances'>): readonly string[] =>
  instances.flatMap(({ gpus }) => gpus ?? []);

const wayOf = (gpu: string): 'number' | 'UUID' => (/^\d+$/.test(gpu) ? 'number' : 'UUID');

/** Says that one GPU may be meant by two names; empty when each has one. */
function findMixedGpus(settings: LaunchSettings, gpus: readonly string[]): readonly string[] {
  const named = namedGpus(settings);
  const isDealt = settings.instances.some((instance) => instance.gpus === undefined);
  const used = isDealt ? [...named, ...gpus] : named;
  if (new Set(used.map(wayOf)).size > 1) {
    return [
      'one way to name GPUs: some are given as numbers and some as UUIDs (gpus, CUDA_VISIBLE_DEVICES), so two engines could get the same one',
    ];
  }
  // CUDA takes the beginning of a UUID for the whole.
  const short = used.find(
    (gpu) => wayOf(gpu) === 'UUID' && used.some((other) => other !== gpu && other.startsWith(gpu)),
  );
  return short === undefined ? [] : [`whole UUIDs of GPUs: ${short} is the beginning of another one that is named`];
}

/** Says that the engines need other or more GPUs than there are; empty when there are enough or none is needed. */
export function findMissingGpus(
  settings: LaunchSettings,
  gpus: readonly string[],
  env: Readonly<Record<string, string | undefined>>,
): readonly string[] {
  const needed = countGpus(settings);
  if (settings.sim || settings.device !== 'cuda') return [];
  const mixed = findMixedGpus(settings, gpus);
  if (mixed.length > 0 || gpus.length >= needed) return mixed;
  const seen = env['CUDA_VISIBLE_DEVICES'] === undefined ? '' : ' (CUDA_VISIBLE_DEVICES)';
  return [
    `${needed} GPUs, found ${gpus.length}${seen}; start fewer engines (--prefill, --decode), or use --device cpu or --sim`,
  ];
}

/** Everything that real engines need and that is not there, one sentence each; empty when they can start. */
export async function findMissing(
  settings: LaunchSettings,
  gpus: readonly string[],
  env: Readonly<Record<string, string | undefined>>,
  host: CheckHost,
): Promise<readonly string[]> {
  if (settings.sim) return [];
  const missing = [...findMissingGpus(settings, gpus, env), ...(await findMissingModules(settings, host))];
  if (isGated(settings.model) && !host.exists(settings.model) && !hasToken(env, host)) {
    missing.push(`HF_TOKEN, an access token that starts with hf_: ${settings.model} is a gated model (--model)`);
  }
  return missing;
}

/** The ports of the plan that something else has, as mistakes. */
export async function findTakenPorts(ports: readonly PortUse[], host: CheckHost): Promise<readonly Problem[]> {
  const free = await Promise.all(ports.map((use) => host.portIsFree(use.host, use.port)));
  return ports
    .filter((_, i) => free[i] === false)
    .map(({ port, what, where }) => ({
      where,
      message: `port ${port} (${what}) is in use; end what listens there or choose another`,
    }));
}

// Only found, not imported: an import of vLLM alone takes a quarter of a minute.
const FIND_MODULES = [
  'import importlib.util, sys',
  'print("\\n".join(m for m in sys.argv[1:] if importlib.util.find_spec(m) is None))',
].join('\n');

async function findMissingModules(settings: LaunchSettings, host: CheckHost): Promise<readonly string[]> {
  const { modules } = connectorLaunchOf(settings.connector);
  const found = await host.run([settings.python, '-c', FIND_MODULES, ...modules]);
  if (found === undefined) return [`${settings.python}, the Python that has ${modules.join(' and ')} (--python)`];
  if (found.code !== 0) return [`a Python that works: ${settings.python} ended with ${found.code} (--python)`];
  return linesOf(found.stdout, '\n').map(
    (name) => `the module ${name} in ${settings.python} (install it there, or name another --python)`,
  );
}

/** Models that Hugging Face hands out only to accounts that have accepted a licence. */
const GATED = ['meta-llama/', 'google/gemma'];

function isGated(model: string): boolean {
  return GATED.some((prefix) => model.toLowerCase().startsWith(prefix));
}

function hasToken(env: Readonly<Record<string, string | undefined>>, host: CheckHost): boolean {
  if (['HF_TOKEN', 'HUGGING_FACE_HUB_TOKEN'].some((name) => env[name]?.startsWith('hf_') === true)) return true;
  // Offline the model comes from the cache, or the engine says that it is not there.
  if (env['HF_HUB_OFFLINE'] === '1') return true;
  const home = env['HF_HOME'] ?? `${env['HOME'] ?? ''}/.cache/huggingface`;
  return host.exists(env['HF_TOKEN_PATH'] ?? `${home}/token`);
}

function linesOf(text: string, separator: string): readonly string[] {
  return text
    .split(separator)
    .map((line) => line.trim())
    .filter((line) => line !== '');
}
