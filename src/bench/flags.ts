/** One flag of `baton bench`. */
export interface BenchFlag {
  /** Name without dashes. */
  readonly flag: string;
  /** One letter, without its dash. */
  readonly short?: string;
  readonly kind: 'switch' | 'value' | 'list';
  /** Word for the value in the help. */
  readonly value?: string;
  readonly group: string;
  readonly about: string;
}

/** Values of a command line by flag name, not yet checked; a switch is the text `true`. */
export type BenchFlagValues = Readonly<Record<string, string | readonly string[]>>;

const WHERE = 'Where requests go:';
const WHAT = 'What is sent:';
const HOW = 'How it is sent:';
const RESULT = 'What is told:';

/** Flags of `baton bench serve`, named as those of `vllm bench serve`, in the order of the help. */
export const SERVE_FLAGS: readonly BenchFlag[] = [
  {
    flag: 'base-url',
    kind: 'value',
    value: 'url',
    group: WHERE,
    about: 'URL of the endpoint, instead of host and port',
  },
  { flag: 'host', kind: 'value', value: 'addr', group: WHERE, about: 'its address (127.0.0.1)' },
  { flag: 'port', kind: 'value', value: 'port', group: WHERE, about: 'its port (8000)' },
  {
    flag: 'endpoint',
    kind: 'value',
    value: 'path',
    group: WHERE,
    about: '/v1/completions or /v1/chat/completions (/v1/completions)',
  },
  { flag: 'model', kind: 'value', value: 'name', group: WHERE, about: 'model (the first that the endpoint serves)' },
  {
    flag: 'header',
    kind: 'list',
    value: 'name=value',
    group: WHERE,
    about: 'header of each request (repeatable); OPENAI_API_KEY gives the authorization',
  },

  {
    flag: 'dataset-name',
    kind: 'value',
    value: 'name',
    group: WHAT,
    about: 'random: made-up words; sharegpt: a JSON file of the ShareGPT form; custom: a prompt a line (random)',
  },
  { flag: 'dataset-path', kind: 'value', value: 'file', group: WHAT, about: 'file of sharegpt or custom' },
  { flag: 'num-prompts', kind: 'value', value: 'n', group: WHAT, about: 'how many requests (1000)' },
  {
    flag: 'random-input-len',
    kind: 'value',
    value: 'n',
    group: WHAT,
    about: 'tokens of a random prompt, about (1024)',
  },
  { flag: 'random-output-len', kind: 'value', value: 'n', group: WHAT, about: 'tokens of its answer (128)' },
  {
    flag: 'random-range-ratio',
    kind: 'value',
    value: 'ratio',
    group: WHAT,
    about: 'how far both lengths differ: from (1 - ratio) to (1 + ratio) times them (0)',
  },
  {
    flag: 'random-prefix-len',
    kind: 'value',
    value: 'n',
    group: WHAT,
    about: 'tokens before it that all random prompts share, about (0)',
  },
  {
    flag: 'sharegpt-output-len',
    kind: 'value',
    value: 'n',
    group: WHAT,
    about: 'tokens of an answer (as long as that in the file, about)',
  },
  {
    flag: 'custom-output-len',
    kind: 'value',
    value: 'n',
    group: WHAT,
    about: 'tokens of an answer whose line does not say it (256)',
  },
  { flag: 'ignore-eos', kind: 'switch', group: WHAT, about: 'answers have their full length; random ones always have' },
  { flag: 'temperature', kind: 'value', value: 'n', group: WHAT, about: 'sampling temperature (0)' },
  { flag: 'seed', kind: 'value', value: 'n', group: WHAT, about: 'seed of prompts and times of sending (0)' },

  {
    flag: 'request-rate',
    kind: 'value',
    value: 'n',
    group: HOW,
    about: 'requests a second, however long the answers take; inf: all at once (inf)',
  },
  {
    flag: 'burstiness',
    kind: 'value',
    value: 'n',
    group: HOW,
    about: 'shape of the gamma distribution of the times between: 1 is Poisson, inf is even (1)',
  },
  { flag: 'max-concurrency', kind: 'value', value: 'n', group: HOW, about: 'requests that run at a time at most' },
  {
    flag: 'num-warmups',
    kind: 'value',
    value: 'n',
    group: HOW,
    about: 'requests before those that are measured (0)',
  },
  { flag: 'request-timeout-sec', kind: 'value', value: 'n', group: HOW, about: 'the longest answer (21600)' },

  {
    flag: 'percentile-metrics',
    kind: 'value',
    value: 'list',
    group: RESULT,
    about: 'which of ttft, tpot, itl and e2el the report has (ttft,tpot,itl)',
  },
  { flag: 'metric-percentiles', kind: 'value', value: 'list', group: RESULT, about: 'which percentiles (99)' },
  { flag: 'save-result', kind: 'switch', group: RESULT, about: 'write the figures to a JSON file' },
  { flag: 'save-detailed', kind: 'switch', group: RESULT, about: 'with the times and texts of each request' },
  { flag: 'result-dir', kind: 'value', value: 'dir', group: RESULT, about: 'folder of that file (.)' },
  { flag: 'result-filename', kind: 'value', value: 'file', group: RESULT, about: 'its name (by rate, model and time)' },
  { flag: 'label', kind: 'value', value: 'name', group: RESULT, about: 'label of the run in it (openai)' },
];

