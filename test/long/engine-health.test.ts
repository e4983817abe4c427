import { afterEach, expect, test } from 'vitest';
import type { Sim } from '../../src/sim/start-sim.ts';
import { chatBody, engine, type Ladder, legsOf, startLadder } from '../e2e/ladder-support.ts';
import type { HarnessOptions } from '../support/harness.ts';

const YAML = `
health: { interval: 100ms, timeout: 400ms, failures: 2, damping: 0 }
pools: { prefill: { kv_lease: 1s } }
kv: { lease_margin: 500ms }
`;

let harness: Ladder;
const start = async (options: HarnessOptions = {}) => {
  harness = await startLadder({ yaml: YAML, ...options });
  await harness.ready();
};
afterEach(() => harness[Symbol.asyncDispose]());

const host = (sim: Sim) => new URL(sim.url).host;
const changes = (sim: Sim) =>
  harness.log.filter(({ msg, instance }) => msg === 'instance changed state' && instance === host(sim));
const turned = (sim: Sim, to: string) =>
  expect.poll(() => changes(sim).at(-1)?.['to'], { timeout: 15_000, interval: 20 }).toBe(to);

test('busy is not dead: an engine that sends is not lost, however slow its health route is', async () => {
  await start({ decode: 1, engine: { decodeMsPerToken: 30, eosEvery: 0 } });
  const busy = engine(harness.decode);
  // Every probe of it runs into its limit from now on.
  await busy.setFault({ kind: 'hang', path: '/health', count: 1000 });
  const body = chatBody({ stream: true, max_tokens: 50 });
  const reply = await harness.ask(body);
  const probes = busy.requests.filter(({ path }) => path === '/health').length;
  expect(changes(busy).filter(({ to }) => to === 'suspect')).toEqual([]);
  expect(probes).toBeGreaterThan(2);
  await harness.expectRight(reply, body);
  // With nothing to send, nothing speaks for it any more.
  await turned(busy, 'suspect');
  await busy.clearFaults();
  await turned(busy, 'ready');
});

test('a stopped engine leaves, the other serves meanwhile, and it comes back when it goes on', async () => {
  await start();
  const [stopped, other] = [engine(harness.prefill, 0), engine(harness.prefill, 1)];
  await stopped.setFault({ kind: 'pause' });
  await turned(stopped, 'suspect');
  expect(changes(stopped).at(-1)).toMatchObject({ reason: 'probe_timeout' });
  const before = legsOf(other).length;
  for (let i = 0; i < 4; i++) await harness.expectRight(await harness.ask());
  expect(legsOf(other).length - before).toBe(4);
  await stopped.clearFaults();
  await turned(stopped, 'ready');
  const then = legsOf(stopped).length;
  for (let i = 0; i < 4; i++) await harness.expectRight(await harness.ask());
  expect(legsOf(stopped).length - then).toBe(2);
  await harness.expectUnharmed();
});

test('a request whose engine was stopped under it is served by another one, on either leg', async () => {
  await start({ engine: { prefillMsPerToken: 10 } });
  const [p, d] = [engine(harness.prefill), engine(harness.decode)];
  const reply = harness.ask();
  await expect.poll(() => harness.callCounts()[0], { interval: 5 }).toBe(1);
  await p.setFault({ kind: 'pause' });
  await d.setFault({ kind: 'pause' });
  await harness.expectRight(await reply);
  // The second P served, and only then the first D was asked, or not even that, because it was known to be away.
  expect(legsOf(engine(harness.prefill, 1)).length).toBeGreaterThan(0);
  expect(legsOf(engine(harness.decode, 1))).toHaveLength(1);
  await p.clearFaults();
  await d.clearFaults();
});
