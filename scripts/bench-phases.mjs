// Whether the phases of a trace add up to what the client waits for: facade, router with registry, and store are processes of
// their own and tell a receiver of OTLP in this one, which also has the engines and the clients. Beside each request the same
// one goes to a process that answers at once: what the way there and back costs alone. Arguments: requests of each row
// (default 200), simulated engines' time for a leg in ms (default 20).
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { setTimeout } from 'node:timers/promises';
import { TTFT_PHASES } from '../src/obs/metrics.ts';
import { startSimPools } from '../src/sim/pools.ts';
import { startBatonProcess } from '../test/support/baton-process.ts';
import { firstContent } from '../test/support/first-content.ts';
import { quantile } from '../test/support/hostile.ts';
import { startOtlpReceiver } from '../test/support/otlp-receiver.ts';
import { machine } from './store-process.mjs';

const requests = Number(process.argv[2] ?? 200);
const fixedMs = Number(process.argv[3] ?? 20);
const BODY = JSON.stringify({ model: 'sim-model', prompt: 'x'.repeat(400), max_tokens: 4, stream: true });

await using stack = new globalThis.AsyncDisposableStack();
const collector = stack.use(await startOtlpReceiver());
const engine = { fixedMs, pullMsPerBlock: 0.1, eosEvery: 0 };
const pools = stack.use(await startSimPools({ prefill: 1, decode: 1, engine }));
const engines = ['prefill', 'decode'].flatMap((role) => pools[role].flatMap(({ url }) => [`--${role}`, url]));
const BARE = `
const server = require('node:http').createServer((request, response) =>
  request.on('end', () => response.end('data: x')).resume());
server.listen(0, '127.0.0.1', () => process.send(server.address().port));
process.on('disconnect', () => process.exit());
`;
const bareServer = spawn(process.execPath, ['-e', BARE], { stdio: ['ignore', 'ignore', 'inherit', 'ipc'] });
stack.defer(() => bareServer.disconnect());
const [barePort] = await once(bareServer, 'message');
const started = [];
const open = async (roles, args) => {
  const baton = await startBatonProcess(['--roles', roles, '--otlp-endpoint', collector.url, ...args]);
  started.push(baton);
  return baton;
};
const store = await open('kvstore', []);
const router = await open('router,registry', ['--kvstore-url', `http://${store.rpc}`, ...engines]);
const facade = await open('facade', ['--router-url', `http://${router.rpc}`, '--kvstore-url', `http://${store.rpc}`]);
for (let ready = 0; ready !== 200; await setTimeout(100)) ready = (await fetch(`${facade.url}/readiness`)).status;
const bareUrl = `http://127.0.0.1:${barePort}`;
for (let i = 0; i < 100; i += 1) for (const url of [facade.url, bareUrl]) await firstContent(url, BODY);

const waited = new Map();
const bare = new Map();
const idOf = (clients, i) => `${String(clients).padStart(16, '0')}${String(i + 1).padStart(16, '0')}`;
const ROWS = [1, 8];
for (const clients of ROWS) {
  let next = 0;
  const one = async () => {
    while (next < requests) {
      const trace = idOf(clients, next++);
      const traceparent = `00-${trace}-b7ad6b7169203331-01`;
      waited.set(trace, await firstContent(facade.url, BODY, { traceparent }));
      // After the same silence of that process as the facade had.
      bare.set(trace, await firstContent(bareUrl, BODY, { traceparent }));
    }
  };
  await Promise.all(Array.from({ length: clients }, one));
}
// Spans that wait are sent when their process ends.
for (const baton of started.toReversed()) await baton[Symbol.asyncDispose]();
if (collector.refused.length > 0) throw new Error(collector.refused[0]);

const names = new Set(TTFT_PHASES);
const sums = new Map();
for (const { traceId, name, parentId, startAt, endAt } of collector.spans) {
  if (!waited.has(traceId) || !names.has(name)) continue;
  const phases = sums.get(traceId) ?? {};
  // A wait in the router's queue is inside the planning.
  if (name !== 'queue') phases[name] = (phases[name] ?? 0) + Number(endAt - startAt) / 1e6;
  sums.set(traceId, phases);
  if (parentId === '') throw new Error(`${name} has no parent`);
}
const total = (phases) => Object.values(phases).reduce((sum, part) => sum + part, 0);
const spread = (values, digits = 2) => {
  const sorted = values.toSorted((a, b) => a - b);
  return [0.5, 0.99].map((share) => quantile(sorted, share).toFixed(digits)).join(' / ');
};

console.log(`${machine}; ${requests} requests each; milliseconds, median / 99 %\n`);
console.log(`| | ${ROWS.map((clients) => `${clients} at a time`).join(' | ')} |`);
console.log(`|---|${ROWS.map(() => '---:|').join('')}`);
const row = (what, read) => {
  const cells = ROWS.map((clients) => {
    const ids = Array.from({ length: requests }, (_, i) => idOf(clients, i));
    return spread(ids.map((id) => read(waited.get(id), sums.get(id), bare.get(id))));
  });
  console.log(`| ${what} | ${cells.join(' | ')} |`);
};
for (const phase of TTFT_PHASES) row(`span \`${phase}\``, (_, phases) => phases[phase] ?? 0);
row('all spans of a request together', (_, phases) => total(phases));
row('first content, as the client sees it', (client) => client);
row('what no span shows', (client, phases) => client - total(phases));
row('the same request to a process that answers at once', (_client, _phases, alone) => alone);
