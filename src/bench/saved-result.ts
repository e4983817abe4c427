import { parseFile, readFile } from './dataset.ts';
import { type Mean, meanOf } from './intervals.ts';
import { memberOf, numberOf } from './json.ts';
import { sum } from './stats.ts';

/** What is compared of a request. */
export const COMPARED = ['TTFT', 'TPOT', 'E2EL'] as const;
export type Compared = (typeof COMPARED)[number];

/** The times of one metric, milliseconds: each of them where the file has them. */
export interface Series {
  readonly mean: Mean;
  readonly values: readonly number[] | undefined;
}

/** A result that was saved. */
export interface SavedResult {
  readonly file: string;
  readonly series: Readonly<Partial<Record<Compared, Series>>>;
  /** One figure of the whole run each. */
  readonly rates: ReadonlyMap<string, number>;
}

const RATES: readonly (readonly [key: string, label: string])[] = [
  ['completed', 'Successful requests'],
  ['failed', 'Failed requests'],
  ['request_throughput', 'Request throughput (req/s)'],
  ['output_throughput', 'Output token throughput (tok/s)'],
  ['total_token_throughput', 'Total token throughput (tok/s)'],
];

/** Reads what `bench serve` or `bench multi-turn`, or vLLM's clients, saved; throws a sentence. */
export function readResult(file: string): SavedResult {
  const data = parseFile(file, readFile(file));
  const result = Array.isArray(data) ? turnsResult(file, data) : serveResult(file, data);
  if (Object.keys(result.series).length === 0) {
    throw new Error(
      `${file}: expected the JSON of --save-result or of --stats-json-output, with a request that succeeded`,
    );
  }
  return result;
}

function turnsResult(file: string, turns: readonly unknown[]): SavedResult {
  const values = (key: string) => turns.flatMap((turn) => numberOf(turn, key) ?? []);
  const tpots = turns.flatMap((turn) =>
    (numberOf(turn, 'output_num_tokens') ?? 0) > 1 ? (numberOf(turn, 'tpot_ms') ?? []) : [],
  );
  const saved = values('saved_tokens');
  return {
    file,
    series: seriesOf(values('ttft_ms'), tpots, values('latency_ms')),
    rates: new Map([
      ['Successful requests', turns.length],
      ...(saved.length === 0 ? [] : [['Prompt tokens saved by handles', sum(saved)] as const]),
    ]),
  };
}

function serveResult(file: string, data: unknown): SavedResult {
  const rates = new Map(
    RATES.flatMap(([key, label]) => {
      const value = numberOf(data, key);
      return value === undefined ? [] : [[label, value] as const];
    }),
  );
  const errors = memberOf(data, 'errors');
  const isGood = (_: unknown, at: number) => !Array.isArray(errors) || (errors[at] ?? '') === '';
  const ttfts = numbersOf(memberOf(data, 'ttfts'));
  const itls = memberOf(data, 'itls');
  const lengths = numbersOf(memberOf(data, 'output_lens'));
  if (ttfts === undefined || !Array.isArray(itls) || lengths === undefined)
    return { file, series: summaries(data), rates };
  const totals = ttfts.map((ttft, at) => ttft + sum(numbersOf(itls[at]) ?? []));
  const tpots = totals.map((total, at) => (total - (ttfts[at] ?? 0)) / ((lengths[at] ?? 0) - 1));
  const ms = (seconds: readonly number[]) => seconds.map((second) => second * 1000);
  return {
    file,
    series: seriesOf(
      ms(ttfts.filter(isGood)),
      ms(tpots.filter((_, at) => isGood(_, at) && (lengths[at] ?? 0) > 1)),
      ms(totals.filter(isGood)),
    ),
    rates,
  };
}

function seriesOf(...all: readonly [readonly number[], readonly number[], readonly number[]]): SavedResult['series'] {
  return Object.fromEntries(
    COMPARED.flatMap((name, at) => {
      const values = all[at] ?? [];
      return values.length === 0 ? [] : [[name, { mean: meanOf(values), values }]];
    }),
  );
}

/** Of a result without details: the deviation there is that of the values themselves. */
function summaries(data: unknown): SavedResult['series'] {
  const count = numberOf(data, 'completed') ?? 0;
  return Object.fromEntries(
    COMPARED.flatMap((name) => {
      const mean = numberOf(data, `mean_${name.toLowerCase()}_ms`);
      const std = numberOf(data, `std_${name.toLowerCase()}_ms`);
      if (mean === undefined || std === undefined || count === 0) return [];
      const estimate = count < 2 ? 0 : std * Math.sqrt(count / (count - 1));
      return [[name, { mean: { mean, std: estimate, count }, values: undefined }]];
    }),
  );
}

function numbersOf(value: unknown): readonly number[] | undefined {
  if (!Array.isArray(value)) return undefined;
  return value.map((each: unknown) => (typeof each === 'number' ? each : 0));
}
