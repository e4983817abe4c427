import type { Config } from '../config/config.ts';
import type { RawFlags } from '../config/flag-layers.ts';
import { configFile, loadConfigFile, readText } from '../config/load.ts';
import { loadConfig } from '../config/load-config.ts';
import { formatProblem, type Problem } from '../config/problem.ts';
import type { Origin } from '../config/version.ts';
import { KNOWN } from '../known.ts';
import type { LaunchFlagValues } from '../launch/flags.ts';
import { createLogger, errorFields, type Logger } from '../obs/log.ts';
import type { ReloadSource } from '../roles/reload.ts';
import type { Running } from '../roles.ts';
import type { SimOptions } from '../sim/options.ts';
import { FAILED, OK, USAGE } from './exit-codes.ts';
import { type ParsedCommand, parseCommand } from './parse-command.ts';
import { simHint } from './sim-hint.ts';

/** How a process is asked to stop: by a supervisor, or from the keyboard. */
export type StopSignal = 'SIGTERM' | 'SIGINT';

/** The process around the command line. */
export interface CliHost {
  /** The words after `baton`. */
  readonly argv: readonly string[];
  readonly env: Readonly<Record<string, string | undefined>>;
  /** What this baton was made from; asked only where that is printed. */
  origin(): Origin;
  readonly nodeVersion: string;
  /** The command that runs this baton; a subcommand is appended. */
  readonly self: readonly string[];
  /** The licences of what the executable has inside; undefined where baton is none. Throws where the file is damaged. */
  licenses(): string | undefined;
  /** True when standard error is a terminal. */
  readonly terminal: boolean;
  /** The first line of standard input with its line end, or all of it where there is none. */
  readLine(): Promise<Uint8Array>;
  out(text: string): void;
  err(text: string): void;
  /** Starts baton; rejects when it cannot, with a message that names the flag. */
  start(config: Config, log: Logger, reload: ReloadSource): Promise<Running>;
  /** Calls `listener` at each SIGHUP from now on. */
  onHangUp(listener: () => void): void;
  /** Signals a whole process group; false when there is none. 0 only asks. */
  signalGroup(group: number, signal: NodeJS.Signals | 0): boolean;
  /** Resolves at the first request to stop. */
  stopRequested(): Promise<StopSignal>;
}

/** Runs one command line to its end; resolves with the exit code: 0, 1 for a failed start, 2 for a mistake in the settings. */
export async function runCli(host: CliHost): Promise<number> {
  const command = parseCommand(host.argv, () => versionLine(host));
  switch (command.kind) {
    case 'print':
      host.out(command.text);
      return OK;
    case 'usage':
      host.err(`baton: ${command.message}\n`);
      return USAGE;
    case 'check-config':
      return checkConfig(host, command.file);
    case 'explain':
      return runExplain(host, command);
    case 'hash-key':
      return hashKey(host);
    case 'licenses':
      return printLicenses(host);
    case 'describe': {
      // Loaded only here: help for other programs.
      const { describe } = await import('./describe.ts');
      host.out(describe(command.program, command.form, host.origin().version));
      return OK;
    }
    case 'pool': {
      // Loaded only here: the other commands make no calls.
      const { runPool } = await import('./pool-command.ts');
      return runPool(host, command.request);
    }
    case 'bench': {
      // Loaded only here: the other commands measure nothing.
      const { runBench } = await import('./bench-command.ts');
      return runBench(host, command.request);
    }
    case 'serve':
      return serve(host, command.flags);
    case 'launch':
      return runLaunch(host, command.flags);
    case 'sim':
      return runSim(host, command.options);
  }
}

function checkConfig(host: CliHost, file: string): number {
  const text = readText(file);
  if (text.kind === 'bad') {
    host.err(`baton: ${text.message}\n`);
    return USAGE;
  }
  // Only the file counts: the answer must not depend on the shell in which it is asked.
  const loaded = loadConfig({ flags: {}, env: {}, fileText: text.text, fileName: file, known: KNOWN, terminal: false });
  if (loaded.kind === 'error') return refuse(host, loaded.problems);
  for (const warning of loaded.warnings) host.err(`warning: ${formatProblem(warning)}\n`);
  const count = (role: string): number => loaded.config.instances.filter((instance) => instance.role === role).length;
  host.out(`${file}: ok (${count('prefill')} prefill, ${count('decode')} decode, ${count('both')} both)\n`);
  return OK;
}

function versionLine({ origin, nodeVersion }: CliHost): string {
  const { version, commit } = origin();
  return `baton ${version} (commit ${commit}, node ${nodeVersion})`;
}

