import { execFile } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { expect, onTestFinished, test } from 'vitest';
import { startSim } from '../../src/sim/start-sim.ts';
import { benchRun } from '../support/bench-run.ts';
import { realInstallation } from '../support/real-engines.ts';
import { RealLog } from '../support/real-log.ts';
import { hasShared } from '../support/shared.ts';

/** `baton bench serve` beside vLLM's own `bench serve`, against the same simulated engine. */
const available = hasShared('engines/install.sh');

const PROMPTS = 20;
const OUTPUT = 20;

/** Labels of a report in their order. */
function rowsOf(report: string): readonly string[] {
  const lines = report.slice(report.indexOf('= Serving Benchmark Result =')).split('\n');
  return lines.map((line) => line.replace(/ +[\d.]+ *$/, '')).filter((line) => /^[A-Z].*:$|^-.*-$/.test(line));
}

test.runIf(available)('the same rows and counts as vllm bench serve, and means within 25 %', async () => {
  const log = new RealLog('baton bench serve beside vllm bench serve 0.33, one simulated engine');
  const { python, paths, model } = await realInstallation('0.33', 'bytes');
  const folder = mkdtempSync(join(tmpdir(), 'baton-bench-'));
  onTestFinished(() => rmSync(folder, { recursive: true }));
  // The second run must not find what the first has computed.
  const sim = await startSim({
    prefixCaching: false,
    role: 'both',
    connector: 'none',
    prefillMsPerToken: 0.1,
    decodeMsPerToken: 10,
    eosEvery: 0,
  });
  onTestFinished(() => sim.close());
  // A file that both read, and vLLM's client without packages that the engines do not need.
  const prompts = join(folder, 'sharegpt.json');
  const conversation = (_: unknown, i: number) => ({
    id: String(i),
    conversations: [
      { from: 'human', value: `${i}: ${'river stone garden '.repeat(20)}` },
      { from: 'gpt', value: 'an answer of some length' },
    ],
  });
  writeFileSync(prompts, JSON.stringify(Array.from({ length: PROMPTS }, conversation)));
  const words = [
    ...['--port', String(sim.port), '--model', 'sim-model', '--num-prompts', String(PROMPTS), '--max-concurrency', '4'],
    ...[
      '--dataset-name',
      'sharegpt',
      '--dataset-path',
      prompts,
      '--sharegpt-output-len',
      String(OUTPUT),
      '--ignore-eos',
    ],
    ...['--save-result', '--result-dir', folder],
  ];
  const own = [
    ...words,
    '--tokenizer',
    model,
    '--skip-chat-template',
    '--disable-shuffle',
    '--result-filename',
    'v.json',
  ];
  const env = { ...process.env, PYTHONPATH: paths.join(':'), HF_HUB_OFFLINE: '1', VLLM_NO_USAGE_STATS: '1' };
  const { stdout } = await promisify(execFile)(python, ['-m', 'vllm.entrypoints.cli.main', 'bench', 'serve', ...own], {
    env,
    maxBuffer: 2 ** 24,
  });
  const ran = await benchRun(['serve', ...words, '--result-filename', 'b.json']);
  expect(ran).toMatchObject({ code: 0 });
  expect(rowsOf(ran.out)).toHaveLength(23);
  expect(rowsOf(ran.out)).toEqual(rowsOf(stdout));
  const resultOf = (name: string): Record<string, number> => JSON.parse(readFileSync(join(folder, name), 'utf8'));
  const [theirs, ours] = [resultOf('v.json'), resultOf('b.json')];
  for (const key of ['completed', 'failed', 'total_output_tokens', 'total_input_tokens']) {
    expect([key, ours[key]]).toEqual([key, theirs[key]]);
  }
  for (const key of ['mean_ttft_ms', 'mean_tpot_ms', 'mean_itl_ms', 'request_throughput']) {
    const ratio = (ours[key] ?? 0) / (theirs[key] ?? 0);
    log.push(`${key}: vLLM ${theirs[key]?.toFixed(2)}, baton ${ours[key]?.toFixed(2)}`);
    expect(ratio, key).toBeGreaterThan(0.75);
    expect(ratio, key).toBeLessThan(1.25);
  }
  log.write();
});
