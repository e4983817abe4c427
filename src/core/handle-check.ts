import type { KvTransferParams } from '../../gen/baton/v1/kv_transfer_pb.ts';
import {
  blockIds,
  hasDuplicateKeys,
  hasValidMembers,
  memberText,
  numTokens,
  remotePort,
  stringMember,
} from './kv-transfer.ts';

/** Whether a handle may go to an engine, with its size, or the first thing that is wrong with it. */
export type HandleCheck =
  | { readonly ok: true; readonly numTokens: number | undefined; readonly blocks: number }
  | { readonly ok: false; readonly reason: HandleDefect };

/** What can be wrong with a handle, as words for metrics and logs. */
export type HandleDefect =
  | 'bad_member'
  | 'duplicate_key'
  | 'wrong_flags'
  | 'no_block_ids'
  | 'flat_block_ids'
  | 'bad_block_ids'
  | 'kv_group_count'
  | 'empty_block_ids'
  | 'bad_engine_id'
  | 'bad_request_id'
  | 'bad_host'
  | 'bad_port'
  | 'not_pull'
  | 'bad_tp_size'
  | 'dcp_not_1'
  | 'pp_not_1'
  | 'bad_num_tokens'
  | 'bad_expiry_time'
  | 'bad_generation'
  | 'bad_cached_tokens'
  | 'bad_prompt_token_ids'
  | 'block_count_mismatch';

/** What the leg needs: its flag, and the owner's block size in tokens (unset or 0: unknown). */
export interface HandleWant {
  readonly flag: 'do_remote_prefill' | 'do_remote_decode';
  readonly blockSize?: number;
}

/**
 * Checks a NIXL handle before a leg carries it: an engine that is sent a malformed one dies, or hangs and leaks its
 * blocks. A handle whose token count is 0 already (a release) does not pass; the count is set after the check.
 */
export function checkHandle(m: KvTransferParams, want: HandleWant): HandleCheck {
  const defect = findDefect(m, want);
  if (defect !== undefined) return { ok: false, reason: defect };
  const blocks = blockIds(m)?.[0]?.length ?? 0;
  const tokens = numTokens(m);
  const blockSize = want.blockSize ?? 0;
  if (tokens !== undefined && blockSize > 0 && blocks !== Math.ceil(tokens / blockSize)) {
    return { ok: false, reason: 'block_count_mismatch' };
  }
  return { ok: true, numTokens: tokens, blocks };
}

function findDefect(m: KvTransferParams, want: HandleWant): HandleDefect | undefined {
  if (!hasValidMembers(m)) return 'bad_member';
  if (hasDuplicateKeys(m)) return 'duplicate_key';
  const other = want.flag === 'do_remote_prefill' ? 'do_remote_decode' : 'do_remote_prefill';
  if (memberText(m, want.flag) !== 'true' || !isOneOf(memberText(m, other), undefined, 'false')) return 'wrong_flags';
  return findBlockDefect(m) ?? findOwnerDefect(m) ?? findNumberDefect(m);
}

function findBlockDefect(m: KvTransferParams): HandleDefect | undefined {
  if (m.remoteBlockIds === undefined) {
    return isOneOf(memberText(m, 'remote_block_ids'), undefined, 'null') ? 'no_block_ids' : 'bad_block_ids';
  }
  const groups = blockIds(m);
  if (groups === undefined) return 'flat_block_ids';
  if (groups.length !== 1) return groups.length === 0 ? 'empty_block_ids' : 'kv_group_count';
  return groups[0]?.length === 0 ? 'empty_block_ids' : undefined;
}

function findOwnerDefect(m: KvTransferParams): HandleDefect | undefined {
  if (!stringMember(m, 'remote_engine_id')) return 'bad_engine_id';
  if (!stringMember(m, 'remote_request_id')) return 'bad_request_id';
  if (!stringMember(m, 'remote_host')) return 'bad_host';
  if (remotePort(m) === undefined) return 'bad_port';
  if (memberText(m, 'transfer_mode') !== undefined && stringMember(m, 'transfer_mode') !== 'pull') return 'not_pull';
  return undefined;
}

function findNumberDefect(m: KvTransferParams): HandleDefect | undefined {
  if (!isOneOf(memberText(m, 'tp_size'), undefined, 'null') && !(Number(m.tpSize) >= 1)) return 'bad_tp_size';
  if (!isOneOf(memberText(m, 'dcp_size'), undefined, '1')) return 'dcp_not_1';
  if (!isOneOf(memberText(m, 'pp_size'), undefined, '1')) return 'pp_not_1';
  if (memberText(m, 'remote_num_tokens') !== undefined && !(Number(m.remoteNumTokens) >= 1)) return 'bad_num_tokens';
  const expiry = memberText(m, 'remote_blocks_expiry_time');
  if (expiry !== undefined && expiry !== 'null' && !/^-?[0-9]/.test(expiry)) return 'bad_expiry_time';
  if (!isCount(memberText(m, 'remote_registration_generation'))) return 'bad_generation';
  if (!isCount(memberText(m, 'remote_prefill_cached_tokens'))) return 'bad_cached_tokens';
  const prompt = m.promptTokenIds === undefined ? memberText(m, 'prompt_token_ids') : m.promptTokenIds.ids;
  if (typeof prompt === 'string' || prompt?.length === 0) return 'bad_prompt_token_ids';
  return undefined;
}

function isOneOf(text: string | undefined, ...allowed: readonly (string | undefined)[]): boolean {
  return allowed.includes(text);
}

/** Absent, null or a non-negative integer in plain digits. */
function isCount(text: string | undefined): boolean {
  return text === undefined || text === 'null' || /^(?:0|[1-9][0-9]*)$/.test(text);
}
