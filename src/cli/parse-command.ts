import { Command, CommanderError, Option } from 'commander';
import type { RoleName } from '../config/config.ts';
import type { RawFlags } from '../config/flag-layers.ts';
import { FLAGS, type FlagSpec } from '../config/flags.ts';
import { LAUNCH_FLAGS, type LaunchFlagValues } from '../launch/flags.ts';
import { readSimOptions, type SimFlag, simFlags } from '../sim/cli-options.ts';
import type { SimOptions } from '../sim/options.ts';
import { type TidyResult, tidyArguments } from './arguments.ts';
import { addBenchCommand, type BenchRequest } from './bench-parse.ts';
import { addDescribeCommands, type DescribeForm } from './describe-parse.ts';
import { addTable, addTo, camelCase, readTable } from './flag-table.ts';
import { addPoolCommand, type PoolRequest } from './pool-parse.ts';
import { usageSentence } from './usage-sentence.ts';

/** What a command line asks for. */
export type ParsedCommand =
  | { readonly kind: 'serve'; readonly flags: RawFlags }
  | { readonly kind: 'sim'; readonly options: SimOptions }
  | { readonly kind: 'launch'; readonly flags: LaunchFlagValues }
  | { readonly kind: 'check-config'; readonly file: string }
  | {
      readonly kind: 'explain';
      readonly file: string;
      readonly flags: RawFlags;
      readonly tenant: string;
      readonly conversation: string;
      readonly json: boolean;
    }
  | { readonly kind: 'hash-key' }
  | { readonly kind: 'licenses' }
  /** The commands themselves, written down for another program. */
  | { readonly kind: 'describe'; readonly program: Command; readonly form: DescribeForm }
  | { readonly kind: 'pool'; readonly request: PoolRequest }
  | { readonly kind: 'bench'; readonly request: BenchRequest }
  /** Help or version, for standard output. */
  | { readonly kind: 'print'; readonly text: string }
  /** A mistake, as one sentence. */
  | { readonly kind: 'usage'; readonly message: string };

const ROLE_COMMANDS: readonly (readonly [RoleName, string])[] = [
  ['facade', 'run only the OpenAI-compatible front door'],
  ['router', 'run only the router'],
  ['kvstore', 'run only the KV cache store'],
  ['registry', 'run only the pool registry'],
];

/** Commands that take the flags of `serve`. */
const SERVING: ReadonlySet<string> = new Set(['serve', ...ROLE_COMMANDS.map(([role]) => role)]);

const TOP_HELP = `
Start with simulated engines, without a GPU:
  baton serve --sim
In front of two vLLM engines:
  baton serve --prefill http://10.0.0.1:8100 --decode http://10.0.0.2:8200
`;

const SERVE_HELP = `
Every flag is also a variable (BATON_RPC_PORT for --rpc-port) and most are keys of the file. Flags go before variables,
variables before the file. OPENAI_API_KEY is the key for the engines. docs/configuration.md lists all keys.
`;

const LAUNCH_HELP = `
Without flags: two prefill and two decode engines on the ports 7100, 7101, 7200 and 7201, baton on 9100. The logs are
prefiller1.log ... decoder1.log ... proxy.log. docs/migrate.md has an example of a topology file.
`;

