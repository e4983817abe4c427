// Fills a `baton kvstore` process over its unix socket with entries of long conversations and prints, as JSON, what an
// entry takes of its memory beside the payload, and how long its event loop stood still, beside that of a process that does
// nothing: what the machine itself makes wait. Linux.
// Arguments: entries (default 100000), tokens of each (default 4096).
import { spawn } from 'node:child_process';
import { randomBytes } from 'node:crypto';
import { once } from 'node:events';
import { mkdtempSync, rmSync } from 'node:fs';
import { cpus, tmpdir } from 'node:os';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { create, toBinary } from '@bufbuild/protobuf';
import { durationFromMs } from '@bufbuild/protobuf/wkt';
import { PutEntryRequestSchema } from '../gen/baton/v1/kv_cache_store_pb.ts';
import { decodeKvTransferParams } from '../src/core/kv-transfer.ts';
import { connectRemote } from '../src/rpc/clients.ts';

const CONCURRENCY = 16;
const count = Number(process.argv[2] ?? 100_000);
const tokens = Number(process.argv[3] ?? 4096);
/** Puts after which the process has what it takes whatever it keeps. */
const warmUp = Math.min(count, 20_000);

await using stack = new globalThis.AsyncDisposableStack();
const folder = mkdtempSync(join(tmpdir(), 'baton-bench-'));
stack.defer(() => rmSync(folder, { recursive: true }));
const socket = join(folder, 'store.sock');
const store = await startStore();
const idle = startProbed('-e', 'setInterval(() => {}, 3_600_000)');
const client = stack.use(connectRemote({ url: `unix:${socket}` })).kvCacheStore;

let puts = 0;
let payload = 0;
await fill(warmUp);
await ask(idle, 'look');
const before = await ask(store, 'settle');
payload = 0;
const begin = performance.now();
await fill(count);
const seconds = (performance.now() - begin) / 1000;
const [busy, still] = await Promise.all([ask(store, 'look'), ask(idle, 'look')]);
const after = await ask(store, 'settle');
const stats = await client.getStats({});
const kept = ({ heapUsed, external }) => heapUsed + external;
const perEntry = (bytes) => bytes / (stats.entries - warmUp);
const rounded = (value) => Number(value.toFixed(2));
console.log(
  JSON.stringify({
    machine: `${cpus()[0]?.model}, ${cpus().length} cores, Node ${process.versions.node}`,
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
    idleLongestLoopMs: rounded(still.longestMs),
    idleLoopP999Ms: rounded(still.p999Ms),
    longestLoopMs: rounded(busy.longestMs),
    loopP999Ms: rounded(busy.p999Ms),
    longestPauseMs: rounded(busy.longestPauseMs),
  }),
);

async function fill(entries) {
  const end = puts + entries;
  const worker = async () => {
    while (puts < end) await client.putEntry(request());
  };
  await Promise.all(Array.from({ length: CONCURRENCY }, worker));
}

/** A put as another process would send it: nothing of it is shared with the one before. */
function request() {
  puts += 1;
  const blocks = Array.from({ length: tokens / 16 }, (_, index) => ((puts * 7919 + index) % 150_000) + 1);
  const handle =
    `{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[${blocks}]],"remote_engine_id":"engine-` +
    `${puts % 16}_dp0","remote_request_id":"chatcmpl-${puts}-${puts * 31}","remote_host":"10.0.0.${puts % 16}",` +
    `"remote_port":5600,"tp_size":1,"remote_num_tokens":${tokens}}`;
  const bytes = randomBytes(tokens / 4);
  const message = create(PutEntryRequestSchema, {
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
    // Nothing may run out while the memory is filled.
    remainingTtl: durationFromMs(3_600_000),
  });
  payload += toBinary(PutEntryRequestSchema, message).byteLength;
  return message;
}

async function startStore() {
  const bin = join(import.meta.dirname, '..', 'src', 'bin.ts');
  const flags = ['kvstore', '--rpc-port', 'off', '--rpc-socket', socket, '--admin-port', 'off', '--log-format', 'json'];
  const child = startProbed(bin, ...flags);
  for await (const line of createInterface({ input: child.stderr })) if (line.includes('"baton is up"')) return child;
  throw new Error('the store did not start');
}

function startProbed(...args) {
  const probe = join(import.meta.dirname, 'store-probe.mjs');
  const child = spawn(process.execPath, ['--expose-gc', '--import', probe, ...args], {
    stdio: ['ignore', 'ignore', 'pipe', 'ipc'],
  });
  stack.defer(async () => {
    const ended = once(child, 'exit');
    child.kill('SIGTERM');
    await ended;
  });
  return child;
}

/** What a process says of itself since the last question; `settle` lets it collect its garbage first. */
async function ask(child, question) {
  const answer = once(child, 'message');
  child.send(question);
  return (await answer)[0];
}
