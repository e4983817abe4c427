// Fills a `baton kvstore` process over its unix socket with entries of long conversations and prints, as JSON, what an
// entry takes of its memory beside the payload. Linux.
// Arguments: entries (default 100000), tokens of each (default 4096).
import { randomBytes } from 'node:crypto';
import { create, toBinary } from '@bufbuild/protobuf';
import { PutEntryRequestSchema } from '../gen/baton/v1/kv_cache_store_pb.ts';
import { ask, forEachNumber, machine, putRequest, startStoreAndIdle } from './store-process.mjs';

const count = Number(process.argv[2] ?? 100_000);
const tokens = Number(process.argv[3] ?? 4096);
/** Puts after which the process has what it takes whatever it keeps. */
const warmUp = Math.min(count, 20_000);
/** Nothing may run out while the memory is filled. */
const TTL_MS = 3_600_000;

await using stack = new globalThis.AsyncDisposableStack();
const { store, client } = await startStoreAndIdle(stack);

let payload = 0;
await forEachNumber(0, warmUp, put);
const before = await ask(store, 'settle');
payload = 0;
const begin = performance.now();
await forEachNumber(warmUp, warmUp + count, put);
const seconds = (performance.now() - begin) / 1000;
const busy = await ask(store, 'look');
const after = await ask(store, 'settle');
const stats = await client.getStats({});
const kept = ({ heapUsed, external }) => heapUsed + external;
const perEntry = (bytes) => bytes / (stats.entries - warmUp);
const rounded = (value) => Number(value.toFixed(2));
console.log(
  JSON.stringify({
    machine,
    put: count,
    tokens,
    seconds: Math.round(seconds),
    entries: stats.entries,
    evictions: Number(stats.evictions),
    payloadPerEntry: Math.round(payload / count),
    rssPerEntry: Math.round(perEntry(after.rss - before.rss)),
    rssRatio: rounded(perEntry(after.rss - before.rss) / (payload / count)),
    // What is in use: the rest of the RSS is what the process holds ready.
    usedPerEntry: Math.round(perEntry(kept(after) - kept(before))),
    usedRatio: rounded(perEntry(kept(after) - kept(before)) / (payload / count)),
    rssMiB: Math.round(after.rss / 1024 ** 2),
    rssAtWorkMiB: Math.round(busy.rss / 1024 ** 2),
    countedMiB: Math.round(Number(stats.bytes) / 1024 ** 2),
    boundMiB: Number(stats.limits?.totalBytes ?? 0) / 1024 ** 2,
  }),
);

async function put(number) {
  const bytes = randomBytes(tokens / 4);
  const digests = Array.from({ length: tokens / 64 }, (_, index) => bytes.subarray(index * 16, index * 16 + 16));
  const message = create(
    PutEntryRequestSchema,
    putRequest(number, tokens, { algorithm: 'c1', digests, tokenCount: tokens }, TTL_MS),
  );
  payload += toBinary(PutEntryRequestSchema, message).byteLength;
  await client.putEntry(message);
}
