import { describe, expect, test } from 'vitest';
import { type CheckHost, findGpus, findMissing, findTakenPorts } from '../../src/launch/checks.ts';
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
          : { code: 0, stdout: Array.from({ length: gpus }, (_, i) => `${i}\n`).join('') };
      }
      if (modules === undefined) return undefined;
      const asked = args.slice(2);
      return { code: 0, stdout: asked.filter((name) => !modules.includes(name)).join('\n') };
    },
    portIsFree: async (_, port) => !taken.includes(port),
    exists: (path) => files.includes(path),
  };
}

async function missing(flags: Record<string, string>, host: CheckHost, env: Record<string, string> = {}) {
  return findMissing(settingsOf(flags), await findGpus(env, host), env, host);
}

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
    expect(await findGpus({ CUDA_VISIBLE_DEVICES: '4, 6' }, host)).toEqual(['4', '6']);
    expect(await missing({}, host, { CUDA_VISIBLE_DEVICES: '4,6', HF_TOKEN: 'hf_x' })).toEqual([
      expect.stringMatching(/^4 GPUs, found 2 \(CUDA_VISIBLE_DEVICES\);/),
    ]);
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
