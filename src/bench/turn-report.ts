import { msPerToken } from './figures.ts';
import { numberOf } from './json.ts';
import type { MultiTurnOutcome, TurnRecord } from './multi-turn.ts';
import type { MultiTurnSettings } from './multi-turn-settings.ts';
import { ascending, percentile, sum } from './stats.ts';

const SEPARATOR = '-'.repeat(100);

/** The figures of one turn, with the keys of vLLM's client and what baton told. */
export function turnFigures({ sample, ...record }: TurnRecord) {
  const input = sample.inputTokens ?? 0;
  const plan = planOf(sample.plan);
  return {
    ttft_ms: sample.firstTokenMs,
    tpot_ms: msPerToken(sample)[0] ?? 0,
    latency_ms: sample.totalMs,
    start_time_ms: sample.startMs,
    input_num_turns: record.messages,
    input_num_tokens: input,
    output_num_tokens: sample.outputTokens,
    output_num_chunks: sample.gapsMs.length,
    output_num_first_chunk_tokens: 1,
    approx_cached_percent: input === 0 ? 0 : Math.min(100, (100 * record.historyTokens) / input),
    conversation_id: record.conversation,
    client_id: record.client,
    turn: record.turn,
    outcome: plan.outcome,
    saved_tokens: plan.saved,
    cached_tokens: sample.cachedTokens ?? null,
  };
}

type TurnFigures = ReturnType<typeof turnFigures>;

const USED = ['hit', 'hit_cut'];

/** What `x-baton-plan` says of reuse: the outcome, and the tokens that a handle gave. */
function planOf(plan: string | undefined): { readonly outcome: string | null; readonly saved: number } {
  const parts = new Map(
    (plan ?? '').split('; ').map((part): [string, string] => [part.split('=')[0] ?? '', part.split('=')[1] ?? '']),
  );
  const outcome = parts.get('outcome') ?? null;
  return { outcome, saved: outcome !== null && USED.includes(outcome) ? Number(parts.get('matched') ?? 0) : 0 };
}

const ROWS = [
  'ttft_ms',
  'tpot_ms',
  'latency_ms',
  'input_num_turns',
  'input_num_tokens',
  'output_num_tokens',
  'output_num_chunks',
] as const;

/** The report of vLLM's multi-turn client, and behind it what it does not have: times by turn, outcomes, tokens saved. */
export function turnReport(settings: MultiTurnSettings, outcome: MultiTurnOutcome): string {
  const all = outcome.turns.map(turnFigures);
  const lines = [
    SEPARATOR,
    'Parameters:',
    `model=${outcome.model}`,
    `num_clients=${settings.clients}`,
    `num_conversations=${outcome.conversations}`,
    `active_conversations=${settings.activeConversations}`,
    `seed=${settings.seed}`,
    SEPARATOR,
    ...settings.warmups.flatMap((share) => summary(all, share, settings.warmups.length > 1, outcome.warmupMs)),
    'TTFT by turn (ms), and tokens of a request:',
    ...byTurn(all),
    SEPARATOR,
    ...reuse(all),
  ];
  return `${lines.join('\n')}\n`;
}

function summary(
  all: readonly TurnFigures[],
  share: number,
  isOneOfMany: boolean,
  warmupMs: number | undefined,
): readonly string[] {
  const rows = all.slice(Math.floor(share * all.length));
  const [first] = rows;
  if (first === undefined) return [];
  const endMs = rows.at(-1)?.start_time_ms ?? 0;
  const seconds = (endMs + (rows.at(-1)?.latency_ms ?? 0) - first.start_time_ms) / 1000;
  const assumed = share > 0 || isOneOfMany ? ` (assuming ${Math.round(share * 100)}% warmup samples)` : '';
  const head = percentsOf(rows.length);
  const table = describe(
    ['', 'count', 'mean', 'std', 'min', ...head.map((percent) => `${percent}%`), 'max'],
    ROWS.map((row) => [
      row,
      figuresOf(
        rows.map((figures) => figures[row]),
        head,
      ),
    ]),
  );
  return [
    `Statistics summary${assumed}:`,
    `runtime_sec = ${seconds.toFixed(3)}`,
    `requests_per_sec = ${(rows.length / seconds).toFixed(3)}`,
    ...(warmupMs === undefined
      ? []
      : [
          `warmup_runtime_sec = ${(warmupMs / 1000).toFixed(3)}`,
          `total_runtime_incl_warmup_sec = ${(seconds + warmupMs / 1000).toFixed(3)}`,
        ]),
    SEPARATOR,
    ...table,
    SEPARATOR,
  ];
}

