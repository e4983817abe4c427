// Fills the in-memory store through its service with entries of long conversations and prints, as JSON, what an entry
// takes in memory beside its payload, and how long the event loop stood still. Needs --expose-gc.
// Arguments: entries, tokens of each.
import { randomBytes } from 'node:crypto';
import { monitorEventLoopDelay } from 'node:perf_hooks';
import { setImmediate } from 'node:timers/promises';
import { create, toBinary } from '@bufbuild/protobuf';
import { durationFromMs } from '@bufbuild/protobuf/wkt';
import { KVCacheStore, PutEntryRequestSchema } from '../gen/baton/v1/kv_cache_store_pb.ts';
import { decodeKvTransferParams } from '../src/core/kv-transfer.ts';
import { createDirectClient } from '../src/rpc/direct-client.ts';
import { EVERYTHING, KvCacheStoreService } from '../src/services/kv-cache-store.ts';
import { openMemoryStore } from '../src/stores/memory.ts';
import { STORE_LIMITS } from '../src/stores/store.ts';

const count = Number(process.argv[2] ?? 100_000);
const tokens = Number(process.argv[3] ?? 4096);
const limits = { ...STORE_LIMITS, tenantEntries: 1_000_000, tenantBytes: STORE_LIMITS.totalBytes };
const store = await openMemoryStore({ now: () => performance.now(), limits });
const client = createDirectClient(KVCacheStore, new KvCacheStoreService({ store, limits, callerOf: () => EVERYTHING }));

let puts = 0;
/** A put as another process would send it: nothing of it is shared with the one before. */
function request() {
  puts += 1;
  const blocks = Array.from({ length: tokens / 16 }, (_, index) => ((puts * 7919 + index) % 150_000) + 1);
  const handle =
    `{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[${blocks}]],"remote_engine_id":"engine-` +
    `${puts % 16}_dp0","remote_request_id":"chatcmpl-${puts}-${puts * 31}","remote_host":"10.0.0.${puts % 16}",` +
    `"remote_port":5600,"tp_size":1,"remote_num_tokens":${tokens}}`;
  const bytes = randomBytes(tokens / 4);
  return create(PutEntryRequestSchema, {
    idempotencyKey: `3f1c2a5e-77aa-4b1e-9c55-${String(puts).padStart(12, '0')}`,
    key: {
      tenant: `tenant-${puts % 64}`,
      model: `meta-llama/Llama-3.1-8B-Instruct`,
      conversationId: `conversation-${puts}`,
    },
    owner: {
      instanceId: `http://10.0.0.${puts % 16}:8200`,
      engineId: `engine-${puts % 16}_dp0`,
      incarnation: { engineId: `engine-${puts % 16}`, generation: 1, processStartSeconds: 1_760_000_000 },
      compatGroup: 'meta-llama/Llama-3.1-8B-Instruct',
    },
    connector: 'nixl',
    handle: decodeKvTransferParams(Buffer.from(handle)),
    storedTokens: tokens,
    chain: {
      algorithm: 'c1',
      digests: Array.from({ length: tokens / 64 }, (_, index) => bytes.subarray(index * 16, index * 16 + 16)),
      tokenCount: tokens,
    },
    engineBlockSize: 16,
    remainingTtl: durationFromMs(450_000),
  });
}

async function settle() {
  for (let round = 0; round < 8; round++) {
    globalThis.gc();
    await setImmediate();
  }
  return process.memoryUsage().rss;
}

const WARM_UP = 2000;
for (let index = 0; index < WARM_UP; index++) await client.putEntry(request());
// What a process takes that is at work, whatever it keeps.
for (let index = 0; index < 20_000; index++) toBinary(PutEntryRequestSchema, request());
const before = await settle();
const delay = monitorEventLoopDelay({ resolution: 1 });
delay.enable();
let payload = 0;
let longestPut = 0;
for (let index = 0; index < count; index++) {
  const message = request();
  payload += toBinary(PutEntryRequestSchema, message).byteLength;
  const begin = performance.now();
  await client.putEntry(message);
  longestPut = Math.max(longestPut, performance.now() - begin);
  if (index % 8 === 0) await setImmediate();
}
await setImmediate();
delay.disable();
const rss = (await settle()) - before;
const { entries, bytes, evictions } = await store.stats({});
console.log(
  JSON.stringify({
    put: count,
    tokens,
    entries,
    evictions,
    payloadPerEntry: Math.round(payload / count),
    rssPerEntry: Math.round(rss / (entries - WARM_UP)),
    rss,
    counted: bytes,
    bound: limits.totalBytes,
    longestPutMs: Number(longestPut.toFixed(2)),
    longestLoopMs: Number((delay.max / 1e6).toFixed(2)),
    ...process.memoryUsage(),
  }),
);
