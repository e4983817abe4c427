// Measures what a put and a take cost the store's process, beside a bare Connect server that decodes the same requests and
// answers with messages of the same sizes, in the same run: CPU time of the server process alone, over HTTP/2, on TCP and
// on a unix socket, for each backend; with valkey also takes of what another process stored. Linux (reads /proc). Arguments: calls in a round (default 4000), rounds (default 5).
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { createServer } from 'node:http2';
import { connect, createServer as createTcpServer } from 'node:net';
import { cpus, tmpdir } from 'node:os';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { setTimeout as sleep } from 'node:timers/promises';
import { create } from '@bufbuild/protobuf';
import { connectNodeAdapter } from '@connectrpc/connect-node';
import {
  CommitClaimResponseSchema,
  KVCacheStore,
  PutEntryResponseSchema,
  TakeEntryResponseSchema,
} from '../gen/baton/v1/kv_cache_store_pb.ts';
import { buildChain } from '../src/core/chain.ts';
import { decodeKvTransferParams } from '../src/core/kv-transfer.ts';
import { connectRemote } from '../src/rpc/clients.ts';
import { sha256 } from '../src/services/sha256.ts';

const TOKENS = 4096;
const CONCURRENCY = 8;
const OTHERS = "take of another's, by chain";
const root = join(import.meta.dirname, '..');

if (process.argv[2] === '--echo') await serveEcho(process.argv[3]);
else await measure(Number(process.argv[2] ?? 4000), Number(process.argv[3] ?? 5));

/** A server that does nothing but Connect: `answers` are those of the store, made once. */
async function serveEcho(path) {
  const entry = {
    entryId: `e-${'0'.repeat(32)}-000000001`,
    key: { tenant: 'anonymous', model: 'model', conversationId: 'conversation-1' },
    owner: { instanceId: 'd', engineId: 'engine_dp0', incarnation: { engineId: 'engine', generation: 1 } },
    connector: 'nixl',
    storedTokens: TOKENS,
    chainTokens: TOKENS,
    cachedTokens: TOKENS,
    engineBlockSize: 16,
    chainAlgorithm: 'c1',
    remainingTtl: { seconds: 449n, nanos: 999_000_000 },
    age: { nanos: 1_000_000 },
    revision: 12_345n,
  };
  const put = create(PutEntryResponseSchema, { entry });
  const value = {
    claimId: `c-${'0'.repeat(32)}-1`,
    claimRemaining: { seconds: 120n },
    entry,
    handle: handle(),
    matchedTokens: TOKENS,
  };
  const taken = create(TakeEntryResponseSchema, { result: { case: 'taken', value } });
  const committed = create(CommitClaimResponseSchema);
  const handler = connectNodeAdapter({
    routes: ({ service }) =>
      service(KVCacheStore, { putEntry: () => put, takeEntry: () => taken, commitClaim: () => committed }),
  });
  const server = createServer(handler);
  server.listen(path === 'tcp' ? { host: '127.0.0.1', port: 0 } : { path });
  await once(server, 'listening');
  console.log(path === 'tcp' ? `127.0.0.1:${server.address().port}` : path);
}

function handle() {
  const blocks = Array.from({ length: TOKENS / 16 }, (_, index) => 1000 + 7 * index);
  const json =
    `{"do_remote_prefill":false,"do_remote_decode":true,"remote_block_ids":[[${blocks}]],"remote_engine_id":"engine_dp0",` +
    `"remote_request_id":"chatcmpl-1","remote_host":"10.0.0.2","remote_port":5601,"tp_size":1,"remote_num_tokens":${TOKENS},` +
    '"remote_blocks_expiry_time":1519.551656931}';
  return decodeKvTransferParams(Buffer.from(json));
}

