import type { TemplateKind } from './chat-template.ts';
import { realClock, type SimClock } from './clock.ts';
import { PauseSwitch } from './pause-switch.ts';
import type { TokenizerKind } from './tokenizer.ts';

/** What the instance is meant for; NIXL itself does not check it against the flags of a request. */
export type SimRole = 'prefill' | 'decode' | 'both';

/** What a receiver does when it cannot load KV. */
export type LoadFailurePolicy = 'fail' | 'recompute';

/** A served model name; equal roots share weights, a parent makes it a LoRA adapter. */
export interface SimModel {
  readonly id: string;
  readonly root?: string;
  readonly parent?: string;
}

/** Options of `startSim`; all have defaults, times are milliseconds. */
export interface SimOptions {
  readonly role?: SimRole;
  /** HTTP address; default 127.0.0.1, port 0 = any free one. */
  readonly host?: string;
  readonly port?: number;
  /** Side channel listener, and the host name written into handles (default: the listener's). */
  readonly sideHost?: string;
  readonly sidePort?: number;
  readonly advertiseHost?: string;
  /** Served names; default `sim-model`. */
  readonly models?: readonly (string | SimModel)[];
  /** `0.33.0` (default) or a 0.32 version: no handle on streams, no registration generation. */
  readonly version?: string;
  /** Fixed engine id for the first start; a restart always draws a new one. */
  readonly engineId?: string;
  /** `none` ignores `kv_transfer_params`, as an engine without a connector does. */
  readonly connector?: 'nixl' | 'lmcache' | 'none';
  /** LMCache: where a prefill engine sends its notices, `tcp://host:port`. */
  readonly noticeEndpoint?: string;
  /** LMCache: tensor-parallel ranks; a decode engine has a port of each kind for each. Default 1. */
  readonly ranks?: number;
  /** LMCache: notices of one prefill; default one a rank. */
  readonly noticeCount?: number;
  /** LMCache: receiver ports of a decode engine; default any free ones. */
  readonly initPorts?: readonly number[];
  readonly allocPorts?: readonly number[];
  /** LMCache: tokens that a decode engine's buffer holds; default unlimited. */
  readonly pdBufferTokens?: number;
  /** LMCache: how long a prefill engine waits for room in that buffer; default 10 s. */
  readonly allocTimeoutMs?: number;
  readonly blockSize?: number;
  readonly numBlocks?: number;
  readonly maxModelLen?: number;
  readonly maxNumSeqs?: number;
  readonly kvLeaseMs?: number;
  readonly decoderTtlMs?: number;
  readonly bidirectional?: boolean;
  /** False: nothing of one request is found by the next, as with vLLM's --no-enable-prefix-caching. */
  readonly prefixCaching?: boolean;
  readonly recomputeThreshold?: number;
  readonly policy?: LoadFailurePolicy;
  /** After an EOS before the length limit the handle also covers the EOS token itself, as with async scheduling. */
  readonly asyncScheduling?: boolean;
  /** The handle of a decode leg also covers the last token and so many drafts behind it, as with speculative decoding. */
  readonly speculativeTokens?: number;
  readonly tokenizer?: TokenizerKind;
  /** Chat template; default `plain`. A restart may bring another. */
  readonly template?: TemplateKind;
  /** The model thinks before it answers, and the template leaves out what it thought in earlier turns. */
  readonly reasoning?: boolean;
  /** Data parallel ranks, each an engine of its own with blocks of its own; default 1. */
  readonly dataParallel?: number;
  /** Adapters can be loaded, replaced and unloaded while the engine runs, as with VLLM_ALLOW_RUNTIME_LORA_UPDATING. */
  readonly runtimeAdapters?: boolean;
  /** Length cap of chat requests without a limit of their own. */
  readonly defaultMaxTokens?: number;
  /** One token in this many is EOS on average; 0 = never. */
  readonly eosEvery?: number;
  /** False: a request with tools and no forced choice is a 400, as without a tool parser. */
  readonly autoToolChoice?: boolean;
  readonly promptTokensDetails?: boolean;
  readonly apiKey?: string;
  readonly fixedMs?: number;
  readonly prefillMsPerToken?: number;
  readonly decodeMsPerToken?: number;
  readonly pullMsPerBlock?: number;
  readonly tokensPerEvent?: number;
  readonly keepAliveMs?: number;
  readonly clock?: SimClock;
  /** Keep every request as received, in `Sim.requests`. */
  readonly recordRequests?: boolean;
  /** Seed of the draws for faults with a probability; default: random. */
  readonly seed?: number;
  /** Called when the process that is simulated has died: its ports are closed then. */
  readonly onExit?: (reason: string) => void;
}

/** A served model name with its weights' root. */
export interface ServedModel {
  readonly id: string;
  readonly root: string;
  readonly parent: string | null;
  /** What its KV follows from; another one after an adapter was replaced. */
  readonly weights: string;
}

