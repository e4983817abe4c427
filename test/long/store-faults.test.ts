import { describe, expect, test } from 'vitest';
import type { Conversation } from '../support/conversation.ts';
import { SLOW, SplitStore, STORE_FAULTS } from '../support/split-store.ts';

/** Requests of which each would wait for the store, were it asked. */
const REQUESTS = 40;

async function healthy(split: SplitStore, id: string): Promise<Conversation> {
  const conversation = split.newConversation(id);
  for (const outcome of ['none', 'hit', 'hit']) expect(await split.settledTurn(conversation)).toBe(outcome);
  return conversation;
}

/** Milliseconds that each of the turns took, in order of length. */
async function timed(split: SplitStore, conversation: Conversation, turns: number): Promise<readonly number[]> {
  const times: number[] = [];
  for (let turn = 0; turn < turns; turn++) {
    const begin = performance.now();
    await split.turn(conversation);
    times.push(performance.now() - begin);
  }
  return times.toSorted((a, b) => a - b);
}

const median = (sorted: readonly number[]) => sorted[Math.floor(sorted.length / 2)] ?? Number.NaN;
const linesWith = ({ front }: SplitStore, text: string) => front.lines.filter((line) => line.includes(text));

describe('with a budget that every healthy answer keeps', () => {
  /** Long for a busy machine, and short beside what a store that is away would cost. */
  const BUDGET_MS = 500;
  const CONFIG = `
pools: { prefill: { bidirectional: on } }
timeouts: { store: ${BUDGET_MS}ms, tokenize: 5s }
`;

  /** The store is there again: turns ask it by themselves, and read what the one before left. */
  async function expectRecovery(split: SplitStore, conversation: Conversation): Promise<void> {
    await expect.poll(() => split.settledTurn(conversation), SLOW).toBe('hit');
    expect(await split.isOpen()).toBe(0);
    const before = await split.unavailable();
    for (let turn = 0; turn < 3; turn++) expect(await split.settledTurn(conversation)).toBe('hit');
    expect(await split.unavailable()).toBe(before);
  }

  test.for(STORE_FAULTS)(
    'a store that is $name: turns go on without it, and with it once it is back',
    async (fault) => {
      await using split = await SplitStore.start(CONFIG);
      const conversation = await healthy(split, 'before');
      const wellTimes = await timed(split, split.newConversation('pace'), 12);
      expect([await split.failures(), await split.isOpen(), await split.unavailable()]).toEqual([0, 0, 0]);

      await fault.begin(split);
      const without = split.newConversation('without');
      const times = await timed(split, without, REQUESTS);
      expect(await split.isOpen()).toBe(1);
      expect(new Set(without.outcomes)).toEqual(new Set(['miss_store_unavailable']));
      expect(await split.unavailable()).toBe(REQUESTS);
      // It is asked five times, and then now and then: hardly a request waits for it.
      const asked = await split.failures();
      expect(asked).toBeGreaterThanOrEqual(5);
      expect(asked).toBeLessThan(REQUESTS / 2);
      expect(median(times)).toBeLessThan(1.5 * median(wellTimes) + BUDGET_MS);
      expect(linesWith(split, 'the store does not answer')).toHaveLength(1);

      await fault.end(split);
      await expectRecovery(split, conversation);
      await expectRecovery(split, without);
      expect(linesWith(split, 'the store answers again')).toHaveLength(1);
    },
  );

  test('a store that is restarted: after a clean stop it has all handles, after a kill none', async () => {
    await using split = await SplitStore.start(CONFIG);
    const kept = [await healthy(split, 'a'), await healthy(split, 'b')];
    const probe = split.newConversation('probe');

    await split.store.end('SIGTERM');
    await split.startStore();
    await expect.poll(() => split.settledTurn(probe), SLOW).toBe('hit');
    for (const conversation of kept) expect(await split.settledTurn(conversation)).toBe('hit');

    await split.store.end('SIGKILL');
    await split.startStore();
    await expect.poll(() => split.settledTurn(probe), SLOW).toBe('hit');
    for (const conversation of kept) {
      expect(await split.settledTurn(conversation)).toMatch(/^miss_(never|store_epoch)$/);
      expect(await split.settledTurn(conversation)).toBe('hit');
    }
  });
});

// 20 ms, which a busy machine may also need for a healthy answer: that is no error, but a turn without the store.
describe('with the default budget', () => {
  const CONFIG = `
pools: { prefill: { bidirectional: on } }
timeouts: { tokenize: 5s }
`;
  /** A call without a budget would end when its connection is found dead, after 20 s. */
  const PATIENCE_MS = 5000;
  const AT_ONCE = 8;
  const TURNS = 4;

  /** Milliseconds of the slowest of turns at once. */
  async function slowest(split: SplitStore, clients: readonly Conversation[]): Promise<number> {
    const begin = performance.now();
    await Promise.all(clients.map((client) => split.turn(client)));
    return performance.now() - begin;
  }

  test.for(STORE_FAULTS)('a store that is $name: no turn fails, and hits come back', async (fault) => {
    await using split = await SplitStore.start(CONFIG);
    const conversation = split.newConversation('before');
    await expect.poll(() => split.settledTurn(conversation), SLOW).toBe('hit');
    const pace = Array.from({ length: AT_ONCE }, (_, index) => split.newConversation(`pace-${index}`));
    const well = await slowest(split, pace);
    // On a busy machine the pace alone can have opened the breaker: the fault is to do that.
    await expect.poll(() => split.settledTurn(conversation), SLOW).toBe('hit');
    expect(await split.isOpen()).toBe(0);
    const failuresBefore = await split.failures();
    const unavailableBefore = await split.unavailable();

    await fault.begin(split);
    // Many at once: those that wait for the store while the breaker is closed are not held up by one another.
    const clients = Array.from({ length: AT_ONCE }, (_, index) => split.newConversation(`without-${index}`));
    for (let turn = 0; turn < TURNS; turn++) {
      expect(await slowest(split, clients)).toBeLessThan(4 * well + PATIENCE_MS);
    }
    expect(new Set(clients.flatMap(({ outcomes }) => outcomes))).toEqual(new Set(['miss_store_unavailable']));
    expect(await split.unavailable()).toBe(unavailableBefore + TURNS * AT_ONCE);
    const asked = (await split.failures()) - failuresBefore;
    expect(asked).toBeGreaterThanOrEqual(1);
    // The first ones all ask, and then hardly one.
    expect(asked).toBeLessThan(2 * AT_ONCE);
    expect(await split.isOpen()).toBe(1);

    await fault.end(split);
    for (const client of [conversation, ...clients.slice(0, 1)]) {
      await expect.poll(() => split.settledTurn(client), SLOW).toBe('hit');
    }
    await expect.poll(split.isOpen, SLOW).toBe(0);
  });
});
