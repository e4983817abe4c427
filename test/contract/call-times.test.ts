import { Code, ConnectError } from '@connectrpc/connect';
import { afterEach, expect, test } from 'vitest';
import { KVCacheStore } from '../../gen/baton/v1/kv_cache_store_pb.ts';
import { BatonError } from '../../src/core/errors.ts';
import type { EndedCall } from '../../src/obs/metrics.ts';
import { ServerBreaker } from '../../src/rpc/breaker.ts';
import { connectRemote, type RemoteOptions } from '../../src/rpc/clients.ts';
import { createDirectClient } from '../../src/rpc/direct-client.ts';
import { startRpcListener } from '../../src/rpc/listener.ts';
import type { RpcServices } from '../../src/rpc/routes.ts';
import { EVERYTHING } from '../../src/services/kv-cache-store.ts';

let stack = new AsyncDisposableStack();
afterEach(async () => {
  await stack.disposeAsync();
  stack = new AsyncDisposableStack();
});

const TAKES_MS = 30;
const kvCacheStore: NonNullable<RpcServices['kvCacheStore']> = {
  async getStats() {
    await new Promise((resolve) => setTimeout(resolve, TAKES_MS));
    return {};
  },
  getEntry() {
    throw new BatonError({ reason: 'STORE_UNAVAILABLE', message: 'away' });
  },
  async *watchEntries() {
    // A stream has no end that tells how long an answer took.
  },
};

const said = (calls: readonly EndedCall[]) => calls.map(({ method, outcome }) => `${method} ${outcome}`);
const ALL = ['GetStats ok', 'GetEntry unavailable', 'PutEntry unimplemented'];

async function callAll(client: ReturnType<typeof createDirectClient<typeof KVCacheStore>>): Promise<void> {
  await client.getStats({});
  await expect(client.getEntry({})).rejects.toMatchObject({ code: Code.Unavailable });
  await expect(client.putEntry({})).rejects.toMatchObject({ code: Code.Unimplemented });
  for await (const _ of client.watchEntries({})) throw new Error('nothing is watched');
}

test('a client in the same process tells how long each call took, and how it ended', async () => {
  const calls: EndedCall[] = [];
  const client = createDirectClient(KVCacheStore, kvCacheStore, undefined, (call) => void calls.push(call));
  await callAll(client);
  expect(said(calls)).toEqual(ALL);
  expect(calls[0]?.milliseconds).toBeGreaterThanOrEqual(TAKES_MS - 2);
});

test.for([
  ['connect', '1.1'],
  ['connect', '2'],
  ['grpc', '2'],
] as const)('by %s on HTTP/%s port and client tell the same', async ([protocol, httpVersion]) => {
  const [served, made]: [EndedCall[], EndedCall[]] = [[], []];
  const { url } = await listen(served);
  const client = connect({ url, protocol, httpVersion, onCall: (call) => void made.push(call) });
  await callAll(client);
  expect(said(served)).toEqual(ALL);
  expect(said(made)).toEqual(ALL);
  // What the caller waits for has the way there and back in it.
  expect(made[0]?.milliseconds).toBeGreaterThanOrEqual(served[0]?.milliseconds ?? Number.POSITIVE_INFINITY);
});

test('a call that a caller has no right to, or that the breaker holds back, has no time', async () => {
  const [served, made]: [EndedCall[], EndedCall[]] = [[], []];
  const { url } = await listen(served, () => new BatonError({ reason: 'CREDENTIAL_REQUIRED', message: 'no' }));
  const breaker = new ServerBreaker({ failures: 1, openMs: 60_000 });
  const client = connect({ url, breaker, onCall: (call) => void made.push(call) });
  await expect(client.getEntry({})).rejects.toMatchObject({ code: Code.Unauthenticated });
  expect([said(served), said(made)]).toEqual([[], ['GetEntry unauthenticated']]);
  breaker.admit();
  breaker.note('failed');
  await expect(client.getEntry({})).rejects.toThrow(ConnectError);
  expect(said(made)).toEqual(['GetEntry unauthenticated']);
});

async function listen(calls: EndedCall[], callerOf: () => typeof EVERYTHING | BatonError = () => EVERYTHING) {
  const listener = await startRpcListener({
    host: '127.0.0.1',
    port: 0,
    services: { kvCacheStore },
    callerOf,
    onFault: () => undefined,
    onCall: (call) => void calls.push(call),
  });
  stack.defer(() => listener.close(0));
  return { url: `http://127.0.0.1:${listener.port}` };
}

function connect(options: RemoteOptions) {
  return stack.use(connectRemote(options)).kvCacheStore;
}
