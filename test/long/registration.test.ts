import { afterAll, beforeAll, expect, test } from 'vitest';
import { InstanceState, Role } from '../../gen/baton/v1/instance_pb.ts';
import { connectRemote, type RemoteServices } from '../../src/rpc/clients.ts';
import { type Sim, startSim } from '../../src/sim/start-sim.ts';
import { Conversation, chatWithPlan } from '../support/conversation.ts';
import { configOf, startQuietly } from '../support/harness.ts';
import { waitUntil } from '../support/wait.ts';

/** baton without an engine of its own: all come by registration. */
const stack = new AsyncDisposableStack();
let url = '';
let remote: RemoteServices;
let plain: Sim;

beforeAll(async () => {
  const yaml = 'instances: []\nhealth: { interval: 100ms }\ntimeouts: { store: 5s, tokenize: 5s }';
  const { baton } = await startQuietly(configOf({}, yaml));
  stack.defer(() => baton.stop());
  url = `http://${baton.addresses.facade}`;
  remote = stack.use(connectRemote({ url: `http://${baton.addresses.rpc}` }));
  plain = await engine('both');
});
afterAll(() => stack.disposeAsync());

async function engine(role: 'prefill' | 'decode' | 'both'): Promise<Sim> {
  const own = role === 'both' ? ({ connector: 'none' } as const) : { bidirectional: true };
  const sim = await startSim({ role, maxModelLen: 4096, seed: 5, eosEvery: 0, ...own });
  stack.defer(() => sim.close());
  return sim;
}

let keys = 0;

async function register(sim: Sim, id: string, role: Role): Promise<number> {
  const { instance } = await remote.poolRegistry.registerInstance({
    idempotencyKey: `k${++keys}`,
    instance: { id, url: sim.url, role, connector: 'nixl' },
    lease: { seconds: 3600n },
  });
  return instance?.incarnation?.generation ?? 0;
}

const stateOf = async (instanceId: string) =>
  (await remote.poolRegistry.getInstance({ instanceId })).instance?.state ?? InstanceState.UNSPECIFIED;
const isReady = (...ids: readonly string[]) =>
  waitUntil(async () => (await Promise.all(ids.map(stateOf))).every((state) => state === InstanceState.READY));
const stored = async (instanceId: string) =>
  (await remote.kvCacheStore.listEntries({ filter: { instanceId } })).entries.length;

test('engines that register serve; when one leaves the store forgets what it held', async () => {
  const [p, d] = [await engine('prefill'), await engine('decode')];
  await register(p, 'p', Role.PREFILL);
  await register(d, 'd', Role.DECODE);
  await isReady('p', 'd');
  const conversation = new Conversation('registered', { stream: true, plain });
  const turn = () => conversation.turn((body) => chatWithPlan(url, body));
  expect([await turn(), await turn()]).toEqual(['none', 'hit']);
  await waitUntil(async () => (await stored('d')) === 1);
  expect(await remote.poolRegistry.deregisterInstance({ instanceId: 'd' })).toMatchObject({ removed: true });
  await waitUntil(async () => (await stored('d')) === 0);

  expect(await register(d, 'd', Role.DECODE)).toBe(2);
  await isReady('d');
  expect(await turn()).toBe('miss_owner_gone');
  await waitUntil(async () => (await stored('d')) === 1);
  // A new registration is a new life: whatever the old one held is not believed.
  expect(await register(d, 'd', Role.DECODE)).toBe(3);
  await waitUntil(async () => (await stored('d')) === 0);
  await isReady('d');
  await remote.poolRegistry.deregisterInstance({ instanceId: 'd' });
});

test('a draining engine takes no new turns, gives its blocks for the next one, and is then GONE', async () => {
  const [old, fresh] = [await engine('decode'), await engine('decode')];
  await register(old, 'old', Role.DECODE);
  await isReady('old');
  const conversation = new Conversation('drained', { stream: false, plain });
  const turn = () => conversation.turn((body) => chatWithPlan(url, body));
  await turn();
  await waitUntil(async () => (await stored('old')) === 1);
  await register(fresh, 'fresh', Role.DECODE);
  await isReady('fresh');
  await remote.poolRegistry.drainInstance({ instanceId: 'old', reason: 'rolling_update' });
  expect(await stateOf('old')).toBe(InstanceState.DRAINING);
  expect(await turn()).toBe('hit');
  await waitUntil(async () => (await stateOf('old')) === InstanceState.GONE);
  const { instance } = await remote.poolRegistry.getInstance({ instanceId: 'old' });
  expect(instance?.stateReason).toBe('drained');
});
