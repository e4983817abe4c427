import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, test } from 'vitest';
import { type SimPools, startSimPools } from '../../src/sim/pools.ts';
import { startSim } from '../../src/sim/start-sim.ts';
import { metricOf } from '../e2e/ladder-support.ts';
import { type BatonProcess, startBatonProcess } from '../support/baton-process.ts';
import { Conversation, chatWithPlan } from '../support/conversation.ts';
import { type Switchboard, startSwitchboard } from '../support/switchboard.ts';

// The store in a process of its own, behind a line that can be cut, slow or parted.
const ENGINE = { bidirectional: true, blockSize: 16, maxModelLen: 8192, eosEvery: 0, seed: 9 } as const;
/** What a call to the store may take: long for a busy machine, and short beside what a store that is away would cost. */
const BUDGET_MS = 500;
const CONFIG = `
pools: { prefill: { bidirectional: on } }
timeouts: { store: ${BUDGET_MS}ms, tokenize: 5s }
`;
/** Requests of which each would wait for the store, were it asked. */
const REQUESTS = 40;
/** For what a loaded machine, or the breaker's longest time of 4 s, may delay. */
const SLOW = { timeout: 60_000, interval: 200 };

let stack: AsyncDisposableStack;
let pools: SimPools;
let line: Switchboard;
let store: BatonProcess;
let front: BatonProcess;
let startStore: () => Promise<void>;
let conversations: Conversation[];
let newConversation: (id: string) => Conversation;

beforeEach(async () => {
  stack = new AsyncDisposableStack();
  pools = stack.use(await startSimPools({ prefill: 2, decode: 2, engine: ENGINE }));
  const plain = await startSim({ ...ENGINE, role: 'both', connector: 'none' });
  stack.defer(() => plain.close());
  conversations = [];
  newConversation = (id) => {
    const conversation = new Conversation(id, { stream: true, plain });
    conversations.push(conversation);
    return conversation;
  };
  const folder = mkdtempSync(join(tmpdir(), 'baton-store-faults-'));
  stack.defer(() => rmSync(folder, { recursive: true }));
  const file = join(folder, 'baton.yaml');
  writeFileSync(file, CONFIG);
  line = stack.use(await startSwitchboard());
  startStore = async () => {
    const snapshot = ['--store-snapshot', join(folder, 'store.snapshot')];
    store = stack.use(await startBatonProcess(['--roles', 'kvstore', ...snapshot]));
    line.targets = [store.rpc];
  };
  await startStore();
  const engines = (['prefill', 'decode'] as const).flatMap((role) =>
    pools[role].flatMap(({ url }) => [`--${role}`, url]),
  );
  const roles = ['--roles', 'facade,router,registry', '--kvstore-url', `http://${line.address}`];
  front = stack.use(await startBatonProcess([...roles, '--config', file, ...engines]));
});
afterEach(async () => {
  // Whatever happened to the store: nobody read what was not his, or twice, or too late.
  const harm = [...pools.prefill, ...pools.decode].map((sim) => {
    const { mismatchedPulls, doubleReads, expiredReads, hung, deathReason } = sim.state();
    return { mismatchedPulls, doubleReads, expiredReads, hung, deathReason };
  });
  await stack.disposeAsync();
  const unharmed = { mismatchedPulls: 0, doubleReads: 0, expiredReads: 0, hung: 0, deathReason: null };
  expect(harm).toEqual(harm.map(() => unharmed));
});

const send = (body: unknown) => chatWithPlan(front.url, body);
const failures = () => metricOf(front, 'baton_store_failures_total');
const isOpen = () => metricOf(front, 'baton_store_breaker_open');
const unavailable = () => metricOf(front, 'baton_reuse_total{outcome="miss_store_unavailable"}');

/** Turns whose handle the store has got, or is given up. */
const settled = async () => {
  const fates = ['stored', 'store_unavailable'].map((fate) =>
    metricOf(front, `baton_decode_handles_total{fate="${fate}"}`),
  );
  return (await Promise.all(fates)).reduce((sum, count) => sum + count);
};

