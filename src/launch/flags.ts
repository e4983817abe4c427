/** One flag of `baton launch`. */
export interface LaunchFlag {
  /** Name without dashes; with underscores instead of dashes it is the key of the topology file, where it is one. */
  readonly flag: string;
  readonly kind: 'switch' | 'value' | 'list';
  /** Word for the value in the help. */
  readonly value?: string;
  readonly group: string;
  readonly about: string;
  /** True when the topology file can set it too; the flag goes before the file. */
  readonly inFile?: boolean;
}

/** Values of a command line by flag name, not yet checked; a switch is the text `true`. */
export type LaunchFlagValues = Readonly<Record<string, string | readonly string[]>>;

const WHAT = 'What is started:';
const PORTS = 'Ports:';
const RUN = 'How it runs:';
const BENCH = 'Benchmark:';

/** Every flag of `baton launch` in the order of the help. */
export const LAUNCH_FLAGS: readonly LaunchFlag[] = [
  { flag: 'prefill', kind: 'value', value: 'n', group: WHAT, about: 'prefill engines (2)' },
  { flag: 'decode', kind: 'value', value: 'n', group: WHAT, about: 'decode engines (2)' },
  {
    flag: 'topology',
    kind: 'value',
    value: 'file',
    group: WHAT,
    about: 'YAML file with one entry per engine, instead of --prefill and --decode',
  },
  {
    flag: 'connector',
    kind: 'value',
    value: 'name',
    group: WHAT,
    about: 'KV connector of engines and baton (nixl)',
    inFile: true,
  },
  {
    flag: 'model',
    kind: 'value',
    value: 'name',
    group: WHAT,
    about: 'model or its folder (meta-llama/Llama-3.1-8B-Instruct)',
    inFile: true,
  },
  { flag: 'device', kind: 'value', value: 'kind', group: WHAT, about: 'cuda or cpu (cuda)', inFile: true },
  {
    flag: 'tensor-parallel-size',
    kind: 'value',
    value: 'n',
    group: WHAT,
    about: 'GPUs per engine (1)',
    inFile: true,
  },
  { flag: 'python', kind: 'value', value: 'path', group: WHAT, about: 'Python that has vLLM (python3)', inFile: true },
  {
    flag: 'engine-arg',
    kind: 'list',
    value: 'arg',
    group: WHAT,
    about: 'argument for every engine, --engine-arg=--dtype=float32 (repeatable)',
  },
  {
    flag: 'baton-arg',
    kind: 'list',
    value: 'arg',
    group: WHAT,
    about: 'argument for baton serve, --baton-arg=--log-level=debug (repeatable)',
  },
  { flag: 'sim', kind: 'switch', group: WHAT, about: 'simulated engines: no GPU, no Python, made-up answers' },

  {
    flag: 'port',
    kind: 'value',
    value: 'port',
    group: PORTS,
    about: 'port of the OpenAI API (9100)',
    inFile: true,
  },
  { flag: 'host', kind: 'value', value: 'addr', group: PORTS, about: 'its address (127.0.0.1)', inFile: true },
  {
    flag: 'prefill-port',
    kind: 'value',
    value: 'port',
    group: PORTS,
    about: 'first prefill port, the others follow; or a comma list with all (7100)',
  },
  {
    flag: 'decode-port',
    kind: 'value',
    value: 'port',
    group: PORTS,
    about: 'the same for decode (7200)',
  },
  {
    flag: 'side-port',
    kind: 'value',
    value: 'port',
    group: PORTS,
    about: 'first NIXL side channel port (5600)',
    inFile: true,
  },
  {
    flag: 'decoder-init-port',
    kind: 'value',
    value: 'port',
    group: PORTS,
    about: 'first LMCache handshake port of the decode engines (7300)',
    inFile: true,
  },
  {
    flag: 'decoder-alloc-port',
    kind: 'value',
    value: 'port',
    group: PORTS,
    about: 'first LMCache allocation port of the decode engines (7400)',
    inFile: true,
  },
  {
    flag: 'proxy-port',
    kind: 'value',
    value: 'port',
    group: PORTS,
    about: "port of LMCache's notices (7500)",
    inFile: true,
  },
  {
    flag: 'rpc-port',
    kind: 'value',
    value: 'port',
    group: PORTS,
    about: "baton's RPC port, 0 or off as with serve (50051)",
    inFile: true,
  },
  {
    flag: 'admin-port',
    kind: 'value',
    value: 'port',
    group: PORTS,
    about: "baton's admin port, 0 or off as with serve (29000)",
    inFile: true,
  },

  { flag: 'dry-run', kind: 'switch', group: RUN, about: 'print every command, variable and file, start nothing' },
  { flag: 'log-dir', kind: 'value', value: 'dir', group: RUN, about: 'folder of prefiller1.log ... proxy.log (.)' },
  {
    flag: 'ready-timeout',
    kind: 'value',
    value: 'time',
    group: RUN,
    about: 'how long an engine may take to load (20m)',
    inFile: true,
  },
  {
    flag: 'stop-timeout',
    kind: 'value',
    value: 'time',
    group: RUN,
    about: 'how long each process may take to stop, then it is killed (15s)',
    inFile: true,
  },

  { flag: 'bench', kind: 'switch', group: BENCH, about: 'run baton bench serve when all is up, then stop' },
  { flag: 'bench-prompts', kind: 'value', value: 'n', group: BENCH, about: 'how many (30)' },
  { flag: 'bench-input-len', kind: 'value', value: 'n', group: BENCH, about: 'tokens per prompt, about (7500)' },
  { flag: 'bench-output-len', kind: 'value', value: 'n', group: BENCH, about: 'tokens per answer (200)' },
  { flag: 'bench-rate', kind: 'value', value: 'n', group: BENCH, about: 'requests a second, 0: all at once (1)' },
];