/** Parses the words after `baton`; `version` gives what `--version` prints. */
export function parseCommand(argv: readonly string[], version: () => string): ParsedCommand {
  // Words of these may look like flags of serve: those that launch passes on to engines, and those of a benchmark.
  const tidy: TidyResult =
    argv[0] === 'launch' || argv[0] === 'bench'
      ? { kind: 'ok', args: argv }
      : tidyArguments(argv.length === 0 ? ['--help'] : argv);
  if (tidy.kind === 'bad') return { kind: 'usage', message: tidy.message };
  let printed = '';
  let result: ParsedCommand | undefined;
  const program = new Command('baton')
    .description(
      'Control plane for disaggregated LLM serving: one OpenAI-compatible port before prefill and decode engines.',
    )
    .exitOverride()
    .configureOutput({
      writeOut: (text) => {
        printed += text;
      },
      writeErr: () => {},
      getOutHelpWidth: () => 110,
    })
    .option('-V, --version', 'print version and commit of baton, and the version of Node')
    .on('option:version', () => {
      printed = `${version()}\n`;
      throw new CommanderError(0, 'commander.version', '');
    })
    .helpOption('-h, --help', 'print this help')
    .helpCommand('help [command]', 'print help for a command')
    .configureHelp({ optionTerm })
    .addHelpText('after', TOP_HELP);
  const [first = ''] = tidy.args;
  const use = (parsed: ParsedCommand): void => {
    result = parsed;
  };
  addServeCommands(program, first, (flags) => use({ kind: 'serve', flags }));
  // To make the flags of all commands takes longer than to read those of one, and most starts are of one that serves.
  if (!SERVING.has(first)) addOtherCommands(program, use);
  try {
    program.parse(tidy.args, { from: 'user' });
  } catch (error) {
    if (!(error instanceof CommanderError)) throw error;
    if (error.exitCode === 0) return { kind: 'print', text: printed };
    return { kind: 'usage', message: usageSentence(program, error, tidy.args, (name) => SERVING.has(name)) };
  }
  return result ?? { kind: 'print', text: printed };
}

/** Adds those that the word `first` may mean: one of them, or all. */
function addServeCommands(program: Command, first: string, run: (flags: RawFlags) => void): void {
  const isWanted = (name: string) => name === first || !SERVING.has(first);
  if (isWanted('serve')) {
    const serve = program
      .command('serve')
      .summary('run baton')
      .description('Runs baton: the front door, the router, the KV cache store and the pool registry.')
      .addHelpText('after', SERVE_HELP);
    for (const flag of FLAGS) serve.addOption(optionOf(flag));
    serve.action((values: Readonly<Record<string, unknown>>) => run(readFlags(values)));
  }
  for (const [role, about] of ROLE_COMMANDS) {
    if (!isWanted(role)) continue;
    const command = program
      .command(role)
      .summary(about)
      .description(`The same as baton serve --roles ${role}; its other flags are listed by baton serve --help.`);
    for (const flag of FLAGS) if (flag.name !== 'roles') command.addOption(optionOf(flag).hideHelp());
    command.action((values: Readonly<Record<string, unknown>>) => run({ ...readFlags(values), roles: role }));
  }
}

function addOtherCommands(program: Command, run: (parsed: ParsedCommand) => void): void {
  addLaunchCommand(program, (flags) => run({ kind: 'launch', flags }));
  addSimCommand(program, run);
  addPoolCommand(program, (request) => run({ kind: 'pool', request }));
  addBenchCommand(program, (request) => run({ kind: 'bench', request }));
  program
    .command('check-config')
    .summary('check a configuration file')
    .description(
      'Checks a configuration file and prints each mistake with its line; the exit code is 2 if there is one.',
    )
    .argument('<file>', 'YAML file')
    .action((file: string) => run({ kind: 'check-config', file }));
  addExplainCommand(program, run);
  program
    .command('hash-key')
    .summary("hash a client's key")
    .description(
      'Reads a key from standard input and prints what stands behind its tenant in the file of --api-keys-file.',
    )
    .action(() => run({ kind: 'hash-key' }));
  program
    .command('licenses')
    .summary('print the licences of what is inside')
    .description('Prints the licences of all that is inside an executable of one file.')
    .action(() => run({ kind: 'licenses' }));
  addDescribeCommands(program, (form) => run({ kind: 'describe', program, form }));
}

function addLaunchCommand(program: Command, run: (flags: LaunchFlagValues) => void): void {
  const launch = program
    .command('launch')
    .summary('start engines and baton on this machine')
    .description(
      'Starts prefill and decode engines and baton in front of them, watches them, and stops all of them with itself.',
    )
    .addHelpText('after', LAUNCH_HELP);
  addTable(launch, LAUNCH_FLAGS);
  launch.action((values: Readonly<Record<string, unknown>>) => run(readTable(LAUNCH_FLAGS, values)));
}