/** A turn; what became of its handle, and of those of the turns before, is known when this resolves. */
async function settledTurn(conversation: Conversation): Promise<string> {
  const outcome = await conversation.turn(send);
  const turns = conversations.reduce((sum, { outcomes }) => sum + outcomes.length, 0);
  await expect.poll(settled, SLOW).toBe(turns);
  return outcome;
}

async function healthy(id: string): Promise<Conversation> {
  const conversation = newConversation(id);
  for (const outcome of ['none', 'hit', 'hit']) expect(await settledTurn(conversation)).toBe(outcome);
  return conversation;
}

/** Milliseconds that each of the turns took, in order of length. */
async function timed(conversation: Conversation, turns: number): Promise<readonly number[]> {
  const times: number[] = [];
  for (let turn = 0; turn < turns; turn++) {
    const begin = performance.now();
    await conversation.turn(send);
    times.push(performance.now() - begin);
  }
  return times.toSorted((a, b) => a - b);
}

const median = (sorted: readonly number[]) => sorted[Math.floor(sorted.length / 2)] ?? Number.NaN;

/** The store is there again: turns ask it by themselves, and read what the one before left. */
async function expectRecovery(conversation: Conversation): Promise<void> {
  await expect.poll(() => settledTurn(conversation), SLOW).toBe('hit');
  expect(await isOpen()).toBe(0);
  const before = await unavailable();
  for (let turn = 0; turn < 3; turn++) expect(await settledTurn(conversation)).toBe('hit');
  expect(await unavailable()).toBe(before);
}

const FAULTS: Readonly<Record<string, { readonly begin: () => Promise<void>; readonly end: () => Promise<void> }>> = {
  killed: {
    async begin() {
      line.targets = [];
      await store.end('SIGKILL');
    },
    end: () => startStore(),
  },
  paused: {
    begin: async () => store.signal('SIGSTOP'),
    end: async () => store.signal('SIGCONT'),
  },
  slow: {
    async begin() {
      line.delayMs = 2 * BUDGET_MS;
    },
    async end() {
      line.delayMs = 0;
    },
  },
  parted: {
    async begin() {
      line.delayMs = Number.POSITIVE_INFINITY;
    },
    async end() {
      line.delayMs = 0;
    },
  },
};

test.each(Object.keys(FAULTS))(
  'a store that is %s: turns go on without it, and with it once it is back',
  async (name) => {
    const fault = FAULTS[name];
    if (fault === undefined) throw new Error(name);
    const conversation = await healthy('before');
    const wellTimes = await timed(newConversation('pace'), 12);
    expect([await failures(), await isOpen(), await unavailable()]).toEqual([0, 0, 0]);

    await fault.begin();
    const without = newConversation('without');
    const times = await timed(without, REQUESTS);
    expect(await isOpen()).toBe(1);
    expect(new Set(without.outcomes)).toEqual(new Set(['miss_store_unavailable']));
    expect(await unavailable()).toBe(REQUESTS);
    // It is asked five times, and then now and then: hardly a request waits for it.
    const asked = await failures();
    expect(asked).toBeGreaterThanOrEqual(5);
    expect(asked).toBeLessThan(REQUESTS / 2);
    expect(median(times)).toBeLessThan(1.5 * median(wellTimes) + BUDGET_MS);
    expect(front.lines.filter((text) => text.includes('the store does not answer'))).toHaveLength(1);

    await fault.end();
    await expectRecovery(conversation);
    await expectRecovery(without);
    expect(front.lines.filter((text) => text.includes('the store answers again'))).toHaveLength(1);
  },
);

test('a store that is restarted: after a clean stop it has all handles, after a kill none', async () => {
  const kept = [await healthy('a'), await healthy('b')];
  const probe = newConversation('probe');

  await store.end('SIGTERM');
  await startStore();
  await expect.poll(() => settledTurn(probe), SLOW).toBe('hit');
  for (const conversation of kept) expect(await settledTurn(conversation)).toBe('hit');

  await store.end('SIGKILL');
  await startStore();
  await expect.poll(() => settledTurn(probe), SLOW).toBe('hit');
  for (const conversation of kept) {
    expect(await settledTurn(conversation)).toMatch(/^miss_(never|store_epoch)$/);
    expect(await settledTurn(conversation)).toBe('hit');
  }
});