/** Flags of `baton bench multi-turn`, named as those of vLLM's client, in the order of the help. */
export const MULTI_TURN_FLAGS: readonly BenchFlag[] = [
  { flag: 'url', short: 'u', kind: 'value', value: 'url', group: WHERE, about: 'the endpoint (http://localhost:8000)' },
  {
    flag: 'model',
    short: 'm',
    kind: 'value',
    value: 'name',
    group: WHERE,
    about: 'model (the first that the endpoint serves)',
  },
  { flag: 'served-model-name', kind: 'value', value: 'name', group: WHERE, about: 'the same, and goes before it' },
  { flag: 'api-key', kind: 'value', value: 'key', group: WHERE, about: 'its key (OPENAI_API_KEY)' },
  { flag: 'header', kind: 'list', value: 'name=value', group: WHERE, about: 'header of each request (repeatable)' },

  {
    flag: 'input-file',
    short: 'i',
    kind: 'value',
    value: 'file',
    group: WHAT,
    about: 'JSON file with conversations, or how to make some up',
  },
  {
    flag: 'limit-max-tokens',
    kind: 'value',
    value: 'n',
    group: WHAT,
    about: 'tokens of an answer, 0: as in the file (0)',
  },
  { flag: 'limit-min-tokens', kind: 'value', value: 'n', group: WHAT, about: 'goes with it; is not sent (0)' },
  {
    flag: 'max-turns',
    kind: 'value',
    value: 'n',
    group: WHAT,
    about: 'messages of a conversation at most, answers included',
  },
  { flag: 'seed', kind: 'value', value: 'n', group: WHAT, about: 'seed of what is drawn (0)' },
  {
    flag: 'send-conversation-id',
    kind: 'switch',
    group: WHAT,
    about: 'names each conversation in the body and as x-session-id; a name is of one run alone',
  },

  {
    flag: 'num-clients',
    short: 'p',
    kind: 'value',
    value: 'n',
    group: HOW,
    about: 'clients, each with one request at a time (1)',
  },
  {
    flag: 'max-active-conversations',
    short: 'k',
    kind: 'value',
    value: 'n',
    group: HOW,
    about: 'conversations that all clients hold at a time (as many as clients)',
  },
  {
    flag: 'max-num-requests',
    short: 'n',
    kind: 'value',
    value: 'n',
    group: HOW,
    about: 'requests of all clients at most',
  },
  {
    flag: 'request-rate',
    kind: 'value',
    value: 'n',
    group: HOW,
    about: 'requests a second of each client, 0: no pause (0)',
  },
  {
    flag: 'conversation-sampling',
    kind: 'value',
    value: 'kind',
    group: HOW,
    about: 'round_robin or random (round_robin)',
  },
  { flag: 'warmup-step', kind: 'switch', group: HOW, about: 'the first turn of each conversation is not measured' },
  { flag: 'no-early-stop', kind: 'switch', group: HOW, about: 'goes on when the first client has no more work' },
  {
    flag: 'max-retries',
    kind: 'value',
    value: 'n',
    group: HOW,
    about: 'repeats of a request that failed (MULTITURN_BENCH_MAX_RETRIES, 0)',
  },
  { flag: 'request-timeout-sec', kind: 'value', value: 'n', group: HOW, about: 'the longest answer (120)' },
  { flag: 'verify-output', kind: 'switch', group: HOW, about: 'an answer that is not that of the file has failed' },

  {
    flag: 'output-file',
    short: 'o',
    kind: 'value',
    value: 'file',
    group: RESULT,
    about: 'JSON file for the conversations held',
  },
  {
    flag: 'stats-json-output',
    kind: 'value',
    value: 'file',
    group: RESULT,
    about: 'JSON file for the figures of each request',
  },
  {
    flag: 'warmup-percentages',
    kind: 'value',
    value: 'list',
    group: RESULT,
    about: 'parts of the requests that are left out at the start, a table for each (0%)',
  },
];
