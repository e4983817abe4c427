import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { AsyncDisposableStack } from '@whatwg-node/disposablestack';
import { startSimPools } from '../../src/sim/pools.ts';

/** What requests of a kind are measured with. */
export interface CostRun {
  /** One of {@link KINDS}. */
  readonly kind: string;
  /** Requests that are sent before, and those that are counted. */
  readonly warmUp: number;
  readonly requests: number;
  /** Of Node, for the process that is measured. */
  readonly nodeFlags?: readonly string[];
}

/** What one request costs the process that serves it, with all that comes after its reply. */
export interface RequestCost {
  /** Allocated on V8's heap. */
  readonly bytes: number;
  /** Processor time of all threads. */
  readonly cpuUs: number;
}

type Send = (url: string, index: number) => Promise<void>;

const OFF = ['--reuse-guard', 'off', '--unsafe-reuse'];
const TURNS = 5;
const TEXT = 'The quick brown fox jumps over the lazy dog. '.repeat(24).slice(0, 1024);

/** Flags of the process, and a request. */
export const KINDS: Readonly<Record<string, { readonly flags: readonly string[]; readonly send: Send }>> = {
  json: { flags: [], send: (url, index) => chat(url, first(index), false) },
  json_unguarded: { flags: OFF, send: (url, index) => chat(url, first(index), false) },
  stream: { flags: [], send: (url, index) => chat(url, first(index), true) },
  stream_unguarded: { flags: OFF, send: (url, index) => chat(url, first(index), true) },
  turns: { flags: [], send: conversation() },
  turns_unguarded: { flags: OFF, send: conversation() },
};

interface Message {
  readonly role: 'user' | 'assistant';
  readonly content: string;
}

function first(index: number): { readonly messages: readonly Message[] } {
  return { messages: [{ role: 'user', content: `${index} ${TEXT}` }] };
}

/** Each fifth request begins a conversation, the others go on with it. */
function conversation(): Send {
  let messages: Message[] = [];
  return async (url, index) => {
    if (index % TURNS === 0) messages = [];
    messages.push({ role: 'user', content: `${index} ${TEXT}` });
    const conversationId = `conversation-${Math.floor(index / TURNS)}`;
    await chat(url, { messages, conversation_id: conversationId }, true, (content) =>
      messages.push({ role: 'assistant', content }),
    );
  };
}

async function chat(url: string, body: object, stream: boolean, told?: (content: string) => void): Promise<void> {
  const reply = await fetch(`${url}/v1/chat/completions`, {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify({ model: 'sim-model', max_tokens: 32, stream, ...body }),
  });
  const text = await reply.text();
  if (reply.status !== 200) throw new Error(text);
  told?.([...text.matchAll(/"content":"((?:[^"\\]|\\.)*)"/g)].map(([, piece]) => JSON.parse(`"${piece}"`)).join(''));
}

/** Serves requests of a kind one after the other by a process of its own, with simulated engines in this one. */
export async function measureRequests({ kind, warmUp, requests, nodeFlags = [] }: CostRun): Promise<RequestCost> {
  const { flags, send } = KINDS[kind] ?? raise(`no such kind: ${kind}`);
  await using stack = new AsyncDisposableStack();
  const engine = { fixedMs: 0, eosEvery: 0, bidirectional: true };
  const pools = stack.use(await startSimPools({ prefill: 2, decode: 2, engine }));
  const named = (['prefill', 'decode'] as const).flatMap((role) =>
    pools[role].flatMap(({ url }) => [`--${role}`, url]),
  );
  const { url, ask } = await startProbed(stack, nodeFlags, [...flags, ...named]);
  const until = async (from: number, to: number) => {
    for (let index = from; index < to; index++) await send(url, index);
  };
  await until(0, warmUp);
  const before = await ask();
  await until(warmUp, warmUp + requests);
  const after = await ask();
  return {
    bytes: Math.round((after.bytes - before.bytes) / requests),
    cpuUs: Math.round((after.cpuUs - before.cpuUs) / requests),
  };
}

async function startProbed(stack: AsyncDisposableStack, nodeFlags: readonly string[], args: readonly string[]) {
  const root = join(import.meta.dirname, '..', '..');
  const probe = join(root, 'scripts', 'request-probe.mjs');
  const own = ['serve', '--host', '127.0.0.1', '--port', '0', '--admin-port', 'off', '--rpc-port', 'off'];
  const words = [...nodeFlags, '--import', probe, join(root, 'src', 'bin.ts'), ...own, '--log-format', 'json', ...args];
  const child = spawn(process.execPath, words, {
    env: { ...process.env, BATON_DRAIN_SETTLE: '0' },
    stdio: ['ignore', 'ignore', 'pipe', 'ipc'],
  });
  stack.defer(async () => {
    child.kill('SIGTERM');
    if (child.exitCode === null) await once(child, 'exit');
  });
  const url = await untilUp(child);
  return { url, ask: () => ask(child) };
}

/** Its log is read to the end, as it would wait for a reader. */
function untilUp(child: ChildProcess): Promise<string> {
  return new Promise((resolve, reject) => {
    const { stderr } = child;
    if (stderr === null) return reject(new Error('no log'));
    const lines: string[] = [];
    createInterface({ input: stderr }).on('line', (line) => {
      if (!line.includes('"baton is up"')) return void (lines.length < 20 && lines.push(line));
      const { facade }: { readonly facade: string } = JSON.parse(line);
      resolve(`http://${facade}`);
    });
    child.once('exit', (code) => reject(new Error(`baton ended with ${code}:\n${lines.join('\n')}`)));
  });
}

async function ask(child: ChildProcess): Promise<RequestCost> {
  const answer = once(child, 'message');
  child.send('cost');
  const [cost]: [RequestCost] = (await answer) as [RequestCost];
  return cost;
}

function raise(message: string): never {
  throw new Error(message);
}