function percentsOf(count: number): readonly number[] {
  const rare: readonly (readonly [number, number])[] = [
    [100, 99],
    [1000, 99.9],
    [10_000, 99.99],
  ];
  return [25, 50, 75, 90, ...rare.filter(([least]) => count >= least).map(([, percent]) => percent)];
}

/** Count, mean, standard deviation of the sample, least, percentiles, most. */
function figuresOf(values: readonly number[], percents: readonly number[]): readonly number[] {
  const sorted = ascending(values);
  const mean = sum(values) / values.length;
  const std = Math.sqrt(sum(values.map((value) => (value - mean) ** 2)) / (values.length - 1));
  const of = (percent: number) => percentile(sorted, percent);
  return [values.length, mean, std, of(0), ...percents.map(of), of(100)];
}

function byTurn(all: readonly TurnFigures[]): readonly string[] {
  const turns = [...Map.groupBy(all, ({ turn }) => turn)].toSorted(([a], [b]) => a - b);
  return describe(
    ['turn', 'count', 'mean', '50%', '90%', 'max', 'input_num_tokens', 'saved_tokens'],
    turns.map(([turn, figures]) => {
      const ttfts = figures.map(({ ttft_ms }) => ttft_ms);
      const [count = 0, mean = 0, , , median = 0, ninety = 0, max = 0] = figuresOf(ttfts, [50, 90]);
      const of = (key: 'input_num_tokens' | 'saved_tokens') => sum(figures.map((each) => each[key])) / count;
      return [String(turn), [count, mean, median, ninety, max, of('input_num_tokens'), of('saved_tokens')]];
    }),
  );
}

function reuse(all: readonly TurnFigures[]): readonly string[] {
  const told = all.flatMap(({ outcome }) => outcome ?? []);
  const input = sum(all.map(({ input_num_tokens }) => input_num_tokens));
  const share = (tokens: number) => `${tokens} of ${input} (${((100 * tokens) / Math.max(1, input)).toFixed(1)} %)`;
  const cached = all.map((figures) => numberOf(figures, 'cached_tokens'));
  return [
    told.length === 0
      ? 'Reuse outcomes: the endpoint tells none (x-baton-plan)'
      : `Reuse outcomes: ${[...Map.groupBy(told, (outcome) => outcome)]
          .toSorted(([, a], [, b]) => b.length - a.length)
          .map(([outcome, each]) => `${outcome} ${each.length}`)
          .join(', ')}`,
    ...(told.length === 0
      ? []
      : [`Prompt tokens saved by handles: ${share(sum(all.map((each) => each.saved_tokens)))}`]),
    ...(cached.every((tokens) => tokens === undefined)
      ? []
      : [`Prompt tokens the engine had cached: ${share(sum(cached.map((tokens) => tokens ?? 0)))}`]),
  ];
}

/** Lines of a table as pandas prints it: two decimals, fewer where a whole column needs fewer. */
function describe(
  head: readonly string[],
  rows: readonly (readonly [label: string, values: readonly number[]])[],
): readonly string[] {
  const columns = head.slice(1).map((title, at) => {
    const texts = trimZeros(rows.map(([, values]) => (values[at] ?? 0).toFixed(2)));
    const width = Math.max(title.length, ...texts.map((text) => text.length));
    return [title, ...texts].map((text) => text.padStart(width));
  });
  const labels = [head[0] ?? '', ...rows.map(([label]) => label)];
  const width = Math.max(...labels.map((label) => label.length));
  return labels.map((label, at) => [label.padEnd(width), ...columns.map((column) => column[at] ?? '')].join('  '));
}

function trimZeros(texts: readonly string[]): readonly string[] {
  return texts.every((text) => text === 'NaN' || text.endsWith('0'))
    ? texts.map((text) => text.replace(/0$/, ''))
    : texts;
}
