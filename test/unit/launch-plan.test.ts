import { describe, expect, test } from 'vitest';
import { parse } from 'yaml';
import { benchOf } from '../../src/launch/bench.ts';
import { formatPlan } from '../../src/launch/dry-run.ts';
import { findPlanProblems } from '../../src/launch/plan.ts';
import { planOf, resolveLaunch, settingsOf } from '../support/launch-parts.ts';

/** Each mistake as `where: message`. */
function mistakes(flags: Record<string, string>, text?: string): readonly string[] {
  const resolved = resolveLaunch(flags, text);
  const problems =
    resolved.kind === 'error' ? resolved.problems : findPlanProblems(resolved.settings, planOf(resolved.settings));
  return problems.map(({ where, message }) => `${where}: ${message}`);
}

/** The words after `flag` in a command. */
function wordAfter(command: readonly string[], flag: string): string | undefined {
  return command[command.indexOf(flag) + 1];
}

describe('without flags', () => {
  const plan = planOf(settingsOf());

  test('two prefill and two decode engines and the proxy, on the ports of the example', () => {
    expect(plan.engines.map(({ name, readyUrl }) => [name, new URL(readyUrl).port])).toEqual([
      ['prefiller1', '7100'],
      ['prefiller2', '7101'],
      ['decoder1', '7200'],
      ['decoder2', '7201'],
    ]);
    expect(plan.url).toBe('http://127.0.0.1:9100');
    expect([...plan.engines, plan.proxy].map(({ logFile }) => logFile)).toEqual([
      'prefiller1.log',
      'prefiller2.log',
      'decoder1.log',
      'decoder2.log',
      'proxy.log',
    ]);
  });

  test('each engine has a GPU and a side channel of its own', () => {
    expect(plan.engines.map(({ env }) => env['CUDA_VISIBLE_DEVICES'])).toEqual(['0', '1', '2', '3']);
    const sides = plan.engines.map(({ env }) => env['VLLM_NIXL_SIDE_CHANNEL_PORT']);
    expect(new Set(sides).size).toBe(4);
  });

  test('no two ports are the same', () => {
    expect(mistakes({})).toEqual([]);
    expect(mistakes({ connector: 'lmcache', 'tensor-parallel-size': '8' })).toEqual([]);
  });
});

describe('dry run', () => {
  test('nixl, one of each', () => {
    const settings = settingsOf({ prefill: '1', decode: '1', model: './my model', 'engine-arg': ['--dtype=float32'] });
    expect(formatPlan(planOf(settings))).toBe(`# prefiller1
CUDA_VISIBLE_DEVICES=0 \\
  VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1 \\
  VLLM_NIXL_SIDE_CHANNEL_PORT=5600 \\
  python3 -m vllm.entrypoints.openai.api_server --model './my model' --host 127.0.0.1 --port 7100 --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_producer","kv_connector_extra_config":{"bidirectional_kv_xfer":true}}' --dtype=float32 \\
  > prefiller1.log 2>&1

# decoder1
CUDA_VISIBLE_DEVICES=1 \\
  VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1 \\
  VLLM_NIXL_SIDE_CHANNEL_PORT=5601 \\
  python3 -m vllm.entrypoints.openai.api_server --model './my model' --host 127.0.0.1 --port 7200 --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_consumer","kv_connector_extra_config":{"bidirectional_kv_xfer":true}}' --dtype=float32 \\
  > decoder1.log 2>&1

# proxy
baton serve --host 127.0.0.1 --port 9100 --rpc-port 50051 --admin-port 29000 --kv-connector nixl --prefill http://127.0.0.1:7100 --decode http://127.0.0.1:7200 --drain-timeout 12000ms --drain-settle 0 \\
  > proxy.log 2>&1
`);
  });

  test('simulated engines are processes of baton', () => {
    expect(formatPlan(planOf(settingsOf({ sim: 'true', prefill: '1', decode: '1', 'log-dir': '/tmp/l' })))).toBe(
      `# prefiller1
baton sim --role prefill --port 7100 --model sim-model --connector nixl --side-port 5600 --bidirectional --fixed-ms 5 --prefill-ms-per-token 0.05 --decode-ms-per-token 5 \\
  > /tmp/l/prefiller1.log 2>&1

# decoder1
baton sim --role decode --port 7200 --model sim-model --connector nixl --side-port 5601 --bidirectional --fixed-ms 5 --prefill-ms-per-token 0.05 --decode-ms-per-token 5 \\
  > /tmp/l/decoder1.log 2>&1

# proxy
baton serve --host 127.0.0.1 --port 9100 --rpc-port 50051 --admin-port 29000 --kv-connector nixl --prefill http://127.0.0.1:7100 --decode http://127.0.0.1:7200 --drain-timeout 12000ms --drain-settle 0 \\
  > /tmp/l/proxy.log 2>&1
`,
    );
  });
});

