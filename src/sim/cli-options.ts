import type { SimModel, SimOptions } from './options.ts';

/** One command line option of a simulated engine, as plain data. */
export interface SimFlag {
  /** Name without dashes. */
  readonly flag: string;
  readonly kind: 'text' | 'number' | 'switch' | 'list';
  /** Word for the value in the help. */
  readonly value: string;
  readonly description: string;
  /** Shown in the help; undefined = none. */
  readonly default: string | undefined;
  readonly choices?: readonly string[];
}

/** The options of `baton sim`. */
export const simFlags: readonly SimFlag[] = [
  {
    flag: 'role',
    kind: 'text',
    value: 'role',
    description: 'what the engine is for',
    default: 'both',
    choices: ['prefill', 'decode', 'both'],
  },
  { flag: 'host', kind: 'text', value: 'host', description: 'HTTP address', default: '127.0.0.1' },
  { flag: 'port', kind: 'number', value: 'port', description: 'HTTP port, 0 = any', default: '8000' },
  { flag: 'side-host', kind: 'text', value: 'host', description: 'side channel address', default: '127.0.0.1' },
  { flag: 'side-port', kind: 'number', value: 'port', description: 'side channel port, 0 = any', default: '0' },
  {
    flag: 'advertise-host',
    kind: 'text',
    value: 'host',
    description: 'side channel host written into handles',
    default: undefined,
  },
  {
    flag: 'model',
    kind: 'list',
    value: 'id[=root[@parent]]',
    description: 'served model, repeatable',
    default: 'sim-model',
  },
  {
    flag: 'engine-version',
    kind: 'text',
    value: 'version',
    description: 'vLLM version whose wire is spoken',
    default: '0.33.0',
  },
  { flag: 'engine-id', kind: 'text', value: 'id', description: 'engine id of the first start', default: undefined },
  {
    flag: 'connector',
    kind: 'text',
    value: 'name',
    description: 'KV connector',
    default: 'nixl',
    choices: ['nixl', 'lmcache', 'none'],
  },
  {
    flag: 'notices',
    kind: 'text',
    value: 'tcp://host:port',
    description: 'where an LMCache prefill engine sends its notices',
    default: undefined,
  },
  { flag: 'ranks', kind: 'number', value: 'n', description: 'LMCache tensor-parallel ranks', default: '1' },
  {
    flag: 'init-port',
    kind: 'text',
    value: 'port,...',
    description: 'LMCache handshake ports of a decode engine, one a rank',
    default: undefined,
  },
  {
    flag: 'alloc-port',
    kind: 'text',
    value: 'port,...',
    description: 'LMCache allocation ports, one a rank',
    default: undefined,
  },
  { flag: 'block-size', kind: 'number', value: 'tokens', description: 'tokens per KV block', default: '16' },
  { flag: 'num-blocks', kind: 'number', value: 'n', description: 'KV blocks', default: '16384' },
  { flag: 'max-model-len', kind: 'number', value: 'tokens', description: 'context window', default: '8192' },
  { flag: 'max-num-seqs', kind: 'number', value: 'n', description: 'requests that run at once', default: '256' },
  {
    flag: 'kv-lease',
    kind: 'number',
    value: 'seconds',
    description: 'how long a prefill engine keeps blocks for a reader',
    default: '30',
  },
  {
    flag: 'decoder-ttl',
    kind: 'number',
    value: 'seconds',
    description: 'how long a decode engine keeps blocks for the next turn',
    default: '480',
  },
  {
    flag: 'prefix-caching',
    kind: 'text',
    value: 'mode',
    description: 'what one request computed is found by the next',
    default: 'on',
    choices: ['on', 'off'],
  },
  {
    flag: 'bidirectional',
    kind: 'switch',
    value: '',
    description: 'hand KV back from decode to prefill',
    default: undefined,
  },
  {
    flag: 'recompute-threshold',
    kind: 'number',
    value: 'tokens',
    description: 'least tokens that a prefill engine pulls',
    default: '64',
  },
  {
    flag: 'policy',
    kind: 'text',
    value: 'policy',
    description: 'when KV cannot be loaded',
    default: 'fail',
    choices: ['fail', 'recompute'],
  },
  {
    flag: 'tokenizer',
    kind: 'text',
    value: 'kind',
    description: 'pairs: encoding an answer again gives other tokens',
    default: 'bytes',
    choices: ['bytes', 'pairs'],
  },
  {
    flag: 'max-tokens',
    kind: 'number',
    value: 'tokens',
    description: 'length of chat answers without a limit',
    default: '64',
  },
  {
    flag: 'eos-every',
    kind: 'number',
    value: 'tokens',
    description: 'mean tokens between ends of sequence, 0 = none',
    default: '48',
  },
  { flag: 'fixed-ms', kind: 'number', value: 'ms', description: 'time per request', default: '0' },
  {
    flag: 'prefill-ms-per-token',
    kind: 'number',
    value: 'ms',
    description: 'time per computed prompt token',
    default: '0',
  },
  { flag: 'decode-ms-per-token', kind: 'number', value: 'ms', description: 'time per generated token', default: '0' },
  {
    flag: 'pull-ms-per-block',
    kind: 'number',
    value: 'ms',
    description: 'time per block read from a peer',
    default: '0',
  },
  {
    flag: 'tokens-per-event',
    kind: 'number',
    value: 'n',
    description: 'tokens in one event of a stream',
    default: '1',
  },
  { flag: 'api-key', kind: 'text', value: 'key', description: 'key that clients must send', default: undefined },
  { flag: 'seed', kind: 'number', value: 'n', description: 'seed of fault draws', default: undefined },
];