function printLicenses(host: CliHost): number {
  let licenses: string | undefined;
  try {
    licenses = host.licenses();
  } catch (error) {
    host.err(`baton: ${error instanceof Error ? error.message : String(error)}\n`);
    return FAILED;
  }
  if (licenses === undefined) {
    host.err('baton: this is no executable of one file: its packages lie in node_modules, each with its licence\n');
    return FAILED;
  }
  host.out(licenses);
  return OK;
}

async function hashKey(host: CliHost): Promise<number> {
  // Loaded only here: the other commands hash nothing, or later.
  const { hashKeyLine } = await import('./hash-key.ts');
  const hashed = hashKeyLine(await host.readLine());
  if (hashed.kind === 'bad') {
    host.err(`baton: ${hashed.message}\n`);
    return USAGE;
  }
  host.out(`${hashed.text}\n`);
  return OK;
}

function refuse(host: CliHost, problems: readonly Problem[]): number {
  for (const problem of problems) host.err(`${formatProblem(problem)}\n`);
  return USAGE;
}

async function serve(host: CliHost, flags: RawFlags): Promise<number> {
  const input = { flags, env: host.env, known: KNOWN, terminal: host.terminal };
  const load = () => loadConfigFile(input);
  const loaded = load();
  if (loaded.kind === 'error') return refuse(host, loaded.problems);
  const { config, warnings } = loaded;
  const file = configFile(input);
  const log = createLogger({ ...config.log, color: host.terminal, destination: { write: (line) => host.err(line) } });
  for (const warning of warnings) log.warn(formatProblem(warning));
  let running: Running;
  try {
    running = await host.start(config, log, { running: loaded, load, ...(file === undefined ? {} : { file }) });
  } catch (error) {
    log.debug(errorFields(error), 'start failed');
    host.err(`baton: ${error instanceof Error ? error.message : String(error)}\n`);
    return FAILED;
  }
  const { facade } = running.addresses;
  host.onHangUp(() => running.reload('SIGHUP'));
  if (canAnswer(config.sim) && facade !== undefined && facade !== 'off') {
    host.out(simHint(facade, config.facade.tls !== undefined));
  }
  // Whoever stops it by hand does not wait for a load balancer.
  await running.stop({ settle: (await host.stopRequested()) === 'SIGTERM' });
  return OK;
}

/** Whether there are simulated engines, and enough of them for a request. */
function canAnswer(sim: Config['sim']): boolean {
  return sim !== undefined && sim.prefill > 0 && sim.decode > 0;
}

async function runExplain(host: CliHost, command: Extract<ParsedCommand, { kind: 'explain' }>): Promise<number> {
  const flags = { 'router-url': DEFAULT_ROUTER, ...command.flags, roles: 'facade' };
  const loaded = loadConfig({ flags, env: host.env, known: KNOWN, terminal: host.terminal });
  if (loaded.kind === 'error') return refuse(host, loaded.problems);
  const log = createLogger({ level: 'warn', format: 'pretty', color: host.terminal, destination: { write: host.err } });
  // Loaded only here: the other commands make no calls.
  const { explain } = await import('./explain.ts');
  return explain(host, command, loaded.config, log);
}

/** The RPC port of `baton serve` on this machine. */
const DEFAULT_ROUTER = 'http://127.0.0.1:50051';

async function runLaunch(host: CliHost, flags: LaunchFlagValues): Promise<number> {
  // Loaded only here: the other commands start no processes.
  const { launch } = await import('./launch-command.ts');
  return launch(host, flags, KNOWN);
}

async function runSim(host: CliHost, options: SimOptions): Promise<number> {
  // Loaded only here: the other commands do without the engine.
  const { startSim } = await import('../sim/start-sim.ts');
  let sim: Awaited<ReturnType<typeof startSim>>;
  try {
    sim = await startSim(options);
  } catch (error) {
    host.err(`baton: ${simStartError(error, options)}\n`);
    return FAILED;
  }
  const { host: sideHost, port: sidePort } = sim.sideChannel;
  host.out(`simulated ${sim.role} engine: ${sim.url} (side channel ${sideHost}:${sidePort})\n`);
  await host.stopRequested();
  await sim.close();
  return OK;
}

function simStartError(error: unknown, options: SimOptions): string {
  if (!(error instanceof Error)) return String(error);
  if (!('code' in error) || error.code !== 'EADDRINUSE' || !('port' in error)) return error.message;
  return `port ${String(error.port)} is in use (${error.port === options.port ? '--port' : '--side-port'})`;
}