describe('lmcache', () => {
  const plan = planOf(settingsOf({ connector: 'LMCacheConnectorV1', 'tensor-parallel-size': '2', 'log-dir': 'logs' }));

  test('each engine has its file, in both generations of keys', () => {
    expect(plan.files.map(({ path }) => path)).toEqual([
      'logs/prefiller1.lmcache.yaml',
      'logs/prefiller2.lmcache.yaml',
      'logs/decoder1.lmcache.yaml',
      'logs/decoder2.lmcache.yaml',
    ]);
    expect(plan.engines.map(({ env }) => env['LMCACHE_CONFIG_FILE'])).toEqual(plan.files.map(({ path }) => path));
    const files = plan.files.map(({ text }): Record<string, unknown> => parse(text));
    expect(files[0]).toMatchObject({
      enable_pd: true,
      pd_role: 'sender',
      pd_proxy_host: '127.0.0.1',
      pd_proxy_port: 7500,
      enable_xpyd: true,
      nixl_role: 'sender',
      nixl_proxy_host: '127.0.0.1',
      nixl_proxy_port: 7500,
    });
    expect(files[3]).toMatchObject({
      pd_role: 'receiver',
      pd_peer_init_port: [7302, 7303],
      pd_peer_alloc_port: [7402, 7403],
      nixl_role: 'receiver',
      nixl_peer_init_port: [7302, 7303],
      nixl_peer_alloc_port: [7402, 7403],
    });
    for (const file of files) {
      for (const [key, value] of Object.entries(file)) {
        if (/^pd_(role|proxy|peer|buffer)/.test(key)) expect(file[key.replace('pd_', 'nixl_')], key).toEqual(value);
      }
    }
  });

  test('the ports of ranks do not overlap between decode engines', () => {
    // The example's own proxy counts up by one, so that with two ranks the second engine gets a port of the first.
    const ports = plan.files
      .slice(2)
      .flatMap(({ text }) => [parse(text).pd_peer_init_port, parse(text).pd_peer_alloc_port]);
    expect(new Set(ports.flat()).size).toBe(8);
  });

  test('engines know their part, their rank and the hash seed', () => {
    const configs = plan.engines.map(({ command }) => JSON.parse(wordAfter(command, '--kv-transfer-config') ?? ''));
    expect(configs.map(({ kv_role, kv_connector_extra_config: extra }) => [kv_role, extra.lmcache_rpc_port])).toEqual([
      ['kv_producer', 'producer1'],
      ['kv_producer', 'producer2'],
      ['kv_consumer', 'consumer1'],
      ['kv_consumer', 'consumer2'],
    ]);
    expect(configs.map(({ kv_connector_extra_config: extra }) => extra.skip_last_n_tokens)).toEqual([
      undefined,
      undefined,
      1,
      1,
    ]);
    for (const { env, command } of plan.engines) {
      expect(env['PYTHONHASHSEED']).toBe('0');
      expect(wordAfter(command, '--tensor-parallel-size')).toBe('2');
    }
    expect(plan.engines.map(({ env }) => env['CUDA_VISIBLE_DEVICES'])).toEqual(['0,1', '2,3', '4,5', '6,7']);
  });

  test('baton is told what the example proxy is told', () => {
    const { command } = plan.proxy;
    expect(wordAfter(command, '--kv-connector')).toBe('lmcache');
    expect(wordAfter(command, '--decode')).toBe('http://127.0.0.1:7200');
    expect(wordAfter(command, '--decoder-init-port')).toBe('7300,7301');
    expect(wordAfter(command, '--decoder-alloc-port')).toBe('7400,7401');
    expect(wordAfter(command, '--proxy-port')).toBe('7500');
  });

  test('simulated engines have the same ports and ranks', () => {
    const sim = planOf(settingsOf({ sim: 'true', connector: 'lmcache', 'tensor-parallel-size': '2' }));
    const [first, , , last] = sim.engines.map(({ command }) => command);
    expect(wordAfter(first ?? [], '--notices')).toBe('tcp://127.0.0.1:7500');
    expect(wordAfter(last ?? [], '--ranks')).toBe('2');
    expect(wordAfter(last ?? [], '--init-port')).toBe('7302,7303');
    expect(wordAfter(last ?? [], '--alloc-port')).toBe('7402,7403');
    expect(sim.files).toEqual([]);
  });

  test('the buffer is where the device is, and the user chooses the transport', () => {
    const cpu = planOf(settingsOf({ connector: 'lmcache', device: 'cpu' }));
    expect(parse(cpu.files[0]?.text ?? '')).toMatchObject({ pd_buffer_device: 'cpu', nixl_buffer_device: 'cpu' });
    const own = planOf(settingsOf({ connector: 'lmcache' }), { UCX_TLS: 'rc' });
    expect(plan.engines[0]?.env['UCX_TLS']).toBe('cuda_ipc,cuda_copy,tcp');
    expect(own.engines[0]?.env['UCX_TLS']).toBeUndefined();
  });
});

