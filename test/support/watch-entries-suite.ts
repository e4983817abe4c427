import { describe, expect, test } from 'vitest';
import { callId, newEntry } from './kv-store.ts';
import { sharedBackends } from './store-backends.ts';
import { refusal } from './store-messages.ts';
import { type LocalOptions, openLocalWorld, type StoreCase } from './store-world.ts';
import { putEntry, Watch } from './watch-reader.ts';
import { expectCheckpoint, testWatchOnTheWire } from './watch-wire-suite.ts';

/** Entries that come and go while a reader does not read: more than is kept for it. */
const UNREAD = 5_000;
/** Of these, what is under way at a time. */
const AT_ONCE = 100;

type Context = Parameters<typeof openLocalWorld>[2];

/** Entries that a busy watch sees. */
const FEW = 60;
/** The same, and more than a page of a snapshot. */
const MANY = 300;

/** What WatchEntries promises, over each of these. */
export function testWatchEntries(cases: readonly StoreCase[]): void {
  const backends = sharedBackends();

  describe.each(cases)('WatchEntries, $backend, $name', (storeCase) => {
    const opened = (context: Context, options: LocalOptions = {}) =>
      openLocalWorld(backends(), storeCase, context, options);

    const entries = storeCase.name === 'direct' ? MANY : FEW;
    testWatchOnTheWire((context) => opened(context, { limits: { tenantWatches: 3 } }), entries);

    test('none when the store closes', async (context) => {
      await using run = await opened(context);
      const watch = new Watch(run);
      expect(await watch.next()).toBe('all 0');
      run.service[Symbol.dispose]();
      expect(await refusal(watch.next())).toEqual({ reason: 'SHUTTING_DOWN' });
      expect(await refusal(new Watch(run).next())).toEqual({ reason: 'SHUTTING_DOWN' });
    });

    test('a token of another run gets a new snapshot', async (context) => {
      await using run = await opened(context);
      await putEntry(run, 'a');
      const watch = new Watch(run, { resumeToken: 'otherrun.5' });
      expect(await watch.take(3)).toEqual(['reset epoch', 'a idle', 'all 1']);
      await watch.end();
    });
  });
}

/** What readers that have nothing to read, and such that do not read, can rely on: this takes its time. */
export function testWatchReaders(cases: readonly StoreCase[]): void {
  const backends = sharedBackends();
  const backendNames = [...new Set(cases.map(({ backend }) => backend))];

  // Each takes a second, and all of them together no longer.
  test.for(backendNames)('a watch without changes says so, %s', async (backend, context) => {
    const checkpoints = cases
      .filter((storeCase) => storeCase.backend === backend)
      .map(async (storeCase) => {
        await using run = await openLocalWorld(backends(), storeCase, context);
        await expectCheckpoint(run);
      });
    await Promise.all(checkpoints);
  });

  // Where a reader that does not read holds its sender up at once.
  test.for(cases.filter(({ name }) => name === 'Connect on HTTP/2'))(
    'a reader that stops reads a new snapshot later, and costs others nothing, $backend, $name',
    async (storeCase, context) => {
      await using run = await openLocalWorld(backends(), storeCase, context);
      const comeAndGo = async (conversationId: string) => {
        const { entry } = await run.store.put({
          id: callId(),
          entry: newEntry({ key: { conversationId } }),
          derivedKey: false,
        });
        const { entryId } = entry;
        await run.store.delete({ id: callId(), entryId, tenant: undefined, revision: undefined });
      };
      const stuck = new Watch(run, { filter: {} });
      expect(await stuck.next()).toBe('all 0');
      const before = process.memoryUsage().heapUsed;
      for (let index = 0; index < UNREAD; index += AT_ONCE) {
        await Promise.all(Array.from({ length: AT_ONCE }, (_, more) => comeAndGo(`c${index + more}`)));
      }
      // Far less than a kilobyte for each change that it has not read: tombstones, the release queue and the history.
      expect((process.memoryUsage().heapUsed - before) / (2 * UNREAD)).toBeLessThan(4096);
      await putEntry(run, 'last');
      const quick = new Watch(run, { filter: {} });
      expect(await quick.take(2)).toEqual(['last idle', 'all 1']);
      // What was on its way when it stopped comes first, and then no more than what is still known.
      const told: string[] = [];
      while (told.at(-1) !== 'last idle') told.push(await stuck.next());
      expect(told).toContain('reset compacted');
      expect(told.length).toBeLessThan(UNREAD);
      await Promise.all([stuck.end(), quick.end()]);
    },
  );
}
