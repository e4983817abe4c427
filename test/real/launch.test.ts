import { existsSync } from 'node:fs';
import { resolve } from 'node:path';
import { expect, test } from 'vitest';
import { groupLives, startLaunch } from '../support/launch-process.ts';
import { realInstallation } from '../support/real-engines.ts';
import { RealLog } from '../support/real-log.ts';
import { hasShared } from '../support/shared.ts';

/** `baton launch` with real vLLM on the CPU over NIXL, one of each. */
const available = hasShared('engines/install.sh');

/** What makes vLLM small enough for a test machine. */
const ENGINE_ARGS = [
  '--served-model-name=tiny',
  '--dtype=float32',
  '--max-model-len=8192',
  '--enforce-eager',
  '--kv-cache-memory-bytes=134217728',
  '--max-num-seqs=16',
  '--enable-prompt-tokens-details',
];

test.runIf(available)('1P1D over NIXL: serves, hands KV over, benchmarks, leaves nothing behind', async () => {
  const log = new RealLog('baton launch, vLLM 0.33 (CPU), NixlConnector, 1P1D');
  const { python, paths, model } = await realInstallation('0.33', 'bytes');
  const start = performance.now();
  await using launch = await startLaunch(
    [
      ...['--prefill', '1', '--decode', '1', '--device', 'cpu', '--python', python, '--model', model],
      ...['--ready-timeout', '8m'],
      ...ENGINE_ARGS.map((arg) => `--engine-arg=${arg}`),
    ],
    {
      ...(paths.length === 0 ? {} : { PYTHONPATH: paths.join(':') }),
      OMP_NUM_THREADS: '1',
      HF_HUB_OFFLINE: '1',
      VLLM_NO_USAGE_STATS: '1',
      TORCH_COMPILE_DISABLE: '1',
    },
  );
  await launch.seen(/up: /);
  log.push(`up after ${((performance.now() - start) / 1000).toFixed(0)} s`);
  expect(existsSync(resolve(launch.folder, 'decoder1.log'))).toBe(true);
  const groups = launch.groups();

  const reply = await fetch(`${launch.url}/v1/chat/completions`, {
    method: 'POST',
    headers: { 'content-type': 'application/json', 'x-baton-debug': '1' },
    body: JSON.stringify({
      model: 'tiny',
      max_tokens: 8,
      temperature: 0,
      messages: [{ role: 'user', content: 'river stone garden '.repeat(40) }],
    }),
  });
  expect(reply.status).toBe(200);
  expect(reply.headers.get('x-baton-plan')).toContain('prefill_decode');
  const decode = /decoder1 started: (\S+),/.exec(launch.text())?.[1] ?? '';
  const metrics = await (await fetch(`http://${decode}/metrics`)).text();
  const received = /^vllm:prompt_tokens_by_source_total\{.*external_kv_transfer.*\} (\S+)$/m.exec(metrics)?.[1];
  expect(Number(received)).toBeGreaterThan(100);
  log.push(`the decode engine received ${Number(received)} prompt tokens`);

  launch.kill('SIGINT');
  expect(await launch.ended).toBe(0);
  for (const [name, group] of groups) expect(groupLives(group), name).toBe(false);
  log.push(`no process of ${[...groups.keys()].join(', ')} is left after SIGINT`);
  log.write();
});