describe('device', () => {
  test('on a CPU there are no GPUs, and engines share the cores unless they are pinned', () => {
    const settings = settingsOf({ device: 'cpu' });
    expect(planOf(settings).engines[0]?.env).toMatchObject({ VLLM_CPU_OMP_THREADS_BIND: 'nobind' });
    expect(planOf(settings).engines[0]?.env['CUDA_VISIBLE_DEVICES']).toBeUndefined();
    expect(planOf(settings, { VLLM_CPU_OMP_THREADS_BIND: '0-3' }).engines[0]?.env).not.toHaveProperty(
      'VLLM_CPU_OMP_THREADS_BIND',
    );
  });

  test('GPUs that an entry names are dealt to no other', () => {
    const file = 'instances:\n  - {role: prefill}\n  - {role: decode, gpus: [0]}\n  - {role: decode}\n';
    const plan = planOf(settingsOf({}, file));
    expect(plan.engines.map(({ env }) => env['CUDA_VISIBLE_DEVICES'])).toEqual(['1', '0', '2']);
  });
});

describe('topology file', () => {
  test('an entry says what is special, flags go before the file', () => {
    const file = [
      'model: from-file',
      'port: 9000',
      'engine_args: [--max-model-len, 8192]',
      'instances:',
      '  - {role: prefill, port: 7150, env: {NCCL_DEBUG: INFO}}',
      '  - {role: decode, name: big, tensor_parallel_size: 2, args: [--seed, 1]}',
      '  - {role: decode, side_port: 5700}',
    ].join('\n');
    const plan = planOf(settingsOf({ port: '9001' }, file));
    expect(plan.engines.map(({ name, readyUrl }) => `${name} ${new URL(readyUrl).port}`)).toEqual([
      'prefiller1 7150',
      'big 7200',
      'decoder2 7201',
    ]);
    expect(plan.url).toBe('http://127.0.0.1:9001');
    expect(plan.engines[0]?.env['NCCL_DEBUG']).toBe('INFO');
    expect(plan.engines[1]?.command.slice(-4)).toEqual(['--max-model-len', '8192', '--seed', '1']);
    expect(wordAfter(plan.engines[0]?.command ?? [], '--model')).toBe('from-file');
    expect(plan.engines.map(({ env }) => env['VLLM_NIXL_SIDE_CHANNEL_PORT'])).toEqual(['5600', '5601', '5700']);
  });

  test.each([
    ['port: x', 't.yaml:1:1: port: expected a port from 1 to 65535, got "x"'],
    ['conector: nixl', 't.yaml:1:1: conector: unknown key; did you mean connector?'],
    [
      'instances:\n  - role: prefil',
      't.yaml:2:5: role: expected one of prefill, decode, got "prefil"; did you mean prefill?',
    ],
    ['instances:\n  - port: 7100', 't.yaml:2:5: role is missing; write role: prefill or role: decode'],
    ['instances:\n  - role: decode\n    prot: 1', 't.yaml:3:5: prot: unknown key; did you mean port?'],
    ['instances:\n  - 7100', 't.yaml:2:5: instances: expected keys with values, got 7100'],
    ['instances: 7', /^t\.yaml:1:1: instances: expected a list with one entry per engine/],
    ['instances:\n  - {role: decode}', 't.yaml:1:1: instances: needs at least one entry with role: prefill'],
    [
      'instances:\n  - {role: decode, gpus: [1, 2]}',
      't.yaml:2:20: gpus: give 1, as many as tensor_parallel_size, got 2',
    ],
    [
      'instances:\n  - {role: decode, tensor_parallel_size: 2, gpus: [3, 3]}',
      't.yaml:2:45: gpus: 3 is given twice; each rank needs a GPU of its own',
    ],
    [
      'instances:\n  - {role: prefill, gpus: [0]}\n  - {role: decode, tensor_parallel_size: 2, gpus: "1, 0"}',
      't.yaml:3:45: gpus: 0 is a GPU of prefiller1 already; give each engine its own',
    ],
    ['instances:\n  - {role: decode, args: [--port, 1]}', /^t\.yaml:2:20: args: --port is set by baton launch; use /],
    [
      'engine_args: [--max-model-len 8192]',
      't.yaml:1:1: engine_args: "--max-model-len 8192" is two words; write --max-model-len=8192',
    ],
    ['baton_args: [""]', 't.yaml:1:1: baton_args: expected an argument, got an empty text'],
    ['instances:\n  - {role: decode, name: a/b}', /^t\.yaml:2:20: name: expected letters/],
    ['instances:\n  - {role: prefill, name: a}\n  - {role: decode, name: a}', /^t\.yaml:3:20: name: "a" is used twice/],
    ['instances: [', /^t\.yaml:1:\d+: /],
  ])('%j is refused with its line', (file, message) => {
    expect(mistakes({}, file)).toContainEqual(typeof message === 'string' ? message : expect.stringMatching(message));
  });

  test('several mistakes are told at once, from top to bottom', () => {
    const found = mistakes({}, 'instances:\n  - {role: decode, port: 0}\n  - {role: prefil}\nport: y\n');
    expect(found.map((line) => line.split(' ')[0])).toEqual(['t.yaml:2:20:', 't.yaml:3:6:', 't.yaml:4:1:']);
  });

  test('it lists the engines, so flags cannot', () => {
    const file = 'instances:\n  - {role: prefill}\n  - {role: decode}\n';
    expect(mistakes({ prefill: '3' }, file)).toEqual([
      '--prefill: cannot be combined with --topology, which lists the engines',
    ]);
  });
});

