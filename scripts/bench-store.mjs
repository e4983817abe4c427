// Measures the in-memory store, without its service and a port: put, take and expiry while it fills, and the proof of a long
// prompt. How long calls took, and their processor time with garbage collection: flat where the last fifth is like the first.
// Argument: entries (default 1000000).
import { cpus } from 'node:os';
import { createHistogram } from 'node:perf_hooks';
import { buildChain, matchChain, packChain, promptOfIds } from '../src/core/chain.ts';
import { sha256 } from '../src/services/sha256.ts';
import { MemoryStore } from '../src/stores/memory/store.ts';
import { STORE_LIMITS } from '../src/stores/store.ts';

const total = Number(process.argv[2] ?? 1_000_000);
const slices = 5;
/** The bound of bytes is far off: what is measured is a store that keeps all it gets. */
const bounds = { totalBytes: 8 * 1024 ** 3, tenantEntries: 2 * total, tenantBytes: 8 * 1024 ** 3 };
const tokens = Array.from({ length: 128 }, (_, index) => index);
const seed = { model: 'm', adapter: '', cacheSalt: '' };
const chain = packChain(buildChain(tokens, seed, sha256));
const handle = new Uint8Array(200);

let now = 0;
const store = new MemoryStore({ now: () => now, limits: { ...STORE_LIMITS, ...bounds } });

async function timed(name, count, step) {
  const rates = [];
  const took = createHistogram();
  for (let slice = 0; slice < slices; slice++) {
    const begin = process.cpuUsage();
    for (let index = (slice * count) / slices; index < ((slice + 1) * count) / slices; index++) {
      const before = performance.now();
      await step(index);
      took.record(Math.max(1, Math.round((performance.now() - before) * 1e6)));
    }
    const { user, system } = process.cpuUsage(begin);
    rates.push(((user + system) * slices) / count);
  }
  const [p50, p99, p999] = [50, 99, 99.9].map((percent) => `${(took.percentile(percent) / 1000).toFixed(1)} µs`);
  const longest = (took.max / 1e6).toFixed(1);
  const rss = Math.round(process.memoryUsage().rss / 1024 ** 2);
  const slowest = rates.map((rate) => rate.toFixed(1)).join(' ');
  console.log(
    `| ${name} | ${count.toLocaleString('en')} | ${p50} | ${p99} | ${p999} | ${longest} ms | ${slowest} | ${rss} MiB |`,
  );
}

const key = (index) => ({ tenant: 't', model: 'm', adapter: '', cacheSalt: '', conversationId: `c${index}` });
const id = (kind, index) => ({ scope: 's', key: `${kind}${index}`, fingerprint: handle });
const owner = (index) => ({
  instanceId: `d${index % 16}`,
  engineId: 'e',
  life: { processStartSeconds: undefined, engineId: 'e', generation: 1 },
  compatGroup: '',
});
const put = (index) =>
  store.put({
    id: id('p', index),
    derivedKey: false,
    entry: {
      key: key(index),
      owner: owner(index),
      connector: 'nixl',
      handle,
      storedTokens: 128,
      chain,
      engineBlockSize: 16,
      blocks: 8,
      ttlMs: 450_000 + (index % 1000),
    },
  });

console.log(`${cpus()[0]?.model}, ${cpus().length} cores, Node ${process.versions.node}`);
console.log(
  `${total.toLocaleString('en')} entries of ${tokens.length} tokens; bound ${bounds.totalBytes / 1024 ** 3} GiB\n`,
);
console.log('| call | calls | p50 | p99 | p99.9 | longest | CPU a call by fifths, µs | RSS at the end |');
console.log('|---|---|---|---|---|---|---|---|');
await timed('put', total, put);
await timed('take and commit', total / 2, async (index) => {
  const prompt = promptOfIds(tokens, seed, sha256);
  const result = await store.take({
    id: id('t', index),
    key: key(index),
    prove: (stored, limit) => matchChain(prompt, stored, limit),
    minTokens: 64,
    compatGroup: '',
    deadlineMs: 120_000,
  });
  if (result.kind === 'miss') throw new Error('a miss');
  await store.commit(result.taken.claimId, () => true);
});
now += 500_000;
await timed('put and expire', total / 4, (index) => put(total + index));
const { entries } = await store.stats({});
if (entries !== total / 4) throw new Error(`${entries} live entries instead of ${total / 4}`);

const long = Array.from({ length: 32_768 }, (_, index) => (index * 7919) % 152_064);
const stored = packChain(buildChain(long, seed, sha256));
const times = [];
for (let run = 0; run < 200; run++) {
  const begin = performance.now();
  const prompt = promptOfIds(long, seed, sha256);
  if (matchChain(prompt, stored, long.length) !== long.length) throw new Error('no match');
  times.push(performance.now() - begin);
}
times.sort((a, b) => a - b);
console.log(`proof of 32k tokens: median ${times[100].toFixed(2)} ms, 95th ${times[190].toFixed(2)} ms`);
