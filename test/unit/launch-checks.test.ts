import { describe, expect, test } from 'vitest';
import { type CheckHost, findGpus, findMissing, findTakenPorts } from '../../src/launch/checks.ts';
import { planLaunch } from '../../src/launch/plan.ts';
import { planOf, settingsOf } from '../support/launch-parts.ts';

interface Machine {
  readonly gpus?: number;
  /** Undefined: there is no Python. */
  readonly modules?: readonly string[];
  readonly files?: readonly string[];
  readonly taken?: readonly number[];
}

function machine({ gpus, modules, files = [], taken = [] }: Machine): CheckHost {
  return {
    async run([program = '', ...args]) {
      if (program === 'nvidia-smi') {
        return gpus === undefined
          ? undefined
          : {
              code: 0,
              stdout: Array.from({ length: gpus }, (_, i) => `${args[0]?.endsWith('uuid') ? UUIDS[i] : i}\n`).join(''),
            };
      }
      if (modules === undefined) return undefined;
      const asked = args.slice(2);
      return { code: 0, stdout: asked.filter((name) => !modules.includes(name)).join('\n') };
    },
    portIsFree: async (_, port) => !taken.includes(port),
    exists: (path) => files.includes(path),
  };
}

async function missing(
  flags: Record<string, string>,
  host: CheckHost,
  env: Record<string, string> = {},
  topology?: string,
) {
  const settings = settingsOf(flags, topology);
  return findMissing(settings, await findGpus(env, host, settings), env, host);
}

const UUIDS = ['GPU-aaaa1111', 'GPU-bbbb2222', 'GPU-cccc3333', 'GPU-dddd4444'];

const COMPLETE: Machine = { gpus: 4, modules: ['vllm', 'nixl', 'lmcache'] };

describe('what real engines need', () => {
  test('all that is missing is told at once', async () => {
    expect(await missing({ connector: 'lmcache' }, machine({ modules: ['nixl'] }))).toEqual([
      '4 GPUs, found 0; start fewer engines (--prefill, --decode), or use --device cpu or --sim',
      'the module vllm in python3 (install it there, or name another --python)',
      'the module lmcache in python3 (install it there, or name another --python)',
      'HF_TOKEN, an access token that starts with hf_: meta-llama/Llama-3.1-8B-Instruct is a gated model (--model)',
    ]);
  });

  test('nothing is missing on a complete machine', async () => {
    expect(await missing({}, machine(COMPLETE), { HF_TOKEN: 'hf_x' })).toEqual([]);
  });

  test('simulated engines need nothing', async () => {
    expect(await missing({ sim: 'true' }, machine({}))).toEqual([]);
  });

  test('a GPU for each rank, unless there are none', async () => {
    const env = { HF_TOKEN: 'hf_x' };
    expect(await missing({ 'tensor-parallel-size': '2' }, machine(COMPLETE), env)).toEqual([
      expect.stringMatching(/^8 GPUs, found 4;/),
    ]);
    expect(await missing({ device: 'cpu' }, machine({ ...COMPLETE, gpus: 0 }), env)).toEqual([]);
  });

  test('CUDA_VISIBLE_DEVICES says which GPUs there are', async () => {
    const host = machine({ ...COMPLETE, gpus: 8 });
    expect(await findGpus({ CUDA_VISIBLE_DEVICES: '4, 6' }, host, settingsOf({}))).toEqual(['4', '6']);
    expect(await missing({}, host, { CUDA_VISIBLE_DEVICES: '4,6', HF_TOKEN: 'hf_x' })).toEqual([
      expect.stringMatching(/^4 GPUs, found 2 \(CUDA_VISIBLE_DEVICES\);/),
    ]);
  });

  test.each([
    ['numbers and UUIDs', '0,1', 'gpus: [GPU-aaaa1111]', /^one way to name GPUs: /],
    ['UUIDs and numbers', 'GPU-aaaa1111,GPU-bbbb2222', 'gpus: [0]', /^one way to name GPUs: /],
    ['a UUID and its beginning', 'GPU-aaaa1111,GPU-bbbb2222', 'gpus: [GPU-aaaa]', /^whole UUIDs of GPUs: GPU-aaaa /],
  ])('a GPU is not dealt out under two names: %s', async (_what, visible, gpus, sentence) => {
    const topology = `instances:\n  - {role: prefill, ${gpus}}\n  - {role: decode}\n`;
    const env = { CUDA_VISIBLE_DEVICES: visible, HF_TOKEN: 'hf_x' };
    expect(await missing({}, machine(COMPLETE), env, topology)).toEqual([expect.stringMatching(sentence)]);
  });

  test('where some are named by UUID, the others are dealt out by UUID', async () => {
    const topology = 'instances:\n  - {role: prefill, gpus: [GPU-bbbb2222]}\n  - {role: decode}\n';
    const settings = settingsOf({}, topology);
    const env = { HF_TOKEN: 'hf_x' };
    const gpus = await findGpus(env, machine(COMPLETE), settings);
    expect(gpus).toEqual(UUIDS);
    expect(await missing({}, machine(COMPLETE), env, topology)).toEqual([]);
    const { engines } = planLaunch(settings, { self: ['baton'], env, gpus });
    expect(engines.map((engine) => engine.env['CUDA_VISIBLE_DEVICES'])).toEqual(['GPU-bbbb2222', 'GPU-aaaa1111']);
    const own = 'instances:\n  - {role: prefill, gpus: [0]}\n  - {role: decode, gpus: [GPU-aaaa1111]}\n';
    expect(await missing({}, machine(COMPLETE), env, own)).toEqual([expect.stringMatching(/^one way to name GPUs: /)]);
  });

  test('a Python that is not there is named', async () => {
    const found = await missing({ python: '/opt/py' }, machine({ gpus: 4 }), { HF_TOKEN: 'hf_x' });
    expect(found).toEqual(['/opt/py, the Python that has vllm and nixl (--python)']);
  });

  test.each([
    ['a token in the home folder', {}, { HOME: '/home/u' }, ['/home/u/.cache/huggingface/token']],
    ['offline', {}, { HF_HUB_OFFLINE: '1' }, []],
    ['a model that anybody may have', { model: 'Qwen/Qwen3-8B' }, {}, []],
    ['a folder of that name', { model: 'meta-llama/x' }, {}, ['meta-llama/x']],
  ] as const)('no token is needed with %s', async (_, flags, env, files) => {
    expect(await missing({ ...flags }, machine({ ...COMPLETE, files }), { ...env })).toEqual([]);
  });

  test('something that is no token does not count', async () => {
    expect(await missing({}, machine(COMPLETE), { HF_TOKEN: 'secret' })).toEqual([expect.stringMatching(/^HF_TOKEN/)]);
  });
});

test('ports that are taken are told with what wanted them', async () => {
  const { ports } = planOf(settingsOf());
  expect(await findTakenPorts(ports, machine({ taken: [7101, 5602, 9100] }))).toEqual([
    {
      where: '--prefill-port',
      message: "port 7101 (prefiller2's HTTP port) is in use; end what listens there or choose another",
    },
    {
      where: '--side-port',
      message: "port 5602 (decoder1's side channel) is in use; end what listens there or choose another",
    },
    { where: '--port', message: "port 9100 (baton's port) is in use; end what listens there or choose another" },
  ]);
});