describe('mistakes in flags', () => {
  test.each([
    [{ connector: 'mooncake' }, '--connector: expected one of nixl, lmcache, got "mooncake"'],
    [
      { sim: 'true', 'tensor-parallel-size': '2' },
      '--tensor-parallel-size: simulated engines (--sim) with nixl have one rank, and prefiller1 would have 2; give it one, or use --connector lmcache',
    ],
    [
      { 'engine-arg': '--tensor_parallel_size=2' },
      '--engine-arg: --tensor_parallel_size is set by baton launch; use --tensor-parallel-size of baton launch, or tensor_parallel_size in the topology file',
    ],
    [{ 'engine-arg': '-tp 2' }, '--engine-arg: "-tp 2" is two words; write -tp=2'],
    [
      { 'baton-arg': '--rpc-port=7000' },
      '--baton-arg: --rpc-port is set by baton launch; use --rpc-port of baton launch',
    ],
    [{ decode: '0' }, '--decode: expected a whole number from 1 to 1000, got "0"'],
    [
      { prefill: '2', 'prefill-port': '7100,7105,7110' },
      '--prefill and --prefill-port: give one port, from which the others count up, or 2 of them, got 3',
    ],
    [
      { prefill: '101' },
      "--decode-port: port 7200 is decoder1's HTTP port and prefiller101's HTTP port; move one of them (--prefill-port)",
    ],
    [
      { connector: 'lmcache', decode: '3', 'tensor-parallel-size': '64' },
      "--decoder-init-port: port 7400 is decoder2's LMCache handshake port and decoder1's LMCache allocation port; move one of them (--decoder-alloc-port)",
    ],
    [{ 'decode-port': '65535' }, "--decode-port: decoder2's HTTP port would be 65536, beyond 65535; start lower"],
    [{ 'bench-prompts': '3' }, '--bench-prompts: is only for --bench'],
    [{ device: 'tpu' }, '--device: expected one of cuda, cpu, got "tpu"; did you mean cpu?'],
  ] as const)('%j', (flags, message) => {
    expect(mistakes({ ...flags })).toContain(message);
  });

  test('a list of ports is the number of engines', () => {
    const plan = planOf(settingsOf({ 'prefill-port': '7100,7105,7110' }));
    expect(plan.engines.filter(({ kind }) => kind === 'prefill')).toHaveLength(3);
  });

  test('engines that cannot work together', () => {
    const file = (p: number, d: number) =>
      `instances:\n  - {role: prefill, tensor_parallel_size: ${p}}\n  - {role: decode, port: 7200, tensor_parallel_size: ${d}}\n`;
    expect(mistakes({}, file(2, 4))).toEqual([]);
    expect(mistakes({}, file(2, 3))).toEqual([
      expect.stringMatching(/tensor_parallel_size 2 of prefiller1 must divide/),
    ]);
    expect(mistakes({ connector: 'lmcache' }, file(2, 4))).toEqual([
      expect.stringMatching(/^t\.yaml:3:32: with lmcache every engine needs the same tensor_parallel_size/),
    ]);
    const gap = 'instances:\n  - {role: prefill}\n  - {role: decode}\n  - {role: decode, init_port: 7305}\n';
    expect(mistakes({}, gap)).toEqual([]);
    expect(mistakes({ connector: 'lmcache' }, gap)).toEqual([
      expect.stringMatching(/^t\.yaml:4:20: .* init_port of decoder2 is 7301, got 7305$/),
    ]);
  });
});

test("--bench sends what the benchmark of LMCache's example does", () => {
  const { bench } = settingsOf({ bench: 'true' });
  expect(bench && benchOf('http://127.0.0.1:9100', bench, 7)).toMatchObject({
    baseUrl: 'http://127.0.0.1:9100',
    endpoint: '/v1/completions',
    dataset: { name: 'random', inputTokens: 7500, outputTokens: 200 },
    prompts: 30,
    rate: 1,
    burstiness: 100,
    ignoreEos: true,
    seed: 7,
  });
});
