/** What an engine's Prometheus text tells about itself; a member is absent where the text does not say it. */
export interface EngineMetrics {
  /** Tokens per KV block; absent too where data-parallel ranks disagree. */
  readonly blockSize?: number;
  /** KV blocks of the instance, summed over data-parallel ranks. */
  readonly numGpuBlocks?: number;
  /** Unix time in seconds at which the server process began. */
  readonly processStartSeconds?: number;
  /** Requests being computed, summed over models and ranks. */
  readonly running?: number;
  /** Requests waiting, those that wait for remote KV included. */
  readonly waiting?: number;
  /** The part of `waiting` that waits for a KV transfer and not for capacity. */
  readonly waitingDeferred?: number;
  /** Share of KV blocks in use, 0 to 1, of the fullest rank. */
  readonly kvCacheUsage?: number;
  /** Requests whose blocks the engine freed because nobody came for them in time, since it began. */
  readonly kvExpired?: number;
}

type SampleField = keyof EngineMetrics;

interface SampleRule {
  readonly field: SampleField;
  /** Metric names in order of preference; a later one counts only if no earlier one is in the text. */
  readonly names: readonly string[];
  /** The sample counts only if it carries this label value. */
  readonly where?: readonly [label: string, value: string];
  readonly combine: 'sum' | 'max';
}

/** Where one kind of engine publishes each value. */
export interface EngineMetricNames {
  /** Several rows of one field add up. */
  readonly samples: readonly SampleRule[];
  /** Metric whose labels carry the cache layout, and the labels' names. */
  readonly cacheInfo: { readonly name: string; readonly blockSize: string; readonly numGpuBlocks: string };
}

/** A queue of an SGLang engine whose requests wait for KV to be sent or received, not for room. */
const sglangTransfer = (queue: string): readonly SampleRule[] =>
  (['waiting', 'waitingDeferred'] as const).map((field) => ({
    field,
    names: [`sglang:num_${queue}_queue_reqs`],
    combine: 'sum',
  }));

/** Of a vLLM connector. */
const expiredOf = (connector: string): SampleRule => ({
  field: 'kvExpired',
  names: [`vllm:${connector}_num_kv_expired_reqs_total`],
  combine: 'sum',
});

/**
 * Engine kind to metric names; facts of the vllm row: vLLM 0.33 `v1/metrics/loggers.py`, the second names are V0's; of the
 * sglang row: SGLang's `metrics/collector.py`, whose decode engines prealloc (wait for room) before they transfer.
 */
export const ENGINE_METRIC_NAMES = {
  vllm: {
    samples: [
      { field: 'processStartSeconds', names: ['process_start_time_seconds'], combine: 'max' },
      { field: 'running', names: ['vllm:num_requests_running'], combine: 'sum' },
      { field: 'waiting', names: ['vllm:num_requests_waiting'], combine: 'sum' },
      {
        field: 'waitingDeferred',
        names: ['vllm:num_requests_waiting_by_reason'],
        where: ['reason', 'deferred'],
        combine: 'sum',
      },
      { field: 'kvCacheUsage', names: ['vllm:kv_cache_usage_perc', 'vllm:gpu_cache_usage_perc'], combine: 'max' },
      ...['nixl', 'mooncake'].map(expiredOf),
    ],
    cacheInfo: { name: 'vllm:cache_config_info', blockSize: 'block_size', numGpuBlocks: 'num_gpu_blocks' },
  },
  sglang: {
    samples: [
      { field: 'processStartSeconds', names: ['process_start_time_seconds'], combine: 'max' },
      { field: 'running', names: ['sglang:num_running_reqs'], combine: 'sum' },
      { field: 'waiting', names: ['sglang:num_queue_reqs'], combine: 'sum' },
      { field: 'waiting', names: ['sglang:num_decode_prealloc_queue_reqs'], combine: 'sum' },
      ...['decode_transfer', 'prefill_inflight', 'prefill_bootstrap', 'prefill_prealloc'].flatMap(sglangTransfer),
      { field: 'kvCacheUsage', names: ['sglang:token_usage'], combine: 'max' },
      { field: 'blockSize', names: ['sglang:page_size'], combine: 'max' },
      { field: 'numGpuBlocks', names: ['sglang:num_pages'], combine: 'sum' },
    ],
    cacheInfo: { name: 'sglang:cache_config_info', blockSize: 'page_size', numGpuBlocks: 'num_pages' },
  },
} as const satisfies Readonly<Record<string, EngineMetricNames>>;

