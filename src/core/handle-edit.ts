import { clone, create } from '@bufbuild/protobuf';
import {
  KvBlockGroupSchema,
  KvBlockIdsSchema,
  type KvTransferParams,
  KvTransferParamsSchema,
} from '../../gen/baton/v1/kv_transfer_pb.ts';
import { scanObject, spliceObject } from './json-scan.ts';
import { blockIds, numTokens } from './kv-transfer.ts';
import { tokenIdsJson } from './token-ids.ts';

/**
 * A decode engine's handle cut to its first `tokens` tokens: count and block list together. P reads the last blocks of
 * the list, so that cutting the count alone makes it read the wrong ones (seen on vLLM 0.32 and 0.33).
 *
 * @returns undefined where the handle cannot be cut: several KV groups, an unknown or smaller count, too few blocks.
 */
export function cutHandle(handle: KvTransferParams, tokens: number, blockSize: number): KvTransferParams | undefined {
  const stored = numTokens(handle);
  const groups = blockIds(handle);
  const [ids] = groups ?? [];
  if (stored === undefined || tokens > stored || tokens < 1 || blockSize < 1) return undefined;
  if (groups?.length !== 1 || ids === undefined) return undefined;
  const blocks = Math.ceil(tokens / blockSize);
  if (ids.length < blocks) return undefined;
  const cut = clone(KvTransferParamsSchema, handle);
  cut.remoteNumTokens = tokens;
  cut.remoteBlockIds = create(KvBlockIdsSchema, {
    groups: [create(KvBlockGroupSchema, { ids: ids.slice(0, blocks) })],
  });
  return cut;
}

/**
 * A decode engine's handle as a release: P pulls nothing and tells D to free the blocks. Every other member stays.
 *
 * @returns undefined where the count is not known as a number.
 */
export function releaseHandle(handle: KvTransferParams): KvTransferParams | undefined {
  if (numTokens(handle) === undefined) return undefined;
  const release = clone(KvTransferParamsSchema, handle);
  release.remoteNumTokens = 0;
  return release;
}

/** The JSON of a handle with the prompt's token ids, which the engine then uses instead of rendering the messages. */
export function withPromptTokenIds(handle: Uint8Array, tokenIds: readonly number[]): Uint8Array {
  const scan = scanObject(handle);
  if (scan.kind !== 'object') throw new TypeError('a handle is a JSON object');
  return spliceObject(handle, scan, {
    set: new Map([['prompt_token_ids', tokenIdsJson(tokenIds)]]),
    drop: new Set(),
  });
}
