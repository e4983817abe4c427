import { isInteger, isObject, isTruthy, type JsonObject } from './json.ts';

/** Where and what to read from a peer. */
export interface PullTarget {
  readonly host: string;
  readonly port: number;
  readonly engineId: string;
  readonly requestId: string;
  /** The whole list of the handle. */
  readonly blockIds: readonly number[];
  /** The peer's clock, seconds; null when the handle has none. */
  readonly expiry: number | null;
}

/**
 * What a NIXL engine does with the parameters of a request when it is scheduled. `crash` ends the engine, `silent` without
 * an answer to the request; `hang` leaves it unanswered and its blocks unfreed.
 */
export type KvLoad =
  | { readonly kind: 'none' }
  | { readonly kind: 'notify'; readonly target: PullTarget }
  | {
      readonly kind: 'pull';
      readonly target: PullTarget;
      /** Tokens beyond the local hit, and how many local blocks they fill. */
      readonly tokens: number;
      readonly blocks: number;
      readonly side: 'prefill' | 'decode';
    }
  | { readonly kind: 'hang'; readonly reason: string }
  | { readonly kind: 'crash'; readonly reason: string; readonly silent: boolean };

/** What the scheduler knows when it looks at the parameters. */
export interface LoadContext {
  readonly promptTokens: number;
  readonly localHit: number;
  readonly blockSize: number;
  readonly bidirectional: boolean;
  readonly threshold: number;
}

/** Which leg a request is, by its flags. */
export type Leg = 'prefill' | 'decode' | 'plain';

/** The leg that parameters stand for. */
export function legOf(params: unknown): Leg {
  if (!isObject(params)) return 'plain';
  if (isTruthy(params['do_remote_prefill'])) return 'decode';
  if ('disagg_spec' in params) return 'prefill';
  return isTruthy(params['do_remote_decode']) ? 'prefill' : 'plain';
}

const coordinateKeys = ['remote_engine_id', 'remote_request_id', 'remote_host', 'remote_port'] as const;

/** Reads the peer's address and ids from a handle; undefined if one has a wrong type. */
export function readTarget(params: JsonObject): PullTarget | undefined {
  const groups = params['remote_block_ids'];
  const ids: unknown = Array.isArray(groups) && groups.length === 1 ? groups[0] : undefined;
  const host = params['remote_host'];
  const port = Number(params['remote_port']);
  const engineId = params['remote_engine_id'];
  const requestId = params['remote_request_id'];
  if (!Array.isArray(ids) || !ids.every(isInteger)) return undefined;
  if (typeof host !== 'string' || typeof engineId !== 'string' || typeof requestId !== 'string') return undefined;
  if (params['remote_port'] === null || !Number.isInteger(port) || port < 1 || port > 65_535) return undefined;
  const expiry = params['remote_blocks_expiry_time'];
  return { host, port, engineId, requestId, blockIds: ids, expiry: typeof expiry === 'number' ? expiry : null };
}

function blocksFor(context: LoadContext, tokens: number): number {
  const { blockSize, localHit } = context;
  return Math.ceil((localHit + tokens) / blockSize) - Math.floor(localHit / blockSize);
}

function planDecodeLoad(params: JsonObject, context: LoadContext): KvLoad {
  if (!isTruthy(params['remote_block_ids'])) {
    return { kind: 'crash', reason: 'remote_block_ids is missing', silent: false };
  }
  const missing = coordinateKeys.filter((key) => !(key in params));
  if (missing.length === 1 && missing[0] === 'remote_request_id') {
    return { kind: 'crash', reason: 'KeyError remote_request_id', silent: true };
  }
  if (missing.length > 0) return { kind: 'hang', reason: `invalid kv_transfer_params: no ${missing.join(', ')}` };
  const target = readTarget(params);
  if (target === undefined) return { kind: 'crash', reason: 'malformed handle', silent: false };
  const tokens = context.promptTokens - context.localHit;
  if (tokens <= 0) return { kind: 'notify', target };
  const blocks = blocksFor(context, tokens);
  if (blocks > target.blockIds.length) {
    return { kind: 'crash', reason: 'fewer remote blocks than the prompt needs', silent: false };
  }
  return { kind: 'pull', target, tokens, blocks, side: 'decode' };
}

function planPrefillLoad(params: JsonObject, context: LoadContext): KvLoad {
  if (!isTruthy(params['remote_block_ids']) || coordinateKeys.some((key) => !(key in params))) return { kind: 'none' };
  const count = params['remote_num_tokens'] ?? 0;
  if (typeof count !== 'number') return { kind: 'crash', reason: 'TypeError remote_num_tokens', silent: false };
  const want = Math.min(count, context.promptTokens) - context.localHit;
  const wanted = want > 0 && want >= context.threshold;
  const target = readTarget(params);
  if (!context.bidirectional) {
    return wanted ? { kind: 'hang', reason: 'bidirectional transfer is off' } : { kind: 'none' };
  }
  if (target === undefined) {
    return wanted ? { kind: 'hang', reason: 'malformed handle' } : { kind: 'none' };
  }
  if (!wanted) return { kind: 'notify', target };
  const blocks = blocksFor(context, want);
  if (blocks > target.blockIds.length) {
    return { kind: 'crash', reason: 'fewer remote blocks than tokens to pull', silent: false };
  }
  return { kind: 'pull', target, tokens: want, blocks, side: 'prefill' };
}

/** Decides what the parameters make the engine do, from the flags first, as the NIXL pull scheduler does. */
export function planLoad(params: JsonObject, context: LoadContext): KvLoad {
  if (isTruthy(params['do_remote_prefill'])) return planDecodeLoad(params, context);
  if (isTruthy(params['do_remote_decode'])) return planPrefillLoad(params, context);
  return { kind: 'none' };
}