async function measure(calls, rounds) {
  await using stack = new globalThis.AsyncDisposableStack();
  const folder = mkdtempSync(join(tmpdir(), 'baton-bench-'));
  stack.defer(() => rmSync(folder, { recursive: true }));
  const redis = await startRedis(folder, stack);
  console.log(`${cpus()[0]?.model}, ${cpus().length} cores, Node ${process.versions.node}`);
  console.log(
    `CPU of the server per call, entries of ${TOKENS} tokens, ${rounds} rounds of ${calls} calls; ratio to the echo`,
  );
  console.log(`${'backend'.padEnd(8)} ${'door'.padEnd(5)} ${'call'.padEnd(27)}     echo    store   ratio`);
  for (const backend of redis === undefined ? ['memory'] : ['memory', 'valkey']) {
    for (const door of ['tcp', 'unix']) {
      await using run = new globalThis.AsyncDisposableStack();
      const path = join(folder, `${backend}.sock`);
      const echo = await startEcho(door === 'tcp' ? 'tcp' : `${path}.echo`, run);
      const flags = ['kvstore', '--log-format', 'json', '--admin-port', 'off', '--store', backend];
      flags.push(...(door === 'tcp' ? ['--rpc-port', '0'] : ['--rpc-port', 'off', '--rpc-socket', path]));
      if (backend === 'valkey') flags.push('--valkey-url', redis);
      const store = await startStore(flags, door === 'tcp' ? undefined : path, run);
      if (backend === 'valkey') store.other = (await startStore(atDoorOfItsOwn(flags), undefined, run)).client;
      const samples = new Map();
      for (let round = 0; round <= rounds; round++) {
        for (const [name, server] of [
          ['echo', echo],
          ['store', store],
        ]) {
          for (const [call, micros] of await runRound(server, calls, `${backend}-${door}-${round}`)) {
            // The first round warms up.
            if (round > 0) samples.set(`${call} ${name}`, [...(samples.get(`${call} ${name}`) ?? []), micros]);
          }
        }
      }
      for (const call of ['put', 'take by chain', 'take by ids', ...(backend === 'valkey' ? [OTHERS] : [])]) {
        const bare = median(samples.get(`${call === OTHERS ? 'take by chain' : call} echo`) ?? []);
        const own = median(samples.get(`${call} store`) ?? []);
        console.log(
          `${backend.padEnd(8)} ${door.padEnd(5)} ${call.padEnd(28)} ${bare.toFixed(0).padStart(5)} µs ${own.toFixed(0).padStart(5)} µs   ${(own / bare).toFixed(2)}`,
        );
      }
    }
  }
}

/** The flags of another process on the same server. */
function atDoorOfItsOwn(flags) {
  const socketAt = flags.indexOf('--rpc-socket');
  return flags.flatMap((flag, index) => {
    if (socketAt >= 0 && (index === socketAt || index === socketAt + 1)) return [];
    return [flags[index - 1] === '--rpc-port' ? '0' : flag];
  });
}

/** One round of each call; returns CPU microseconds of the server for one. `other` stores what is not stored here. */
async function runRound({ client, pid, other }, calls, name) {
  const tokenIds = Array.from({ length: TOKENS }, (_, index) => (index * 7919) % 150_000);
  const seed = { model: 'model', adapter: '', cacheSalt: '' };
  const chain = buildChain(tokenIds, seed, sha256);
  const params = handle();
  const key = (index) => ({ tenant: `t${index % 16}`, model: 'model', conversationId: `${name}-${index}` });
  const owner = { instanceId: 'd', engineId: 'engine_dp0', incarnation: { engineId: 'engine', generation: 1 } };
  const putBy = (putter) => (index) =>
    putter.putEntry({
      idempotencyKey: `p-${name}-${index}`,
      key: key(index),
      owner,
      connector: 'nixl',
      handle: params,
      storedTokens: TOKENS,
      chain,
      engineBlockSize: 16,
      remainingTtl: { seconds: 450n },
    });
  const takeBy = (prompt) => async (index) => {
    const { result } = await client.takeEntry({ idempotencyKey: `t-${name}-${index}`, key: key(index), prompt });
    if (result.case !== 'taken') throw new Error(`a miss: ${JSON.stringify(result.value)}`);
  };
  const half = calls / 2;
  const byChain = takeBy({ case: 'promptChain', value: { chain } });
  const byIds = takeBy({ case: 'tokenIds', value: { tokenIds } });
  const samples = [
    ['put', await timed(pid, 0, calls, putBy(client))],
    ['take by chain', await timed(pid, 0, half, byChain)],
    ['take by ids', await timed(pid, half, calls, byIds)],
  ];
  if (other === undefined) return samples;
  await timed(pid, calls, calls + half, putBy(other));
  return [...samples, [OTHERS, await timed(pid, calls, calls + half, byChain)]];
}