/** Options with every default filled in. */
export interface SimConfig {
  readonly role: SimRole;
  readonly host: string;
  readonly port: number;
  readonly sideHost: string;
  readonly sidePort: number;
  readonly advertiseHost: string | undefined;
  readonly models: readonly ServedModel[];
  readonly version: string;
  readonly hasGeneration: boolean;
  readonly engineId: string | undefined;
  readonly connector: 'nixl' | 'lmcache' | 'none';
  readonly noticeEndpoint: string | undefined;
  readonly ranks: number;
  readonly noticeCount: number | undefined;
  readonly initPorts: readonly number[];
  readonly allocPorts: readonly number[];
  readonly pdBufferTokens: number;
  readonly allocTimeoutMs: number;
  readonly blockSize: number;
  readonly numBlocks: number;
  readonly maxModelLen: number;
  readonly maxNumSeqs: number;
  readonly kvLeaseMs: number;
  readonly decoderTtlMs: number;
  readonly bidirectional: boolean;
  readonly prefixCaching: boolean;
  readonly recomputeThreshold: number;
  readonly policy: LoadFailurePolicy;
  readonly asyncScheduling: boolean;
  readonly speculativeTokens: number;
  readonly tokenizer: TokenizerKind;
  readonly template: TemplateKind;
  readonly reasoning: boolean;
  readonly dataParallel: number;
  readonly runtimeAdapters: boolean;
  readonly defaultMaxTokens: number;
  readonly eosEvery: number;
  readonly autoToolChoice: boolean;
  readonly promptTokensDetails: boolean;
  readonly apiKey: string | undefined;
  readonly fixedMs: number;
  readonly prefillMsPerToken: number;
  readonly decodeMsPerToken: number;
  readonly pullMsPerBlock: number;
  readonly tokensPerEvent: number;
  readonly keepAliveMs: number;
  readonly clock: SimClock;
  readonly switch: PauseSwitch;
  readonly recordRequests: boolean;
  readonly seed: number | undefined;
  readonly onExit: ((reason: string) => void) | undefined;
}

function toServedModel(model: string | SimModel): ServedModel {
  if (typeof model === 'string') return { id: model, root: model, parent: null, weights: model };
  const root = model.root ?? model.id;
  return { id: model.id, root, parent: model.parent ?? null, weights: root };
}

/** Fills in defaults; block 0 is never handed out, so the window is cut to what the pool can hold. */
export function resolveOptions(options: SimOptions): SimConfig {
  const blockSize = options.blockSize ?? 16;
  const numBlocks = options.numBlocks ?? 16_384;
  const version = options.version ?? '0.33.0';
  const models = (options.models ?? ['sim-model']).map(toServedModel);
  if (models.length === 0) throw new Error('a simulated engine needs at least one model');
  if (blockSize < 1 || numBlocks < 2) throw new Error('a simulated engine needs at least two blocks of one token');
  const ranks = options.ranks ?? 1;
  const pauses = new PauseSwitch();
  const anyPorts = Array.from({ length: ranks }, () => 0);
  return {
    role: options.role ?? 'both',
    host: options.host ?? '127.0.0.1',
    port: options.port ?? 0,
    sideHost: options.sideHost ?? '127.0.0.1',
    sidePort: options.sidePort ?? 0,
    advertiseHost: options.advertiseHost,
    models,
    version,
    hasGeneration: !version.startsWith('0.32.'),
    engineId: options.engineId,
    connector: options.connector ?? 'nixl',
    noticeEndpoint: options.noticeEndpoint,
    ranks,
    noticeCount: options.noticeCount,
    initPorts: options.initPorts ?? anyPorts,
    allocPorts: options.allocPorts ?? anyPorts,
    pdBufferTokens: options.pdBufferTokens ?? Number.POSITIVE_INFINITY,
    allocTimeoutMs: options.allocTimeoutMs ?? 10_000,
    blockSize,
    numBlocks,
    maxModelLen: Math.min(options.maxModelLen ?? 8192, (numBlocks - 1) * blockSize),
    maxNumSeqs: options.maxNumSeqs ?? 256,
    kvLeaseMs: options.kvLeaseMs ?? 30_000,
    decoderTtlMs: options.decoderTtlMs ?? 480_000,
    bidirectional: options.bidirectional ?? false,
    prefixCaching: options.prefixCaching ?? true,
    recomputeThreshold: options.recomputeThreshold ?? 64,
    policy: options.policy ?? 'fail',
    asyncScheduling: options.asyncScheduling ?? false,
    speculativeTokens: options.speculativeTokens ?? 0,
    tokenizer: options.tokenizer ?? 'bytes',
    template: options.template ?? 'plain',
    reasoning: options.reasoning ?? false,
    dataParallel: options.dataParallel ?? 1,
    runtimeAdapters: options.runtimeAdapters ?? false,
    defaultMaxTokens: options.defaultMaxTokens ?? 64,
    eosEvery: options.eosEvery ?? 48,
    autoToolChoice: options.autoToolChoice ?? true,
    promptTokensDetails: options.promptTokensDetails ?? true,
    apiKey: options.apiKey,
    fixedMs: options.fixedMs ?? 0,
    prefillMsPerToken: options.prefillMsPerToken ?? 0,
    decodeMsPerToken: options.decodeMsPerToken ?? 0,
    pullMsPerBlock: options.pullMsPerBlock ?? 0,
    tokensPerEvent: Math.max(1, options.tokensPerEvent ?? 1),
    keepAliveMs: options.keepAliveMs ?? 5000,
    clock: pauses.over(options.clock ?? realClock),
    switch: pauses,
    recordRequests: options.recordRequests ?? false,
    seed: options.seed,
    onExit: options.onExit,
  };
}
