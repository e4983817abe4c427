import { writeFileSync } from 'node:fs';
import { resolve } from 'node:path';
import { figuresOf } from '../bench/figures.ts';
import { clientLimit } from '../bench/load.ts';
import { createBar } from '../bench/progress-bar.ts';
import { runServe, type ServeOutcome } from '../bench/serve.ts';
import { serveReport } from '../bench/serve-report.ts';
import { resultName, serveResult } from '../bench/serve-result.ts';
import { readServeSettings, type ServeSettings } from '../bench/serve-settings.ts';
import { formatProblem } from '../config/problem.ts';
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
    return await serve(host, request.flags, stop.signal);
  } catch (error) {
    host.err(
      stop.signal.aborted
        ? 'stopped; nothing was measured\n'
        : `baton: ${error instanceof Error ? error.message : String(error)}\n`,
    );
    return FAILED;
  }
}

async function serve(host: BenchHost, flags: BenchRequest['flags'], signal: AbortSignal): Promise<number> {
  const read = readServeSettings(flags, host.env['OPENAI_API_KEY']);
  if (read.kind === 'error') {
    for (const problem of read.problems) host.err(`${formatProblem(problem)}\n`);
    return USAGE;
  }
  const { settings, save } = read;
  const outcome = await runServe(settings, {
    signal,
    tell: (line) => host.err(`${line}\n`),
    bar: (total) => createBar({ total, terminal: host.terminal, write: (text) => host.err(text) }),
  });
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
  const errors = Map.groupBy(
    outcome.samples.flatMap(({ error }) => error ?? []),
    (error) => error,
  );
  const shown = [...errors].slice(0, ERRORS_SHOWN);
  const limit = clientLimit(outcome);
  const uncounted = outcome.samples.some(({ error, inputTokens }) => error === undefined && inputTokens === undefined);
  return [
    ...(signal.aborted ? [`interrupted: ${outcome.samples.length} of ${prompts} requests had ended`] : []),
    ...shown.map(([error, all]) => `${all.length} failed: ${error}`),
    ...(errors.size > shown.length ? [`and ${errors.size - shown.length} other errors`] : []),
    ...(uncounted ? ['the endpoint tells no usage: input tokens are not counted, and an event counts as a token'] : []),
    ...(limit === undefined ? [] : [limit]),
  ];
}

function write(host: BenchHost, file: string, result: object): void {
  try {
    writeFileSync(file, `${JSON.stringify(result)}\n`);
  } catch (error) {
    throw new Error(`${file} cannot be written: ${error instanceof Error ? error.message : String(error)}`, {
      cause: error,
    });
  }
  host.err(`result: ${file}\n`);
}
