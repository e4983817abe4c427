import { STORE_CASES, testKvCacheStore } from '../support/kv-cache-store-suite.ts';

testKvCacheStore(STORE_CASES);
