import { setImmediate } from 'node:timers/promises';
import { readText } from '../config/load.ts';
import type { LoadInput } from '../config/load-config.ts';
import { formatProblem, type Problem } from '../config/problem.ts';
import { findGpus, findMissing, findMissingGpus, findTakenPorts } from '../launch/checks.ts';
import { formatPlan } from '../launch/dry-run.ts';
import { LAUNCH_CONNECTORS } from '../launch/engine-flags.ts';
import type { LaunchFlagValues } from '../launch/flags.ts';
import { findPlanProblems, planLaunch } from '../launch/plan.ts';
import { createProgress } from '../launch/progress.ts';
import { runLaunch } from '../launch/run-launch.ts';
import { resolveSettings } from '../launch/settings.ts';
import { createLaunchSystem, type LaunchSystem, type SystemParts } from '../launch/system.ts';
import { simFlags } from '../sim/cli-options.ts';
import { FAILED, OK, USAGE } from './exit-codes.ts';
import { findWordProblems } from './launch-words.ts';

/** The parts of the process around that launching needs. */
export interface LaunchHost extends SystemParts {
  /** The command that runs this baton. */
  readonly self: readonly string[];
  readonly terminal: boolean;
  out(text: string): void;
  err(text: string): void;
  stopRequested(): Promise<unknown>;
}

/** Runs `baton launch` to its end; `known` is what this build has. Resolves with the exit code. */
export async function launch(
  host: LaunchHost,
  flags: LaunchFlagValues,
  known: LoadInput['known'],
  system: LaunchSystem = createLaunchSystem(host),
): Promise<number> {
  let stopped = false;
  void host.stopRequested().then(() => {
    stopped = true;
  });
  const file = readTopology(flags);
  if (file.kind === 'bad') return refuse(host, [{ where: '--topology', message: file.message }]);
  const resolved = resolveSettings({
    flags,
    ...(file.kind === 'ok' ? { file } : {}),
    connectors: LAUNCH_CONNECTORS.filter((name) => known.connectors.includes(name)),
    simConnectors: simFlags.find(({ flag }) => flag === 'connector')?.choices ?? [],
  });
  if (resolved.kind === 'error') return refuse(host, resolved.problems);
  const { settings } = resolved;
  const needsGpus = !settings.sim && settings.device === 'cuda';
  const gpus = needsGpus ? await findGpus(host.env, system, settings) : [];
  // A dry run shows the GPUs that would be used also where there are none.
  const shown = settings.dryRun && gpus.length === 0 ? Array.from({ length: 1024 }, (_, i) => String(i)) : gpus;
  const plan = planLaunch(settings, { self: host.self, env: host.env, gpus: shown });
  const words = { self: host.self, env: host.env, known, sim: settings.sim };
  const problems = [...findPlanProblems(settings, plan), ...findWordProblems(plan, words)];
  if (problems.length > 0) return refuse(host, problems);
  if (settings.dryRun) {
    if (shown === gpus || host.env['CUDA_VISIBLE_DEVICES'] !== undefined) {
      const missing = findMissingGpus(settings, gpus, host.env);
      if (missing.length > 0) return lack(host, missing);
    }
    host.out(formatPlan(plan));
    return OK;
  }
  const [missing, taken] = await Promise.all([
    findMissing(settings, gpus, host.env, system),
    findTakenPorts(plan.ports, system),
  ]);
  // A signal that came while modules were loaded is handed out only now, when the event loop turns.
  await setImmediate();
  if (stopped) {
    host.err('stopping; nothing was started\n');
    return OK;
  }
  const code = missing.length > 0 ? lack(host, missing) : OK;
  if (taken.length > 0) return refuse(host, taken);
  if (code !== OK) return code;
  const done = await runLaunch({
    settings,
    plan,
    system,
    progress: createProgress({ terminal: host.terminal, write: (text) => host.err(text) }),
    out: (text) => host.out(text),
    stopRequested: () => host.stopRequested(),
  });
  return done ? OK : FAILED;
}

type TopologyFile =
  | { readonly kind: 'none' }
  | { readonly kind: 'ok'; readonly name: string; readonly text: string }
  | { readonly kind: 'bad'; readonly message: string };

function readTopology(flags: LaunchFlagValues): TopologyFile {
  const name = flags['topology'];
  if (typeof name !== 'string') return { kind: 'none' };
  const text = readText(name);
  return text.kind === 'ok' ? { kind: 'ok', name, text: text.text } : text;
}

function lack(host: LaunchHost, missing: readonly string[]): number {
  for (const what of missing) host.err(`baton launch needs ${what}\n`);
  return FAILED;
}

function refuse(host: LaunchHost, problems: readonly Problem[]): number {
  for (const problem of problems) host.err(`${formatProblem(problem)}\n`);
  return USAGE;
}
