import type { Engine } from './engine.ts';
import type { SimConfig } from './options.ts';

type Labels = Readonly<Record<string, string>>;

/** Prometheus text of an engine, with vLLM's metric names and labels. */
export function renderMetrics(engine: Engine, config: SimConfig, startedAtSeconds: number): string {
  const base: Labels = { engine: '0', model_name: config.models[0]?.id ?? '' };
  const lines: string[] = [];
  const family = (name: string, type: string, help: string, samples: readonly (readonly [Labels, number])[]): void => {
    const full = type === 'counter' ? `${name}_total` : name;
    lines.push(`# HELP ${full} ${help}`, `# TYPE ${full} ${type}`);
    for (const [labels, value] of samples) {
      const text = Object.entries(labels)
        .map(([key, label]) => `${key}="${label.replaceAll('\\', '\\\\').replaceAll('"', '\\"')}"`)
        .join(',');
      const shown = Number.isInteger(value) ? `${value}.0` : String(value);
      lines.push(`${full}${text === '' ? '' : `{${text}}`} ${shown}`);
    }
  };
  const counter = (name: string, help: string, value: number): void => family(name, 'counter', help, [[base, value]]);
  const gauge = (name: string, help: string, value: number): void => family(name, 'gauge', help, [[base, value]]);
  const { stats } = engine;
  engine.pins.list();
  const loading = engine.countPhase('loading') + engine.countPhase('hung');
  const waiting = engine.countPhase('waiting');

  family('process_start_time_seconds', 'gauge', 'Start time of the process since unix epoch in seconds.', [
    [{}, startedAtSeconds],
  ]);
  gauge('vllm:num_requests_running', 'Number of requests in model execution batches.', engine.countPhase('running'));
  gauge('vllm:num_requests_waiting', 'Number of requests waiting to be processed.', waiting + loading);
  family('vllm:num_requests_waiting_by_reason', 'gauge', 'Number of waiting requests by reason.', [
    [{ ...base, reason: 'capacity' }, waiting],
    [{ ...base, reason: 'deferred' }, loading],
  ]);
  gauge('vllm:kv_cache_usage_perc', 'KV-cache usage. 1 means 100 percent usage.', engine.pool.usage);
  family('vllm:cache_config_info', 'gauge', 'Information of the LLMEngine CacheConfig', [
    [
      {
        block_size: String(config.blockSize),
        cache_dtype: 'auto',
        enable_prefix_caching: 'True',
        engine: '0',
        num_gpu_blocks: String(config.numBlocks),
      },
      1,
    ],
  ]);
  counter('vllm:prefix_cache_queries', 'Prefix cache queries, in tokens.', stats.prefixQueries);
  counter('vllm:prefix_cache_hits', 'Prefix cache hits, in tokens.', stats.prefixHits);
  counter('vllm:external_prefix_cache_queries', 'External prefix cache queries, in tokens.', stats.externalQueries);
  counter('vllm:external_prefix_cache_hits', 'External prefix cache hits, in tokens.', stats.externalHits);
  counter('vllm:prompt_tokens', 'Number of prefill tokens processed.', stats.promptTokens);
  family('vllm:prompt_tokens_by_source', 'counter', 'Number of prompt tokens by source.', [
    [{ ...base, source: 'local_compute' }, stats.localCompute],
    [{ ...base, source: 'local_cache_hit' }, stats.localCacheHit],
    [{ ...base, source: 'external_kv_transfer' }, stats.externalTransfer],
  ]);
  counter('vllm:generation_tokens', 'Number of generation tokens processed.', stats.generationTokens);
  family(
    'vllm:request_success',
    'counter',
    'Count of successfully processed requests.',
    (['stop', 'length', 'abort', 'error'] as const).map((reason) => [
      { ...base, finished_reason: reason },
      stats.finished[reason],
    ]),
  );
  counter('vllm:num_preemptions', 'Cumulative number of preemption from the engine.', stats.preemptions);
  counter('vllm:nixl_num_failed_transfers', 'Number of failed NIXL transfers.', stats.loadFailures);
  counter('vllm:nixl_num_failed_notifications', 'Number of failed NIXL notifications.', 0);
  counter(
    'vllm:nixl_num_kv_expired_reqs',
    'Number of requests whose KV expired.',
    engine.pins.expired + stats.refusedReads,
  );
  counter(
    'vllm:nixl_num_notifications_after_expiry',
    'Number of notifications that came after the KV expired.',
    stats.notificationsAfterExpiry,
  );
  return `${lines.join('\n')}\n`;
}
