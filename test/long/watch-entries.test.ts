import { STORE_CASES } from '../support/store-world.ts';
import { testWatchEntries, testWatchReaders } from '../support/watch-entries-suite.ts';

testWatchEntries(STORE_CASES);
testWatchReaders(STORE_CASES);