/** The flags of serve that say where the router is and what is shown to it. */
const EXPLAIN_FLAGS = ['router-url', 'rpc-client-token-file', 'rpc-client-ca', 'rpc-client-cert', 'rpc-client-key'];

function addExplainCommand(program: Command, run: (parsed: ParsedCommand) => void): void {
  const command = program
    .command('explain')
    .summary('ask a live router what it would do with a request')
    .description(
      'Asks a live router for its plan for a request, and why it did not choose each of the other engines. Nothing is ' +
        'sent to an engine, and no text to the router. The exit code is 1 if there is no plan.',
    )
    .argument('<file>', 'JSON file with the body of a chat or a completion; - for standard input')
    .option('--json', 'print the answer as JSON')
    .option('--tenant <name>', 'tenant of the request (anonymous)')
    .option('--conversation <id>', 'conversation of the request, as a header would name it (what the body says)');
  for (const flag of FLAGS) if (EXPLAIN_FLAGS.includes(flag.name)) command.addOption(optionOf(flag));
  command.action((file: string, values: Readonly<Record<string, unknown>>) => {
    const { tenant = 'anonymous', conversation = '', json } = values;
    run({
      kind: 'explain',
      file,
      flags: readFlags(values),
      tenant: String(tenant),
      conversation: String(conversation),
      json: json === true,
    });
  });
}

function addSimCommand(program: Command, run: (parsed: ParsedCommand) => void): void {
  const sim = program
    .command('sim')
    .summary('run one simulated engine')
    .description('Runs one simulated vLLM engine, for tests and demonstrations: real protocol, made-up answers.');
  for (const flag of simFlags) sim.addOption(simOptionOf(flag));
  sim.action((values: Readonly<Record<string, unknown>>) => {
    const byFlag = Object.fromEntries(simFlags.map(({ flag }) => [flag, values[camelCase(flag)]]));
    try {
      run({ kind: 'sim', options: readSimOptions(byFlag) });
    } catch (error) {
      run({ kind: 'usage', message: error instanceof Error ? error.message : String(error) });
    }
  });
}

function simOptionOf({ flag, kind, value, description, default: fallback, choices }: SimFlag): Option {
  const words = choices === undefined ? '' : `: ${choices.join(', ')}`;
  const shown = fallback === undefined ? '' : ` (${fallback})`;
  const option = new Option(`--${flag}${kind === 'switch' ? '' : ` <${value}>`}`, `${description}${words}${shown}`);
  return kind === 'list' ? option.argParser(addTo) : option;
}

function optionOf(flag: FlagSpec): Option {
  const list = flag.kind === 'list-add' || flag.kind === 'list-replace';
  const value = flag.kind === 'switch' ? '' : ` <${flag.value ?? 'value'}${list ? '...' : ''}>`;
  const alias = flag.alias === undefined ? '' : `--${flag.alias}, `;
  return new Option(`${alias}--${flag.name}${value}`, flag.about).helpGroup(flag.group);
}

// Two spellings of one flag take one short line: --prefiller-host(s) <host...>.
function optionTerm(option: Option): string {
  const [first, second] = option.flags.split(', ');
  return first !== undefined && second?.startsWith(`${first.slice(0, -1)} `)
    ? second.replace(' ', '(s) ')
    : option.flags;
}

// Commander hands out camelCase names, true for a switch and a list for a variadic option.
function readFlags(values: Readonly<Record<string, unknown>>): RawFlags {
  const flags: Record<string, string | readonly string[]> = {};
  for (const { name } of FLAGS) {
    const value = values[camelCase(name)];
    if (value === undefined) continue;
    flags[name] = Array.isArray(value) ? value.map(String) : String(value);
  }
  return flags;
}
