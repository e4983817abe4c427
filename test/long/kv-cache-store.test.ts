import { testKvCacheStore } from '../support/kv-cache-store-suite.ts';
import { STORE_CASES } from '../support/store-world.ts';

testKvCacheStore(STORE_CASES);
