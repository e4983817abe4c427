import { durationFromMs } from '@bufbuild/protobuf/wkt';
import type { CallOptions } from '@connectrpc/connect';
import { callKey, handle, type PutParts, type TakeParts } from './store-messages.ts';
import type { StoreWorld } from './store-world.ts';

type FaultyCall = readonly [field: string, call: (run: StoreWorld, options?: CallOptions) => Promise<unknown>];

const put = (rest: (run: StoreWorld) => PutParts) => (run: StoreWorld) =>
  run.client.putEntry(run.putRequest(rest(run)));
const take = (rest: (run: StoreWorld) => TakeParts) => (run: StoreWorld) =>
  run.client.takeEntry(run.takeRequest(rest(run)));

/** Calls that are refused with INVALID_ARGUMENT and the name of a field; those without an instance need an operator. */
export const FAULTY_CALLS: readonly FaultyCall[] = [
  ['idempotency_key', put(() => ({ idempotencyKey: '' }))],
  ['idempotency_key', take(() => ({ idempotencyKey: 'é'.repeat(65) }))],
  ['key', (run) => run.client.putEntry({ idempotencyKey: callKey() })],
  ['key.model', put(({ names }) => ({ key: { ...names.key, model: '' } }))],
  ['key.conversation_id', put(({ names }) => ({ key: { ...names.key, conversationId: 'é'.repeat(257) } }))],
  ['key.cache_salt', take(({ names }) => ({ key: { ...names.key, cacheSalt: 'x'.repeat(513) } }))],
  ['key.adapter', take(({ names }) => ({ key: { ...names.key, adapter: 'x'.repeat(4097) } }))],
  ['owner', (run) => run.client.putEntry({ idempotencyKey: callKey(), key: run.names.key })],
  ['owner.incarnation', put(() => ({ owner: { instanceId: 'd', engineId: 'e' } }))],
  ['owner.engine_id', put(() => ({ owner: { instanceId: 'd', engineId: '', incarnation: {} } }))],
  ['handle', put(() => ({ handle: undefined }))],
  ['stored_tokens', put(() => ({ storedTokens: 0 }))],
  ['stored_tokens', put(() => ({ storedTokens: 200, handle: handle(199) }))],
  // Not enough for what is named, by one block.
  ['handle.remote_block_ids', put(() => ({ handle: handle(200), engineBlockSize: 15 }))],
  ['engine_block_size', put(() => ({ engineBlockSize: 0 }))],
  ['connector', put(() => ({ connector: 'Nixl_1' }))],
  ['remaining_ttl', put(() => ({ remainingTtl: durationFromMs(0) }))],
  ['remaining_ttl', put(() => ({ remainingTtl: durationFromMs(86_400_001) }))],
  ['chain.algorithm', put((run) => ({ chain: { ...run.putRequest().chain!, algorithm: 'c0' } }))],
  ['chain.token_count', put((run) => ({ chain: { ...run.putRequest().chain!, tokenCount: 7 } }))],
  ['precondition', put(() => ({ precondition: { condition: { case: undefined } } }))],
  ['claim_deadline', take(() => ({ claimDeadline: durationFromMs(3_600_001) }))],
  ['prompt_chain.chain', take(() => ({ prompt: { case: 'promptChain', value: {} } }))],
  ['precondition.entry_id', take(() => ({ precondition: { entryId: '', revision: 1n } }))],
  ['precondition.revision', take(() => ({ precondition: { entryId: 'e' } }))],
  ['claim_id', (run) => run.client.commitClaim({})],
  ['reason', (run) => run.client.releaseClaim({ claimId: 'c', reason: 'Not sent' })],
  ['selector', (run) => run.client.getEntry({})],
  ['entry_id', (run) => run.client.deleteEntry({ idempotencyKey: callKey() })],
  ['instance_id', (run, options) => run.client.takeForRelease({ idempotencyKey: callKey() }, options)],
  ['instance_id', (run, options) => run.client.invalidateOwner({ idempotencyKey: callKey() }, options)],
];
