import { fromBinary } from '@bufbuild/protobuf';
import { BinaryWriter, WireType } from '@bufbuild/protobuf/wire';
import type { ServiceImpl } from '@connectrpc/connect';
import { afterEach, expect, test } from 'vitest';
import { type KVCacheStore, MissSchema } from '../../gen/baton/v1/kv_cache_store_pb.ts';
import { startRpcListener } from '../../src/rpc/listener.ts';
import { EVERYTHING, KvCacheStoreService } from '../../src/services/kv-cache-store.ts';
import { openMemoryStore } from '../../src/stores/memory.ts';
import { STORE_LIMITS } from '../../src/stores/store.ts';
import { type Harness, post, startHarness } from '../support/harness.ts';
import { metricOf } from './ladder-support.ts';

let stack = new AsyncDisposableStack();
afterEach(async () => {
  await stack.disposeAsync();
  stack = new AsyncDisposableStack();
});

/** baton without a store of its own, beside one of another release; generous with time, for the machine may be slow. */
async function start(
  store: (service: KvCacheStoreService) => Partial<ServiceImpl<typeof KVCacheStore>>,
): Promise<Harness> {
  const kept = stack.use(
    await openMemoryStore({ now: () => performance.now(), limits: STORE_LIMITS, onNotice: () => undefined }),
  );
  const listener = stack.use(
    await startRpcListener({
      host: '127.0.0.1',
      port: 0,
      services: { kvCacheStore: store(new KvCacheStoreService({ store: kept, callerOf: () => EVERYTHING })) },
      callerOf: () => EVERYTHING,
      onFault: () => undefined,
    }),
  );
  const harness = stack.use(
    await startHarness({
      prefill: 1,
      decode: 1,
      engine: { bidirectional: true, maxModelLen: 4096, eosEvery: 0 },
      yaml: 'timeouts: { store: 5s }',
      flags: { roles: 'facade,router,registry', 'kvstore-url': `http://127.0.0.1:${listener.port}` },
    }),
  );
  await harness.ready();
  return harness;
}

/** A turn and the next one; what the second says about reuse. */
async function secondTurn(harness: Harness, stored: () => Promise<boolean>): Promise<string | undefined> {
  const messages = [{ role: 'user', content: 'tell me about batons '.repeat(12) }];
  let plan: string | null = null;
  for (let turn = 0; turn < 2; turn++) {
    const body = { model: 'sim-model', messages, max_tokens: 100, conversation_id: 'skew' };
    const reply = await post(`${harness.url}/v1/chat/completions`, body, { headers: { 'x-baton-debug': '1' } });
    expect(reply.status, reply.text).toBe(200);
    plan = reply.headers.get('x-baton-plan');
    const { content } = JSON.parse(reply.text).choices[0].message;
    messages.push({ role: 'assistant', content }, { role: 'user', content: 'go on' });
    if (turn === 0) await expect.poll(stored).toBe(true);
  }
  return /outcome=(\w+)/.exec(plan ?? '')?.[1];
}

test('a store that has only the calls of turns: they hit', async () => {
  let service: KvCacheStoreService | undefined;
  const harness = await start((whole) => {
    service = whole;
    return {
      putEntry: (request, context) => whole.putEntry(request, context),
      getEntry: (request, context) => whole.getEntry(request, context),
      takeEntry: (request, context) => whole.takeEntry(request, context),
      commitClaim: (request, context) => whole.commitClaim(request, context),
    };
  });
  const stored = async () => (await service?.readStats())?.entries === 1;
  expect(await secondTurn(harness, stored)).toBe('hit');
});

test('a store that knows no call at all: turns are cold, and told so', async () => {
  const harness = await start(() => ({}));
  expect(await secondTurn(harness, async () => true)).toBe('miss_store_unavailable');
  const counted = 'baton_reuse_total{outcome="miss_store_unavailable"}';
  await expect.poll(() => metricOf(harness, counted)).toBeGreaterThan(0);
});

test.each(['getEntry', 'takeEntry'] as const)('a reason of a later store, from %s, is a miss', async (method) => {
  let service: KvCacheStoreService | undefined;
  const field = new BinaryWriter().tag(MissSchema.field.reason.number, WireType.Varint).int32(99);
  const later = fromBinary(MissSchema, field.finish());
  const harness = await start((whole) => {
    service = whole;
    return {
      putEntry: (request, context) => whole.putEntry(request, context),
      getEntry: (request, context) =>
        method === 'getEntry' ? { entries: [], miss: later } : whole.getEntry(request, context),
      takeEntry: () => ({ result: { case: 'miss', value: later } }),
    };
  });
  const stored = async () => (await service?.readStats())?.entries === 1;
  expect(await secondTurn(harness, stored)).toBe('miss_never');
});
