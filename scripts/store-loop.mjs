// How long the event loop of a `baton kvstore` process stands still while it is used over its unix socket, beside that of a
// process that does nothing: what the machine itself makes wait. Linux.
// Arguments: entries (default 100000), and of takes, expiry and eviction the one to measure (default all).
import { setTimeout as sleep } from 'node:timers/promises';
import { buildChain } from '../src/core/chain.ts';
import { sha256 } from '../src/services/sha256.ts';
import { ask, callKey, forEachNumber, keyOf, MODEL, machine, putRequest, startStoreAndIdle } from './store-process.mjs';

const count = Number(process.argv[2] ?? 100_000);
const only = process.argv[3];
const TOKENS = 4096;
/** So long that the bound of the store is reached in a minute. */
const LONG_TOKENS = 16_384;
const HOUR_MS = 3_600_000;

await using stack = new globalThis.AsyncDisposableStack();
const { store, idle, client } = await startStoreAndIdle(stack);
const ids = Array.from({ length: LONG_TOKENS }, (_, index) => (index * 7919) % 150_000);
let last = 0;

console.log(`${machine}; entries of ${TOKENS} tokens, to the bound of ${LONG_TOKENS}\n`);
console.log(
  '| what | calls | longest turn | 99.9 % | longest at work | 99.9 % | longest collection | idle: longest turn |',
);
console.log('|---|---|---|---|---|---|---|---|');

const phases = {
  async takes() {
    const first = last;
    await measured(`put ${many(count)}`, count, () => put(count));
    const byIds = { case: 'tokenIds', value: { tokenIds: ids.slice(0, TOKENS) } };
    const byChain = { case: 'promptChain', value: { chain: chainOf(TOKENS) } };
    await measured(`take and commit ${many(count)}`, 2 * count, () =>
      forEachNumber(first, first + count, async (number) => {
        // Ids cost the benchmark itself much more than a chain.
        const prompt = number % 4 === 0 ? byIds : byChain;
        const take = { idempotencyKey: callKey('take', number), key: keyOf(number), prompt };
        const { result } = await client.takeEntry(take);
        if (result.case !== 'taken') throw new Error(`not taken: ${result.value?.reason}`);
        await client.commitClaim({ claimId: result.value.claimId });
      }),
    );
  },
  async expiry() {
    const begin = performance.now();
    await put(count / 10);
    // Puts of all the others take no more than ten times as long.
    const end = performance.now() + 10 * (performance.now() - begin);
    await put(count, { ttlOf: () => Math.max(1000, end - performance.now()) });
    const before = await client.getStats({});
    await sleep(end - performance.now() + 100);
    await measured(`${many(count)} run out at once; put`, count / 10, () => put(count / 10));
    const { expirations } = await client.getStats({});
    if (Number(expirations - before.expirations) < count) throw new Error('too few ran out');
  },
  async eviction() {
    for (let evictions = 0n; evictions === 0n; { evictions } = await client.getStats({})) {
      await put(2000, { tokens: LONG_TOKENS });
    }
    await measured('put at the bound of 1 GiB', count / 2, () => put(count / 2, { tokens: LONG_TOKENS }));
  },
};

await put(2000);
for (const [name, run] of Object.entries(phases)) if (only === undefined || only === name) await run();

/** Puts `size` entries of conversations of their own. */
async function put(size, { tokens = TOKENS, ttlOf = () => HOUR_MS } = {}) {
  const first = last;
  last += size;
  const chain = chainOf(tokens);
  await forEachNumber(first, last, (number) => client.putEntry(putRequest(number, tokens, chain, ttlOf())));
}

function chainOf(tokens) {
  return buildChain(ids.slice(0, tokens), { model: MODEL, adapter: '', cacheSalt: '' }, sha256);
}

async function measured(name, calls, run) {
  await Promise.all([ask(store, 'look'), ask(idle, 'look')]);
  await run();
  const [busy, still] = await Promise.all([ask(store, 'look'), ask(idle, 'look')]);
  const { took, worked, longestPauseMs } = busy;
  const cells = [took.longestMs, took.p999Ms, worked.longestMs, worked.p999Ms, longestPauseMs, still.took.longestMs];
  console.log(`| ${name} | ${many(calls)} | ${cells.map((ms) => `${ms.toFixed(1)} ms`).join(' | ')} |`);
}

function many(number) {
  return number.toLocaleString('en');
}
