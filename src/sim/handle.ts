import type { JsonObject } from './json.ts';

/** What a handle is made of; `cachedTokens` is written only by a producer that stopped at its first token. */
export interface HandleParts {
  readonly prepares: boolean;
  readonly blocks: readonly number[];
  readonly engineId: string;
  readonly requestId: string;
  readonly host: string;
  readonly port: number;
  readonly tokens: number;
  readonly expirySeconds: number;
  readonly hasGeneration: boolean;
  readonly cachedTokens: number | undefined;
}

/** Python prints a float with a fraction part always; a JSON number that is whole would read as an integer. */
function toFloat(seconds: number): number {
  const rounded = Math.round(seconds * 1e6) / 1e6;
  return Number.isInteger(rounded) ? rounded + 0.000_001 : rounded;
}

/** The `kv_transfer_params` of a reply, in the engine's key order. */
export function buildHandle(parts: HandleParts): JsonObject {
  return {
    do_remote_prefill: parts.prepares,
    do_remote_decode: !parts.prepares,
    remote_block_ids: [parts.blocks],
    remote_engine_id: parts.engineId,
    remote_request_id: parts.requestId,
    remote_host: parts.host,
    remote_port: parts.port,
    tp_size: 1,
    dcp_size: 1,
    pp_size: 1,
    remote_num_tokens: parts.tokens,
    remote_blocks_expiry_time: parts.prepares ? null : toFloat(parts.expirySeconds),
    ...(parts.hasGeneration ? { remote_registration_generation: 1 } : {}),
    transfer_mode: 'pull',
    ...(parts.prepares && parts.cachedTokens !== undefined ? { remote_prefill_cached_tokens: parts.cachedTokens } : {}),
  };
}
