import { create, type MessageInitShape } from '@bufbuild/protobuf';
import { durationFromMs } from '@bufbuild/protobuf/wkt';
import {
  MissReason,
  type PutEntryRequest,
  PutEntryRequestSchema,
  type TakeEntryRequest,
  TakeEntryRequestSchema,
} from '../../gen/baton/v1/kv_cache_store_pb.ts';
import type { KvTransferParams } from '../../gen/baton/v1/kv_transfer_pb.ts';
import { buildChain } from '../../src/core/chain.ts';
import { decodeKvTransferParams } from '../../src/core/kv-transfer.ts';
import { batonErrorFrom } from '../../src/rpc/errors.ts';
import { sha256 } from '../../src/services/sha256.ts';
import { ids } from './kv-store.ts';

/** What the chains of the messages below begin with. */
export const SEED = { model: 'm', adapter: '', cacheSalt: '' };
/** A handle of so many tokens in blocks of 16 as an engine writes it, with what is easily lost. */
export const handleJson = (tokens = 200): string =>
  `{"do_remote_prefill":false,"do_remote_decode":true,"remote_block_ids":[[${ids(Math.ceil(tokens / 16), 11)}]],` +
  '"remote_engine_id":"e_dp0","remote_request_id":"chatcmpl-1","remote_host":"10.0.0.2","remote_port":5601,' +
  `"tp_size":1,"remote_num_tokens":${tokens},` +
  '"remote_blocks_expiry_time":1519.551656931,"unknown":{"a":9007199254740993}}';

export type PutParts = Exclude<MessageInitShape<typeof PutEntryRequestSchema>, PutEntryRequest>;
export type TakeParts = Exclude<MessageInitShape<typeof TakeEntryRequestSchema>, TakeEntryRequest>;

const mark = Math.random().toString(36).slice(2, 10);
let names = 0;

/** A name that neither this process nor another one used before. */
export function uniqueName(what: string): string {
  return `${what}-${mark}-${++names}`;
}

/** Names a call. */
export const callKey = (): string => uniqueName('call');

export function handle(tokens?: number): KvTransferParams {
  const params = decodeKvTransferParams(Buffer.from(handleJson(tokens)));
  if (params === undefined) throw new Error('not a handle');
  return params;
}

/** A key and an instance that no other test uses, so that one store can serve them all. */
export function ownNames() {
  const key = { tenant: '', ...SEED, conversationId: uniqueName('c') };
  return { key, instanceId: uniqueName('d') };
}

/** Puts `tokens`, for 450 s unless the parts say otherwise. */
export function putRequest(names: ReturnType<typeof ownNames>, rest: PutParts = {}, tokens = ids(200)) {
  return create(PutEntryRequestSchema, {
    idempotencyKey: callKey(),
    key: names.key,
    owner: {
      instanceId: names.instanceId,
      engineId: 'e_dp0',
      incarnation: { engineId: 'e', generation: 1, processStartSeconds: 5 },
    },
    connector: 'nixl',
    handle: handle(rest.storedTokens || tokens.length),
    storedTokens: tokens.length,
    chain: buildChain(tokens, SEED, sha256),
    engineBlockSize: 16,
    remainingTtl: durationFromMs(450_000),
    ...rest,
  });
}

/** A take for `prompt`. */
export function takeRequest(names: ReturnType<typeof ownNames>, rest: TakeParts = {}, prompt = ids(300)) {
  return create(TakeEntryRequestSchema, {
    idempotencyKey: callKey(),
    key: names.key,
    prompt: { case: 'tokenIds', value: { tokenIds: prompt } },
    ...rest,
  });
}

/** Reason and metadata of what a call is refused with; what it answered if it is not. */
export async function refusal(promise: Promise<unknown>): Promise<unknown> {
  try {
    return await promise;
  } catch (thrown) {
    const error = batonErrorFrom(thrown, 'INTERNAL');
    return { reason: error.reason, ...error.metadata };
  }
}

/** Name of a reason, as the contract has it without its prefix. */
export function reasonName(reason: MissReason): string | undefined {
  return Object.entries(MissReason).find(([, value]) => value === reason)?.[0];
}