/** Kind of an engine whose metric names are known. */
export type EngineKind = keyof typeof ENGINE_METRIC_NAMES;

/**
 * Reads the values of {@link EngineMetrics} out of Prometheus text; text that is something else gives `{}`, never an error.
 */
export function parseEngineMetrics(text: string, kind: EngineKind = 'vllm'): EngineMetrics {
  const table: EngineMetricNames = ENGINE_METRIC_NAMES[kind];
  const wanted = Map.groupBy(
    table.samples.flatMap((rule) => rule.names.map((name, rank) => ({ name, rule, rank }))),
    ({ name }) => name,
  );

  const found = new Map<SampleField, { rank: number; value: number }>();
  const blockSizes = new Set<number>();
  let numGpuBlocks: number | undefined;

  for (const line of linesOf(text)) {
    const name = nameOf(line);
    if (name === table.cacheInfo.name) {
      const labels = labelsOf(line, name.length);
      const blockSize = positiveInteger(labels?.get(table.cacheInfo.blockSize));
      if (blockSize !== undefined) blockSizes.add(blockSize);
      const blocks = positiveInteger(labels?.get(table.cacheInfo.numGpuBlocks));
      if (blocks !== undefined) numGpuBlocks = (numGpuBlocks ?? 0) + blocks;
      continue;
    }
    for (const { rule, rank } of wanted.get(name) ?? []) {
      if (rule.where !== undefined && labelsOf(line, name.length)?.get(rule.where[0]) !== rule.where[1]) continue;
      const value = sampleValue(line);
      if (value === undefined) continue;
      const before = found.get(rule.field);
      if (before !== undefined && before.rank < rank) continue;
      const base = before?.rank === rank ? before.value : undefined;
      found.set(rule.field, { rank, value: base === undefined ? value : combine(rule.combine, base, value) });
    }
  }

  const [blockSize] = blockSizes;
  return {
    ...Object.fromEntries([...found].map(([field, { value }]) => [field, value])),
    ...(blockSizes.size === 1 && blockSize !== undefined ? { blockSize } : {}),
    ...(numGpuBlocks === undefined ? {} : { numGpuBlocks }),
  };
}

/** Kind of engine by the prefix of its metric names; undefined where no known prefix begins a line. */
export function detectEngineKind(text: string): EngineKind | undefined {
  for (const line of linesOf(text)) {
    if (line.startsWith('vllm:')) return 'vllm';
    if (line.startsWith('sglang:')) return 'sglang';
  }
  return undefined;
}

function combine(how: SampleRule['combine'], a: number, b: number): number {
  return how === 'sum' ? a + b : Math.max(a, b);
}

function* linesOf(text: string): Generator<string> {
  for (let start = 0; start < text.length; ) {
    const newline = text.indexOf('\n', start);
    const end = newline === -1 ? text.length : newline;
    // Comments and blank lines are most of the text; they never become strings.
    const first = text.charCodeAt(start);
    if (end > start && first !== 0x23 /* # */) yield text.slice(start, end);
    start = end + 1;
  }
}

function nameOf(line: string): string {
  const end = line.search(/[{\s]/);
  return end === -1 ? line : line.slice(0, end);
}

const LABEL = /\s*([A-Za-z_][A-Za-z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(,|\})/y;

function labelsOf(line: string, from: number): ReadonlyMap<string, string> | undefined {
  const labels = new Map<string, string>();
  if (line[from] !== '{') return labels;
  LABEL.lastIndex = from + 1;
  for (;;) {
    const match = LABEL.exec(line);
    const [, name, value, end] = match ?? [];
    // A trailing comma before the brace is legal in the text format.
    if (name === undefined || value === undefined) return undefined;
    labels.set(
      name,
      value.replace(/\\(.)/g, (_, c: string) => (c === 'n' ? '\n' : c)),
    );
    if (end === '}' || /^\s*\}/.test(line.slice(LABEL.lastIndex))) return labels;
  }
}

const TAIL = /(?:\}|^[^\s{]+)\s*([^\s{}]+)(?:\s+-?\d+)?\s*$/;

function sampleValue(line: string): number | undefined {
  const text = TAIL.exec(line)?.[1];
  const value = text === undefined ? Number.NaN : Number(text);
  return Number.isFinite(value) && value >= 0 ? value : undefined;
}

function positiveInteger(text: string | undefined): number | undefined {
  if (text === undefined || !/^[1-9]\d{0,9}$/.test(text)) return undefined;
  const value = Number(text);
  return value <= 0xffff_ffff ? value : undefined;
}
