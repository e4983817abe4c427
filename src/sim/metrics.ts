import type { Engine } from './engine.ts';
import type { SimConfig } from './options.ts';

type Labels = Readonly<Record<string, string>>;

/** Prometheus text of a server's engines, one a data parallel rank, with vLLM's metric names and labels. */
export function renderMetrics(engines: readonly Engine[], config: SimConfig, startedAtSeconds: number): string {
  const model = config.models[0]?.id ?? '';
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
  type Read = (engine: Engine) => number;
  /** One sample a rank for each of these label values. */
  const spread = (rows: Readonly<Record<string, Read>>, label?: string): (readonly [Labels, number])[] =>
    engines.flatMap((engine, rank) =>
      Object.entries(rows).map(([value, read]): readonly [Labels, number] => [
        { engine: String(rank), model_name: model, ...(label === undefined ? {} : { [label]: value }) },
        read(engine),
      ]),
    );
  const counter = (name: string, help: string, value: Read): void => family(name, 'counter', help, spread({ value }));
  const gauge = (name: string, help: string, value: Read): void => family(name, 'gauge', help, spread({ value }));
  const loading: Read = (engine) => engine.countPhase('loading') + engine.countPhase('hung');
  const waiting: Read = (engine) => engine.countPhase('waiting');
  for (const { pins } of engines) pins.list();

  family('process_start_time_seconds', 'gauge', 'Start time of the process since unix epoch in seconds.', [
    [{}, startedAtSeconds],
  ]);
  gauge('vllm:num_requests_running', 'Number of requests in model execution batches.', (e) => e.countPhase('running'));
  gauge('vllm:num_requests_waiting', 'Number of requests waiting to be processed.', (e) => waiting(e) + loading(e));
  family(
    'vllm:num_requests_waiting_by_reason',
    'gauge',
    'Number of waiting requests by reason.',
    spread({ capacity: waiting, deferred: loading }, 'reason'),
  );
  gauge('vllm:kv_cache_usage_perc', 'KV-cache usage. 1 means 100 percent usage.', (engine) => engine.pool.usage);
  family(
    'vllm:cache_config_info',
    'gauge',
    'Information of the LLMEngine CacheConfig',
    engines.map((_, rank) => [
      {
        block_size: String(config.blockSize),
        cache_dtype: 'auto',
        enable_prefix_caching: config.prefixCaching ? 'True' : 'False',
        engine: String(rank),
        num_gpu_blocks: String(config.numBlocks),
      },
      1,
    ]),
  );
  for (const [name, help, key] of COUNTERS) counter(name, help, ({ stats }) => stats[key]);
  family(
    'vllm:prompt_tokens_by_source',
    'counter',
    'Number of prompt tokens by source.',
    spread(
      {
        local_compute: ({ stats }) => stats.localCompute,
        local_cache_hit: ({ stats }) => stats.localCacheHit,
        external_kv_transfer: ({ stats }) => stats.externalTransfer,
      },
      'source',
    ),
  );
  family(
    'vllm:request_success',
    'counter',
    'Count of successfully processed requests.',
    spread(
      Object.fromEntries(
        (['stop', 'length', 'abort', 'error'] as const).map((reason) => [
          reason,
          ({ stats }: Engine) => stats.finished[reason],
        ]),
      ),
      'finished_reason',
    ),
  );
  counter('vllm:nixl_num_failed_notifications', 'Number of failed NIXL notifications.', () => 0);
  counter(
    'vllm:nixl_num_kv_expired_reqs',
    'Number of requests whose KV expired.',
    ({ pins, stats }) => pins.expired + stats.refusedReads,
  );
  return `${lines.join('\n')}\n`;
}

const COUNTERS = [
  ['vllm:prefix_cache_queries', 'Prefix cache queries, in tokens.', 'prefixQueries'],
  ['vllm:prefix_cache_hits', 'Prefix cache hits, in tokens.', 'prefixHits'],
  ['vllm:external_prefix_cache_queries', 'External prefix cache queries, in tokens.', 'externalQueries'],
  ['vllm:external_prefix_cache_hits', 'External prefix cache hits, in tokens.', 'externalHits'],
  ['vllm:prompt_tokens', 'Number of prefill tokens processed.', 'promptTokens'],
  ['vllm:generation_tokens', 'Number of generation tokens processed.', 'generationTokens'],
  ['vllm:num_preemptions', 'Cumulative number of preemption from the engine.', 'preemptions'],
  ['vllm:nixl_num_failed_transfers', 'Number of failed NIXL transfers.', 'loadFailures'],
  [
    'vllm:nixl_num_notifications_after_expiry',
    'Number of notifications that came after the KV expired.',
    'notificationsAfterExpiry',
  ],
] as const;
