import type { ServeSettings } from '../bench/serve-settings.ts';
import type { BenchSettings } from './topology.ts';

const LONGEST_ANSWER_MS = 10 * 60 * 1000;

/** What `baton bench serve` is told to repeat the benchmark of LMCache's example, with other prompts in each run. */
export function benchOf(
  baseUrl: string,
  { prompts, inputTokens, outputTokens, rate }: BenchSettings,
  seed: number,
): ServeSettings {
  return {
    baseUrl,
    endpoint: '/v1/completions',
    model: undefined,
    headers: {},
    dataset: { name: 'random', inputTokens, outputTokens, rangeRatio: 0, prefixTokens: 0 },
    prompts,
    ignoreEos: true,
    temperature: 0,
    seed,
    rate: rate === 0 ? Number.POSITIVE_INFINITY : rate,
    burstiness: 100,
    maxConcurrency: undefined,
    warmups: 0,
    timeoutMs: LONGEST_ANSWER_MS,
    metrics: ['ttft', 'tpot', 'itl'],
    percentiles: [99],
  };
}
