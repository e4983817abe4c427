import { describe, test } from 'vitest';
import { foreignStore } from '../support/foreign-store.ts';
import { testStoreOnTheWire } from '../support/store-wire-suite.ts';
import { expectCheckpoint, testWatchOnTheWire } from '../support/watch-wire-suite.ts';

/** Entries that a busy watch sees: more than a page of most snapshots. */
const ENTRIES = 300;

// `npm run conformance`: any implementation of KVCacheStore, or whatever stands before one. Each test has its own names,
// so the store may be in use.
describe.each(foreignStore(process.env))('KVCacheStore, $name', ({ open }) => {
  testStoreOnTheWire(open);
  testWatchOnTheWire(open, ENTRIES);

  test('a watch without changes says so', async (context) => {
    await using run = await open(context);
    await expectCheckpoint(run);
  });
});
