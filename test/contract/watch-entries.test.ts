import { storeCases } from '../support/store-world.ts';
import { testWatchEntries, testWatchReaders } from '../support/watch-entries-suite.ts';

// test/long has all of them.
testWatchEntries(storeCases('memory direct', 'valkey Connect on HTTP/2'));
testWatchReaders(storeCases('memory Connect on HTTP/2'));
