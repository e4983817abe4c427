import { figuresOf } from '../bench/figures.ts';
import { clientLimit } from '../bench/load.ts';
import { runServe } from '../bench/serve.ts';
import { serveReport } from '../bench/serve-report.ts';
import { benchOf } from './bench.ts';
import type { LaunchPlan, ProcessSpec } from './plan.ts';
import type { Progress } from './progress.ts';
import { Supervisor } from './supervisor.ts';
import type { LaunchSystem, ProcessEnd } from './system.ts';
import type { BenchSettings, LaunchSettings } from './topology.ts';

/** What a launch runs with. */
export interface LaunchRun {
  readonly settings: LaunchSettings;
  readonly plan: LaunchPlan;
  readonly system: LaunchSystem;
  readonly progress: Progress;
  /** Receives what is a result: the request to paste, the figures of the benchmark. */
  out(text: string): void;
  /** Resolves at the first request to stop. */
  stopRequested(): Promise<unknown>;
}

const TAIL_LINES = 15;

/**
 * Starts everything of a plan and stays until it is told to stop, the benchmark is done, or the rest cannot serve. True
 * when it ended as it should; no process that it started is left either way.
 */
export async function runLaunch(run: LaunchRun): Promise<boolean> {
  const { settings, plan, progress } = run;
  const all = [...plan.engines, plan.proxy];
  const dead = new Set<string>();
  const lost = Promise.withResolvers<'failed'>();
  const countAlive = (kind: ProcessSpec['kind']): number =>
    all.filter((spec) => spec.kind === kind && !dead.has(spec.name)).length;
  const onDeath = (spec: ProcessSpec, end: ProcessEnd): void => {
    dead.add(spec.name);
    reportDeath(run, spec, end);
    const [prefill, decode] = [countAlive('prefill'), countAlive('decode')];
    const serves = prefill > 0 && decode > 0 && countAlive('proxy') > 0;
    progress.line(serves ? `going on with ${prefill} prefill and ${decode} decode` : 'the rest cannot serve');
    if (!serves) lost.resolve('failed');
  };
  const ended = Promise.race([run.stopRequested().then(() => 'stopped' as const), lost.promise]);
  const stop = new AbortController();
  let outcome: Outcome;
  {
    await using supervisor = new Supervisor(run.system, { stopTimeoutMs: settings.stopTimeoutMs, onDeath });
    outcome = await Promise.race([ended, serve(run, supervisor, stop.signal).then((done) => done ?? ended)]);
    stop.abort();
    progress.waitFor([]);
    progress.line('stopping');
  }
  progress.line('stopped');
  return outcome !== 'failed';
}

type Outcome = 'stopped' | 'failed' | 'done';

/** Brings everything up and runs the benchmark; undefined when there is none, so that all goes on until it is ended. */
async function serve(run: LaunchRun, supervisor: Supervisor, stop: AbortSignal): Promise<Outcome | undefined> {
  const { settings, plan, system, progress } = run;
  for (const { path, text } of plan.files) system.write(path, text);
  for (const spec of plan.engines) supervisor.start(spec);
  await bringUp(run, supervisor, plan.engines);
  supervisor.start(plan.proxy);
  await bringUp(run, supervisor, [plan.proxy]);
  if (!supervisor.isRunning(plan.proxy.name)) return undefined;
  progress.line(`up: ${plan.url}`);
  if (settings.bench !== undefined) return bench(run, settings.bench, stop);
  run.out(requestHint(plan.url, settings.model));
  return undefined;
}

async function bench({ plan, progress, out }: LaunchRun, sent: BenchSettings, stop: AbortSignal): Promise<Outcome> {
  const settings = benchOf(plan.url, sent, Date.now());
  try {
    const outcome = await runServe(settings, {
      signal: stop,
      tell: (line) => progress.line(line),
      bar: () => ({ step: () => undefined, end: () => undefined }),
    });
    // Requests that were cut off say nothing of the engines.
    if (stop.aborted) return 'stopped';
    const errors = outcome.samples.flatMap(({ error }) => error ?? []);
    for (const error of errors) progress.line(`a request failed: ${error}`);
    out(serveReport(figuresOf(outcome.samples, outcome.durationMs, settings.percentiles), settings));
    const limit = clientLimit(outcome);
    if (limit !== undefined) progress.line(limit);
    return errors.length === 0 ? 'done' : 'failed';
  } catch (error) {
    if (stop.aborted) return 'stopped';
    progress.line(`the benchmark failed: ${error instanceof Error ? error.message : String(error)}`);
    return 'failed';
  }
}

/** Waits for each of the processes; one that takes too long is killed, and the rest goes on. */
async function bringUp(run: LaunchRun, supervisor: Supervisor, specs: readonly ProcessSpec[]): Promise<void> {
  const { settings, progress } = run;
  if (supervisor.isStopping) return;
  const waiting = new Set(specs.map(({ name }) => name));
  const since = performance.now();
  for (const { name, logFile, readyUrl } of specs) {
    const pid = supervisor.pidOf(name);
    if (pid !== undefined) progress.line(`${name} started: ${new URL(readyUrl).host}, pid ${pid}, log ${logFile}`);
  }
  progress.waitFor([...waiting]);
  await Promise.all(
    specs.map(async (spec) => {
      const readiness = await supervisor.whenReady(spec, settings.readyTimeoutMs);
      if (supervisor.isStopping) return;
      const seconds = ((performance.now() - since) / 1000).toFixed(1);
      waiting.delete(spec.name);
      progress.waitFor([...waiting]);
      if (readiness === 'ready') progress.line(`${spec.name} is ready after ${seconds} s`);
      if (readiness !== 'late') return;
      progress.line(`${spec.name} is not ready after ${seconds} s (--ready-timeout), so it is killed`);
      await supervisor.kill(spec.name);
    }),
  );
}

function reportDeath({ system, progress }: LaunchRun, spec: ProcessSpec, end: ProcessEnd): void {
  const how =
    end.error !== undefined
      ? `could not be started (${end.error})`
      : end.signal === null
        ? `ended with exit code ${end.code}`
        : `was ended by ${end.signal}`;
  const tail = system.tail(spec.logFile, TAIL_LINES);
  progress.line(
    `${spec.name} ${how}; ${tail.length === 0 ? `${spec.logFile} is empty` : `the end of ${spec.logFile}:`}`,
  );
  for (const line of tail) progress.line(`  | ${line}`);
}

function requestHint(url: string, model: string): string {
  return [
    'Try, in another shell; Ctrl-C stops everything:',
    '',
    `  curl ${url}/v1/chat/completions -H 'content-type: application/json' \\`,
    `    -d '{"model": ${JSON.stringify(model)}, "messages": [{"role": "user", "content": "Hello"}]}'`,
    '',
    '',
  ].join('\n');
}
