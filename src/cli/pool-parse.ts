import { type Command, InvalidArgumentError, Option } from 'commander';

/** What `baton pool` is to do, and with which registry. */
export interface PoolRequest {
  readonly action: 'list' | 'add' | 'drain' | 'resume' | 'remove' | 'watch';
  /** Base URL of the registry's RPC port; absent: BATON_REGISTRY_URL, else this machine's. */
  readonly registryUrl: string | undefined;
  readonly tokenFile: string | undefined;
  readonly ca: string | undefined;
  readonly json: boolean;
  /** Ids, and for `add` the URL. */
  readonly words: readonly string[];
  readonly role: string | undefined;
  readonly state: string | undefined;
  readonly all: boolean;
  readonly id: string | undefined;
  readonly connector: string | undefined;
  readonly labels: Readonly<Record<string, string>>;
  readonly reason: string | undefined;
  readonly wait: boolean;
  /** Also what is known of the engines. */
  readonly wide: boolean;
}

const HELP = `
A registry on another machine needs its URL, and a token where it wants tokens:
  baton pool list --registry-url https://registry:50051 --token-file operator.token
The token may also be in BATON_RPC_TOKEN. Exit codes: 0 done, 1 refused or not reached, 2 a mistake in the command line.
`;

const ROLES = ['prefill', 'decode', 'both'];
const STATES = ['starting', 'ready', 'suspect', 'draining', 'gone'];

/** Adds `baton pool` and its commands. */
export function addPoolCommand(program: Command, run: (request: PoolRequest) => void): void {
  const pool = program
    .command('pool')
    .summary('show and change the pools of a running registry')
    .description('Shows the engines that a running registry knows, and adds, drains, resumes and removes them.')
    .addHelpText('after', HELP);
  const command = (action: PoolRequest['action'], argument: string, about: string): Command => {
    const made = pool
      .command(`${action}${argument === '' ? '' : ` ${argument}`}`)
      .description(about)
      .option('--registry-url <url>', 'RPC port of the registry (http://127.0.0.1:50051)')
      .option('--token-file <file>', 'file with the token for it (BATON_RPC_TOKEN)')
      .option('--ca <file>', 'authorities of its certificate, PEM')
      .option('--json', 'JSON for programs');
    made.action((...given: readonly unknown[]) => {
      const [first] = given;
      const words = Array.isArray(first) ? first.map(String) : typeof first === 'string' ? [first] : [];
      run(readRequest(action, words, made.opts()));
    });
    return made;
  };
  command('list', '', 'Lists the engines.')
    .addOption(new Option('--role <role>', 'only engines of this role').choices(ROLES))
    .addOption(new Option('--state <state>', 'only engines in this state').choices(STATES))
    .option('--all', 'also those that are gone')
    .addOption(new Option('-o, --output <form>', 'wide: also what is known of the engines').choices(['wide']));
  command('add', '<url>', 'Adds an engine, until it is removed.')
    .addOption(new Option('--role <role>', 'what it does').choices(ROLES).makeOptionMandatory())
    .option('--id <id>', 'its id (host:port of its URL)')
    .option('--connector <name>', 'its KV connector', 'nixl')
    .option('--label <name=value>', 'a label (repeatable)', addLabel, {});
  command('drain', '<id...>', 'Gives engines no new requests; they are gone when nobody needs their KV any more.')
    .option('--reason <word>', 'why, a snake_case word')
    .option('--wait', 'wait until they are gone');
  command('resume', '<id...>', 'Takes engines that drain back.').option('--reason <word>', 'why, a snake_case word');
  command('remove', '<id...>', 'Removes engines at once, whatever they are doing.').option(
    '--reason <word>',
    'why, a snake_case word',
  );
  command('watch', '', 'Shows the engines and then each change, until it is interrupted.');
}

function addLabel(text: string, labels: Readonly<Record<string, string>>): Readonly<Record<string, string>> {
  const [, name, value] = /^([^=]+)=(.*)$/s.exec(text) ?? [];
  if (name === undefined || value === undefined) throw new InvalidArgumentError('expected name=value');
  return { ...labels, [name]: value };
}

function readRequest(
  action: PoolRequest['action'],
  words: readonly string[],
  options: Readonly<Record<string, unknown>>,
): PoolRequest {
  const text = (name: string) => {
    const value = options[name];
    return typeof value === 'string' ? value : undefined;
  };
  const labels: Record<string, string> = {};
  for (const [name, value] of Object.entries(Object(options['label']))) labels[name] = String(value);
  return {
    action,
    words,
    json: options['json'] === true,
    all: options['all'] === true,
    wait: options['wait'] === true,
    wide: options['output'] === 'wide',
    labels,
    registryUrl: text('registryUrl'),
    tokenFile: text('tokenFile'),
    ca: text('ca'),
    role: text('role'),
    state: text('state'),
    id: text('id'),
    connector: text('connector'),
    reason: text('reason'),
  };
}
