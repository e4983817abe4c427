import { testKvCacheStore } from '../support/kv-cache-store-suite.ts';
import { storeCases } from '../support/store-world.ts';

// test/long has all of them.
testKvCacheStore(storeCases('memory direct', 'memory gRPC on HTTP/2', 'valkey direct', 'valkey Connect on HTTP/2'));
