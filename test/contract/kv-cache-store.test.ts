import { STORE_CASES, testKvCacheStore } from '../support/kv-cache-store-suite.ts';

// test/long has all of them.
const HERE = ['memory direct', 'memory gRPC on HTTP/2', 'valkey direct', 'valkey Connect on HTTP/2'];

testKvCacheStore(STORE_CASES.filter(({ backend, name }) => HERE.includes(`${backend} ${name}`)));
