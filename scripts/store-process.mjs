// Shared by the benchmarks of a `baton kvstore` process: starts one on a unix socket with store-probe.mjs in it, and a process
// that does nothing beside it: what the machine itself makes wait. Linux.
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdtempSync, rmSync } from 'node:fs';
import { cpus, tmpdir } from 'node:os';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { decodeKvTransferParams } from '../src/core/kv-transfer.ts';
import { connectRemote } from '../src/rpc/clients.ts';

export const machine = `${cpus()[0]?.model}, ${cpus().length} cores, Node ${process.versions.node}`;

const CONCURRENCY = 16;

/** Both processes and a client of the store; all end with `stack`. */
export async function startStoreAndIdle(stack) {
  const folder = mkdtempSync(join(tmpdir(), 'baton-bench-'));
  stack.defer(() => rmSync(folder, { recursive: true }));
  const socket = join(folder, 'store.sock');
  const bin = join(import.meta.dirname, '..', 'src', 'bin.ts');
  const flags = ['kvstore', '--rpc-port', 'off', '--rpc-socket', socket, '--admin-port', 'off', '--log-format', 'json'];
  const store = startProbed(stack, bin, ...flags);
  await untilUp(store);
  const idle = startProbed(stack, '-e', 'setInterval(() => {}, 3_600_000)');
  return { store, idle, client: stack.use(connectRemote({ url: `unix:${socket}` })).kvCacheStore };
}

async function untilUp(child) {
  for await (const line of createInterface({ input: child.stderr })) if (line.includes('"baton is up"')) return;
  throw new Error('the store did not start');
}

function startProbed(stack, ...args) {
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
export async function ask(child, question) {
  const answer = once(child, 'message');
  child.send(question);
  return (await answer)[0];
}

/** Runs `call` with each number from `from` to below `to`, some at a time. */
export async function forEachNumber(from, to, call) {
  let next = from;
  const worker = async () => {
    while (next < to) {
      next += 1;
      await call(next - 1);
    }
  };
  await Promise.all(Array.from({ length: CONCURRENCY }, worker));
}

/** A put of conversation `number` as another process would send it: nothing of it is shared with the one before. */
export function putRequest(number, tokens, chain, ttlMs) {
  return {
    idempotencyKey: callKey('put', number),
    key: keyOf(number),
    owner: {
      instanceId: `http://10.0.0.${number % 16}:8200`,
      engineId: `engine-${number % 16}_dp0`,
      incarnation: { engineId: `engine-${number % 16}`, generation: 1, processStartSeconds: 1_760_000_000 },
      compatGroup: MODEL,
    },
    connector: 'nixl',
    handle: handleOf(number, tokens),
    storedTokens: tokens,
    chain,
    engineBlockSize: 16,
    remainingTtl: { seconds: BigInt(Math.floor(ttlMs / 1000)), nanos: Math.floor(ttlMs % 1000) * 1_000_000 },
  };
}

export const MODEL = 'meta-llama/Llama-3.1-8B-Instruct';

export function keyOf(number) {
  return { tenant: `tenant-${number % 64}`, model: MODEL, conversationId: `conversation-${number}` };
}

/** As long as the keys that callers make. */
export function callKey(kind, number) {
  return `${kind.padEnd(8, '0')}-77aa-4b1e-9c55-${String(number).padStart(12, '0')}`;
}

function handleOf(number, tokens) {
  const blocks = Array.from({ length: tokens / 16 }, (_, index) => ((number * 7919 + index) % 150_000) + 1);
  const text =
    `{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[${blocks}]],"remote_engine_id":"engine-` +
    `${number % 16}_dp0","remote_request_id":"chatcmpl-${number}-${number * 31}","remote_host":"10.0.0.${number % 16}",` +
    `"remote_port":5600,"tp_size":1,"remote_num_tokens":${tokens}}`;
  return decodeKvTransferParams(Buffer.from(text));
}