async function timed(pid, from, to, call) {
  const before = cpuMicros(pid);
  let next = from;
  const worker = async () => {
    while (next < to) await call(next++);
  };
  await Promise.all(Array.from({ length: CONCURRENCY }, worker));
  return (cpuMicros(pid) - before) / (to - from);
}

/** User and system time of a process; a clock tick is 10 ms. */
function cpuMicros(pid) {
  const fields = readFileSync(`/proc/${pid}/stat`, 'utf8').split(') ')[1].split(' ');
  return (Number(fields[11]) + Number(fields[12])) * 10_000;
}

function median(values) {
  return values.toSorted((a, b) => a - b)[Math.floor(values.length / 2)] ?? Number.NaN;
}

function startChild(stack, command, args, options) {
  const child = spawn(command, args, { cwd: root, ...options });
  stack.defer(async () => {
    const ended = once(child, 'exit');
    child.kill('SIGTERM');
    await ended;
  });
  return child;
}

function remote(stack, address) {
  const url = address.startsWith('/') ? `unix:${address}` : `http://${address}`;
  return stack.use(connectRemote({ url })).kvCacheStore;
}

async function startEcho(path, stack) {
  const child = startChild(stack, process.execPath, [import.meta.filename, '--echo', path], {
    stdio: ['ignore', 'pipe', 'inherit'],
  });
  const [address] = await once(createInterface({ input: child.stdout }), 'line');
  return { pid: child.pid, client: remote(stack, address) };
}

async function startStore(flags, path, stack) {
  const child = startChild(stack, process.execPath, [join('src', 'bin.ts'), ...flags], {
    stdio: ['ignore', 'ignore', 'pipe'],
  });
  for await (const line of createInterface({ input: child.stderr })) {
    if (!line.includes('"baton is up"')) continue;
    return { pid: child.pid, client: remote(stack, path ?? JSON.parse(line).rpc) };
  }
  throw new Error('the store did not start');
}

/** A Redis server on a free port; undefined where none is installed. */
async function startRedis(folder, stack) {
  const probe = createTcpServer().listen(0, '127.0.0.1');
  await once(probe, 'listening');
  const { port } = probe.address();
  probe.close();
  const args = ['--port', port, '--bind', '127.0.0.1', '--dir', folder, '--save', '', '--appendonly', 'no'].map(String);
  const child = spawn('redis-server', args, { stdio: 'ignore' });
  const [failed] = await Promise.race([once(child, 'error'), once(child, 'spawn')]);
  if (failed !== undefined) {
    console.log('redis-server is not installed: no figures for valkey');
    return undefined;
  }
  stack.defer(async () => {
    const ended = once(child, 'exit');
    child.kill('SIGTERM');
    await ended;
  });
  for (let tries = 0; tries < 100; tries++) {
    const socket = connect(port, '127.0.0.1');
    const up = await Promise.race([
      once(socket, 'connect').then(() => true),
      once(socket, 'error').then(() => false),
    ]).catch(() => false);
    socket.destroy();
    if (up) return `redis://127.0.0.1:${port}`;
    await sleep(50);
  }
  throw new Error('redis-server did not start');
}
