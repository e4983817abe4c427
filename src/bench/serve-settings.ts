import type { Problem } from '../config/problem.ts';
import {
  bad,
  choiceParser,
  countParser,
  MAX_COUNT,
  numberParser,
  ok,
  parsePort,
  parseText,
  type ValueParser,
} from '../config/values.ts';
import type { Dataset } from './dataset.ts';
import { FlagReader, orInfinite, parseBaseUrl, parseHeaders } from './flag-reader.ts';
import type { BenchFlagValues } from './flags.ts';

/** What a report tells the distribution of. */
export const METRICS = ['ttft', 'tpot', 'itl', 'e2el'] as const;
export type Metric = (typeof METRICS)[number];

/** Everything that `baton bench serve` was told, defaults filled in. */
export interface ServeSettings {
  /** Without a slash at its end. */
  readonly baseUrl: string;
  /** Path of the completions or chat completions. */
  readonly endpoint: string;
  readonly model: string | undefined;
  readonly headers: Readonly<Record<string, string>>;
  readonly dataset: Dataset;
  readonly prompts: number;
  readonly ignoreEos: boolean;
  readonly temperature: number;
  readonly seed: number;
  /** Requests a second, or infinity. */
  readonly rate: number;
  readonly burstiness: number;
  readonly maxConcurrency: number | undefined;
  readonly warmups: number;
  readonly timeoutMs: number;
  readonly metrics: readonly Metric[];
  /** Percentiles from 0 to 100. */
  readonly percentiles: readonly number[];
}

/** Where the result is written to. */
export interface SaveSettings {
  readonly dir: string;
  readonly file: string | undefined;
  readonly detailed: boolean;
  readonly label: string;
}

/** The settings, or every mistake that was found. */
export type ServeSettingsResult =
  | { readonly kind: 'ok'; readonly settings: ServeSettings; readonly save: SaveSettings | undefined }
  | { readonly kind: 'error'; readonly problems: readonly Problem[] };

const MAX_TOKENS = 10_000_000;
const tokens = countParser(1, MAX_TOKENS);
const DATASETS = ['random', 'sharegpt', 'custom'] as const;
const LONGEST_S = 2_000_000;

/** Reads flags over the defaults, which are those of `vllm bench serve`; `apiKey` is the key of the variables. */
export function readServeSettings(values: BenchFlagValues, apiKey: string | undefined): ServeSettingsResult {
  const flags = new FlagReader(values);
  const host = flags.read('host', parseText, '127.0.0.1');
  const port = flags.read('port', parsePort, 8000);
  const dataset = readDataset(flags);
  const settings: ServeSettings = {
    baseUrl: flags.read('base-url', parseBaseUrl, `http://${host.includes(':') ? `[${host}]` : host}:${port}`),
    endpoint: flags.read('endpoint', parseEndpoint, '/v1/completions'),
    model: flags.read('model', parseText, undefined),
    headers: {
      ...(apiKey === undefined ? {} : { authorization: `Bearer ${apiKey}` }),
      ...flags.read('header', parseHeaders, {}),
    },
    dataset,
    prompts: flags.read('num-prompts', countParser(1, 10_000_000), 1000),
    ignoreEos: dataset.name === 'random' || flags.isSet('ignore-eos'),
    temperature: flags.read('temperature', numberParser(0, 100), 0),
    seed: flags.read('seed', countParser(0, MAX_COUNT), 0),
    rate: flags.read('request-rate', orInfinite(numberParser(0.000_001, 1_000_000)), Number.POSITIVE_INFINITY),
    burstiness: flags.read('burstiness', orInfinite(numberParser(0.001, 1_000_000)), 1),
    maxConcurrency: flags.read('max-concurrency', countParser(1, 1_000_000), undefined),
    warmups: flags.read('num-warmups', countParser(0, 1_000_000), 0),
    timeoutMs: flags.read('request-timeout-sec', countParser(1, LONGEST_S), 21_600) * 1000,
    metrics: flags.read('percentile-metrics', parseMetrics, ['ttft', 'tpot', 'itl']),
    percentiles: flags.read('metric-percentiles', parsePercentiles, [99]),
  };
  const save: SaveSettings = {
    dir: flags.read('result-dir', parseText, '.'),
    file: flags.read('result-filename', parseText, undefined),
    detailed: flags.isSet('save-detailed'),
    label: flags.read('label', parseText, 'openai'),
  };
  if (!flags.isSet('save-result')) {
    for (const flag of ['result-dir', 'result-filename', 'save-detailed']) {
      if (flags.isSet(flag)) flags.complain(flag, 'is only for --save-result');
    }
  }
  const { problems } = flags;
  if (problems.length > 0) return { kind: 'error', problems };
  return { kind: 'ok', settings, save: flags.isSet('save-result') ? save : undefined };
}

function readDataset(flags: FlagReader): Dataset {
  const name = flags.read('dataset-name', choiceParser(DATASETS), 'random');
  const path = flags.read('dataset-path', parseText, undefined);
  const random: Dataset = {
    name: 'random',
    inputTokens: flags.read('random-input-len', tokens, 1024),
    outputTokens: flags.read('random-output-len', tokens, 128),
    rangeRatio: flags.read('random-range-ratio', numberParser(0, 0.999), 0),
    prefixTokens: flags.read('random-prefix-len', countParser(0, MAX_TOKENS), 0),
  };
  if (name === 'random') {
    if (path !== undefined) flags.complain('dataset-path', 'is for --dataset-name sharegpt or custom');
    return random;
  }
  if (path === undefined) {
    flags.complain('dataset-path', `--dataset-name ${name} needs a file`);
    return random;
  }
  return name === 'sharegpt'
    ? { name, path, outputTokens: flags.read('sharegpt-output-len', tokens, undefined) }
    : { name, path, outputTokens: flags.read('custom-output-len', tokens, 256) };
}

const parseEndpoint: ValueParser<string> = (raw) => {
  const text = String(raw);
  return /^\/(.*\/)?(chat\/)?completions$/.test(text)
    ? ok(text)
    : bad(`expected /v1/completions or /v1/chat/completions, got ${text}`);
};

const parseMetrics: ValueParser<readonly Metric[]> = (raw) => {
  const words = String(raw)
    .split(',')
    .map((word) => word.trim());
  const wrong = words.find((word) => !METRICS.some((metric) => metric === word));
  if (wrong !== undefined) return bad(`expected some of ${METRICS.join(', ')} with commas, got ${wrong}`);
  return ok(METRICS.filter((metric) => words.includes(metric)));
};

const parsePercentiles: ValueParser<readonly number[]> = (raw) => {
  const parse = numberParser(0, 100);
  const values: number[] = [];
  for (const word of String(raw).split(',')) {
    const parsed = parse(word);
    if (parsed.kind === 'bad') return parsed;
    values.push(parsed.value);
  }
  return ok(values);
};