/** Values as a parser hands them out: by flag name without dashes. */
export type SimFlagValues = Readonly<Record<string, unknown>>;

function readModel(text: string): SimModel {
  const [id = '', rest] = text.split('=', 2);
  if (rest === undefined) return { id };
  const [root = '', parent] = rest.split('@', 2);
  return parent === undefined ? { id, root } : { id, root, parent };
}

/** Options of `startSim` from flag values; throws an Error whose message names the flag of a bad value. */
export function readSimOptions(values: SimFlagValues): SimOptions {
  const text = (flag: string): string | undefined => {
    const value = values[flag] ?? simFlags.find((known) => known.flag === flag)?.default;
    return value === undefined ? undefined : String(value);
  };
  const number = (flag: string, scale = 1): number | undefined => {
    const value = text(flag);
    if (value === undefined) return undefined;
    const parsed = Number(value);
    if (value.trim() === '' || !Number.isFinite(parsed) || parsed < 0) throw new Error(`--${flag} must be a number`);
    return parsed * scale;
  };
  const choice = <T extends string>(flag: string, allowed: readonly T[]): T => {
    const found = allowed.find((word) => word === text(flag));
    if (found === undefined) throw new Error(`--${flag} must be one of ${allowed.join(', ')}`);
    return found;
  };
  const ports = (flag: string): readonly number[] | undefined => {
    const list = text(flag)?.split(',').map(Number);
    if (list?.every((port) => Number.isInteger(port) && port >= 0 && port < 65_536) === false) {
      throw new Error(`--${flag} must be ports`);
    }
    return list;
  };
  const given = values['model'];
  const models = Array.isArray(given) ? given.map(String) : [text('model') ?? ''];
  const options = {
    role: choice('role', ['prefill', 'decode', 'both']),
    host: text('host'),
    port: number('port'),
    sideHost: text('side-host'),
    sidePort: number('side-port'),
    advertiseHost: text('advertise-host'),
    models: models.map(readModel),
    version: text('engine-version'),
    engineId: text('engine-id'),
    connector: choice('connector', ['nixl', 'lmcache', 'none']),
    noticeEndpoint: text('notices'),
    ranks: number('ranks'),
    initPorts: ports('init-port'),
    allocPorts: ports('alloc-port'),
    blockSize: number('block-size'),
    numBlocks: number('num-blocks'),
    maxModelLen: number('max-model-len'),
    maxNumSeqs: number('max-num-seqs'),
    kvLeaseMs: number('kv-lease', 1000),
    decoderTtlMs: number('decoder-ttl', 1000),
    prefixCaching: choice('prefix-caching', ['on', 'off']) === 'on',
    bidirectional: values['bidirectional'] === true || values['bidirectional'] === 'true',
    recomputeThreshold: number('recompute-threshold'),
    policy: choice('policy', ['fail', 'recompute']),
    tokenizer: choice('tokenizer', ['bytes', 'pairs']),
    defaultMaxTokens: number('max-tokens'),
    eosEvery: number('eos-every'),
    fixedMs: number('fixed-ms'),
    prefillMsPerToken: number('prefill-ms-per-token'),
    decodeMsPerToken: number('decode-ms-per-token'),
    pullMsPerBlock: number('pull-ms-per-block'),
    tokensPerEvent: number('tokens-per-event'),
    apiKey: text('api-key'),
    seed: number('seed'),
  };
  return Object.fromEntries(Object.entries(options).filter(([, value]) => value !== undefined));
}
