import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, test } from 'vitest';
import { connectRemote, type RemoteServices } from '../../src/rpc/clients.ts';
import { type SimPools, startSimPools } from '../../src/sim/pools.ts';
import { type Sim, startSim } from '../../src/sim/start-sim.ts';
import { type BatonProcess, startBatonProcess } from '../support/baton-process.ts';
import { Conversation, chatWithPlan } from '../support/conversation.ts';
import type { Reply } from '../support/harness.ts';
import { type Switchboard, startSwitchboard } from '../support/switchboard.ts';

// Every role in a process of its own: two routers and two facades before one store and one registry.
const ENGINE = { bidirectional: true, blockSize: 16, maxModelLen: 8192, eosEvery: 0, seed: 9 } as const;
/** No limit of time is to be met by a machine that is busy with its tests; readers need no trial, which is per router. */
const CONFIG = `
pools: { prefill: { bidirectional: on } }
timeouts: { store: 5s, tokenize: 5s, drain: 60s }
`;

let stack: AsyncDisposableStack;
let pools: SimPools;
let plain: Sim;
let store: RemoteServices;
let routers: Switchboard;
let startRouter: () => Promise<BatonProcess>;
let startFacade: () => Promise<BatonProcess>;

beforeEach(async () => {
  stack = new AsyncDisposableStack();
  pools = stack.use(await startSimPools({ prefill: 2, decode: 2, engine: ENGINE }));
  plain = await startSim({ ...ENGINE, role: 'both', connector: 'none' });
  stack.defer(() => plain.close());
  const folder = mkdtempSync(join(tmpdir(), 'baton-roles-'));
  stack.defer(() => rmSync(folder, { recursive: true }));
  const file = join(folder, 'baton.yaml');
  writeFileSync(file, CONFIG);
  // The turns are short: every handle is worth it.
  const start = (role: string, args: readonly string[]) =>
    startBatonProcess(['--roles', role, '--config', file, '--reuse-min-saved-tokens', '0', ...args]);
  const engines = (['prefill', 'decode'] as const).flatMap((role) =>
    pools[role].flatMap(({ url }) => [`--${role}`, url]),
  );
  const [kvstore, registry] = await Promise.all([start('kvstore', []), start('registry', engines)]);
  stack.use(kvstore);
  stack.use(registry);
  store = stack.use(connectRemote({ url: `http://${kvstore.rpc}` }));
  routers = stack.use(await startSwitchboard());
  const registryUrl = ['--registry-url', `http://${registry.rpc}`];
  startRouter = () => start('router', ['--kvstore-url', `http://${kvstore.rpc}`, ...registryUrl]);
  startFacade = () => start('facade', ['--router-url', `http://${routers.address}`, ...registryUrl]);
});
afterEach(() => stack.disposeAsync());

/** Resolves when the handle of the last turn is in the store, and those of the turns before are not. */
async function untilStored({ id, outcomes }: Conversation): Promise<void> {
  const key = { tenant: 'anonymous', model: 'sim-model', conversationId: id };
  const claimed = async () => {
    const { entries } = await store.kvCacheStore.getEntry({ selector: { case: 'key', value: key } });
    return entries.map((entry) => entry.claimed);
  };
  await expect.poll(claimed, { timeout: 30_000, message: `${id}, turn ${outcomes.length}` }).toEqual([false]);
}

/** A client that knows several facades and goes on to the next where a connection could not be used. */
function reconnecting(facades: () => readonly BatonProcess[]): (body: unknown) => Promise<Reply> {
  let turn = 0;
  return async (body) => {
    for (let tries = 0; ; tries++) {
      const list = facades();
      const facade = list[turn++ % list.length];
      try {
        return await chatWithPlan(facade?.url ?? '', body);
      } catch (error) {
        // Nothing of a reply was read: `post` has no reply before its head, and no facade cuts one that has begun.
        if (tries === 5) throw error;
      }
    }
  };
}

test('a turn on one facade and router, the next on the others: every one reads the one before', async () => {
  const list = await Promise.all([startRouter(), startRouter(), startFacade(), startFacade()]);
  for (const baton of list) stack.use(baton);
  const [one, two, ...facades] = list;
  routers.targets = [one?.rpc ?? '', two?.rpc ?? ''];
  const conversation = new Conversation('across', { stream: true, plain });
  for (let index = 0; index < 6; index++) {
    await conversation.turn((body) => chatWithPlan(facades[index % 2]?.url ?? '', body));
    await untilStored(conversation);
  }
  expect(conversation.outcomes).toEqual(['none', 'hit', 'hit', 'hit', 'hit', 'hit']);
});

test('a rolling restart of routers and facades under load: no failed request, no lost handle', async () => {
  let router = [await startRouter(), await startRouter()];
  routers.targets = router.map(({ rpc }) => rpc);
  let facade = [await startFacade(), await startFacade()];
  stack.defer(async () => void (await Promise.all([...router, ...facade].map((baton) => baton.end('SIGTERM')))));
  let over = false;
  const conversations = Array.from(
    { length: 8 },
    (_, index) => new Conversation(`c${index}`, { stream: index % 2 === 0, plain }),
  );
  const running = conversations.map(async (conversation) => {
    const send = reconnecting(() => facade);
    while (!over && conversation.outcomes.length < 60) {
      await conversation.turn(send);
      await untilStored(conversation);
    }
  });
  const failed = Promise.all(running);
  failed.catch(() => {
    over = true;
  });
  const exits: (number | null)[] = [];
  for (let round = 0; round < 2 && !over; round++) {
    for (const old of router) {
      const next = await startRouter();
      router = [...router.filter((baton) => baton !== old), next];
      routers.targets = router.map(({ rpc }) => rpc);
      exits.push(await old.end('SIGTERM'));
    }
    for (const old of facade) {
      const next = await startFacade();
      facade = [...facade.filter((baton) => baton !== old), next];
      exits.push(await old.end('SIGTERM'));
    }
  }
  over = true;
  await failed;
  expect(exits).toEqual(Array.from({ length: 8 }, () => 0));
  for (const { outcomes, id } of conversations) {
    expect(outcomes.length, id).toBeGreaterThan(2);
    expect(
      outcomes.slice(1).filter((outcome) => outcome !== 'hit'),
      id,
    ).toEqual([]);
  }
  for (const sim of [...pools.prefill, ...pools.decode]) {
    expect(sim.state()).toMatchObject({ mismatchedPulls: 0, doubleReads: 0, expiredReads: 0, hung: 0 });
  }
});
