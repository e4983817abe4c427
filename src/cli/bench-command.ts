import { writeFileSync } from 'node:fs';
import { resolve } from 'node:path';
import { compareReport } from '../bench/compare.ts';
import { figuresOf } from '../bench/figures.ts';
import type { BenchFlagValues } from '../bench/flags.ts';
import { clientLimit } from '../bench/load.ts';
import { runMultiTurn } from '../bench/multi-turn.ts';
import { readMultiTurnSettings } from '../bench/multi-turn-settings.ts';
import { plotHtml, plotSvg } from '../bench/plot.ts';
import { createBar } from '../bench/progress-bar.ts';
import { readResult } from '../bench/saved-result.ts';
import { runServe, type ServeOutcome, type ServeRun } from '../bench/serve.ts';
import { serveReport } from '../bench/serve-report.ts';
import { resultName, serveResult } from '../bench/serve-result.ts';
import { readServeSettings, type ServeSettings } from '../bench/serve-settings.ts';
import { turnFigures, turnReport } from '../bench/turn-report.ts';
import { formatProblem, type Problem } from '../config/problem.ts';
import type { BenchRequest } from './bench-parse.ts';
import { FAILED, OK, USAGE } from './exit-codes.ts';

/** The parts of the process around that measuring needs. */
export interface BenchHost {
  readonly env: Readonly<Record<string, string | undefined>>;
  /** True when standard error is a terminal. */
  readonly terminal: boolean;
  out(text: string): void;
  err(text: string): void;
  /** Resolves at the first request to stop. */
  stopRequested(): Promise<unknown>;
}

/** Runs one command of `baton bench`; resolves with the exit code. */
export async function runBench(host: BenchHost, request: BenchRequest): Promise<number> {
  const stop = new AbortController();
  void host.stopRequested().then(() => stop.abort());
  try {
    if (request.action === 'compare') return compare(host, request);
    return await ACTIONS[request.action](host, request.flags, stop.signal);
  } catch (error) {
    host.err(
      stop.signal.aborted
        ? 'stopped; nothing was measured\n'
        : `baton: ${error instanceof Error ? error.message : String(error)}\n`,
    );
    return FAILED;
  }
}

type Action = (host: BenchHost, flags: BenchFlagValues, signal: AbortSignal) => Promise<number>;

const ACTIONS: Readonly<Record<Exclude<BenchRequest['action'], 'compare'>, Action>> = {
  serve,
  'multi-turn': multiTurn,
};

async function multiTurn(host: BenchHost, flags: BenchFlagValues, signal: AbortSignal): Promise<number> {
  const read = readMultiTurnSettings(flags, host.env);
  if (read.kind === 'error') return refuse(host, read.problems);
  const { settings } = read;
  const outcome = await runMultiTurn(settings, around(host, signal));
  const { turns } = outcome;
  if (signal.aborted) host.err(`interrupted: ${turns.length} requests had ended\n`);
  for (const line of [...errorLines(outcome.errors), ...limitLines({ busy: outcome.busy, lateMs: 0 })]) {
    host.err(`${line}\n`);
  }
  if (turns.length > 0) host.out(turnReport(settings, outcome));
  if (settings.output !== undefined) write(host, settings.output, outcome.held);
  if (settings.statsFile !== undefined) write(host, settings.statsFile, turns.map(turnFigures));
  return turns.length > 0 && !signal.aborted ? OK : FAILED;
}

function compare(host: BenchHost, { files: [a, b], plot }: Extract<BenchRequest, { action: 'compare' }>): number {
  const [before, after] = [readResult(a), readResult(b)];
  host.out(compareReport(before, after));
  if (plot !== undefined) writeText(host, plot, (plot.endsWith('.html') ? plotHtml : plotSvg)([before, after]));
  return OK;
}

function refuse(host: BenchHost, problems: readonly Problem[]): number {
  for (const problem of problems) host.err(`${formatProblem(problem)}\n`);
  return USAGE;
}

function around(host: BenchHost, signal: AbortSignal): ServeRun {
  return {
    signal,
    tell: (line) => host.err(`${line}\n`),
    bar: (total) => createBar({ total, terminal: host.terminal, write: (text) => host.err(text) }),
  };
}

async function serve(host: BenchHost, flags: BenchFlagValues, signal: AbortSignal): Promise<number> {
  const read = readServeSettings(flags, host.env['OPENAI_API_KEY']);
  if (read.kind === 'error') return refuse(host, read.problems);
  const { settings, save } = read;
  const outcome = await runServe(settings, around(host, signal));
  const figures = figuresOf(outcome.samples, outcome.durationMs, settings.percentiles);
  for (const line of remarks(outcome, settings, signal)) host.err(`${line}\n`);
  host.out(serveReport(figures, settings));
  if (save !== undefined) {
    const date = new Date();
    const { model, samples } = outcome;
    const result = serveResult({ settings, save, model, figures, samples, date });
    write(host, resolve(save.dir, save.file ?? resultName(settings, save, model, date)), result);
  }
  return figures.completed > 0 && !signal.aborted ? OK : FAILED;
}

const ERRORS_SHOWN = 5;

/** What one should know before one believes the figures. */
function remarks(outcome: ServeOutcome, { prompts }: ServeSettings, signal: AbortSignal): readonly string[] {
  const { samples } = outcome;
  const isUncounted = samples.some(({ error, inputTokens }) => error === undefined && inputTokens === undefined);
  return [
    ...(signal.aborted ? [`interrupted: ${samples.length} of ${prompts} requests had ended`] : []),
    ...errorLines(samples.flatMap(({ error }) => error ?? [])),
    ...(isUncounted
      ? ['the endpoint tells no usage: input tokens are not counted, and an event counts as a token']
      : []),
    ...limitLines(outcome),
  ];
}

/** The first few kinds of errors, each with its number. */
function errorLines(errors: readonly string[]): readonly string[] {
  const kinds = [...Map.groupBy(errors, (error) => error)];
  const more = kinds.length - ERRORS_SHOWN;
  return [
    ...kinds.slice(0, ERRORS_SHOWN).map(([error, all]) => `${all.length} failed: ${error}`),
    ...(more > 0 ? [`and ${more} other errors`] : []),
  ];
}

function limitLines(signs: Parameters<typeof clientLimit>[0]): readonly string[] {
  const limit = clientLimit(signs);
  return limit === undefined ? [] : [limit];
}

function write(host: BenchHost, file: string, result: object): void {
  writeText(host, file, `${JSON.stringify(result)}\n`);
}

function writeText(host: BenchHost, file: string, text: string): void {
  try {
    writeFileSync(file, text);
  } catch (error) {
    throw new Error(`${file} cannot be written: ${error instanceof Error ? error.message : String(error)}`, {
      cause: error,
    });
  }
  host.err(`result: ${file}\n`);
}
