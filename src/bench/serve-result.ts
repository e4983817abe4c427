import type { ServeFigures } from './figures.ts';
import type { Sample } from './send.ts';
import type { SaveSettings, ServeSettings } from './serve-settings.ts';

/** What a result is made from. */
export interface ResultInput {
  readonly settings: ServeSettings;
  readonly save: Pick<SaveSettings, 'detailed' | 'label'>;
  readonly model: string;
  readonly figures: ServeFigures;
  readonly samples: readonly Sample[];
  readonly date: Date;
}

/** The JSON result of `vllm bench serve`, with its keys; `detailed` adds those of each request, times in seconds. */
export function serveResult({ settings, save, model, figures, samples, date }: ResultInput): object {
  const { rate, burstiness } = settings;
  return {
    date: stamp(date),
    endpoint_type: settings.endpoint.includes('chat') ? 'openai-chat' : 'openai',
    backend: settings.endpoint.includes('chat') ? 'openai-chat' : 'openai',
    label: save.label,
    model_id: model,
    num_prompts: settings.prompts,
    request_rate: Number.isFinite(rate) ? rate : 'inf',
    burstiness: Number.isFinite(burstiness) ? burstiness : 'inf',
    max_concurrency: settings.maxConcurrency ?? null,
    duration: figures.durationS,
    completed: figures.completed,
    failed: figures.failed,
    total_input_tokens: figures.inputTokens,
    total_output_tokens: figures.outputTokens,
    request_throughput: figures.requestThroughput,
    request_goodput: null,
    output_throughput: figures.outputThroughput,
    total_token_throughput: figures.totalThroughput,
    max_output_tokens_per_s: figures.peakOutputThroughput,
    max_concurrent_requests: figures.peakConcurrency,
    ...(save.detailed ? detailsOf(samples) : {}),
    ...Object.fromEntries(settings.metrics.flatMap((metric) => metricKeys(figures, metric))),
  };
}

function detailsOf(samples: readonly Sample[]) {
  const begin = Math.min(...samples.map(({ startMs }) => startMs));
  return {
    input_lens: samples.map(({ inputTokens }) => inputTokens ?? 0),
    output_lens: samples.map(({ outputTokens, error }) => (error === undefined ? outputTokens : 0)),
    ttfts: samples.map(({ firstTokenMs }) => firstTokenMs / 1000),
    itls: samples.map(({ gapsMs }) => gapsMs.map((gap) => gap / 1000)),
    latencies: samples.map(({ totalMs }) => totalMs / 1000),
    start_times: samples.map(({ startMs }) => (startMs - begin) / 1000),
    generated_texts: samples.map(({ text }) => text),
    errors: samples.map(({ error }) => error ?? ''),
  };
}

function metricKeys(figures: ServeFigures, metric: ServeSettings['metrics'][number]): readonly [string, number][] {
  const { mean, median, std, percentiles } = figures.metrics[metric];
  return [
    [`mean_${metric}_ms`, mean],
    [`median_${metric}_ms`, median],
    [`std_${metric}_ms`, std],
    ...percentiles.map(([percent, value]): [string, number] => [`p${percent}_${metric}_ms`, value]),
  ];
}

/** The name of the file where none was given. */
export function resultName({ rate }: ServeSettings, { label }: SaveSettings, model: string, date: Date): string {
  const base = model.split('/').at(-1) ?? model;
  return `${label}-${Number.isFinite(rate) ? rate : 'inf'}qps-${base}-${stamp(date)}.json`;
}

/** Local time as 20261130-221500. */
function stamp(date: Date): string {
  const two = (value: number) => String(value).padStart(2, '0');
  const day = `${date.getFullYear()}${two(date.getMonth() + 1)}${two(date.getDate())}`;
  return `${day}-${two(date.getHours())}${two(date.getMinutes())}${two(date.getSeconds())}`;
}
