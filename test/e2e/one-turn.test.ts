import { expect, onTestFinished, test } from 'vitest';
import { post, startHarness } from '../support/harness.ts';
import { metricOf } from './ladder-support.ts';

/** Blocks of the decode engine: a third of what the requests pin. */
const BLOCKS = 400;
const REQUESTS = 60;

/** Nothing says whether the prefill engine reads (`bidirectional: auto`), and no conversation is ever gone on with. */
async function start() {
  const harness = await startHarness({
    prefill: 1,
    decode: 1,
    engine: { bidirectional: true, eosEvery: 0 },
    engineOf: (role) => (role === 'decode' ? { numBlocks: BLOCKS } : {}),
    yaml: 'health: { interval: 250ms }\ntimeouts: { store: 10s, tokenize: 10s }\n',
  });
  onTestFinished(() => harness[Symbol.asyncDispose]());
  await harness.ready();
  return harness;
}

test('clients that never come back do not fill a decode engine: a release finds out who reads', async () => {
  const harness = await start();
  for (let index = 0; index < REQUESTS; index++) {
    const prompt = `${index}: ${'what is a relay? '.repeat(18)}`;
    const reply = await post(`${harness.url}/v1/completions`, { model: 'sim-model', prompt, max_tokens: 2 });
    expect(reply.status, reply.text).toBe(200);
  }
  expect(await metricOf(harness, 'baton_releases_total{result="sent"}')).toBeGreaterThan(0);
  for (const sim of [...harness.prefill, ...harness.decode]) {
    expect(sim.state()).toMatchObject({ pinsExpired: 0, leakedPins: 0, hung: 0, doubleReads: 0, mismatchedPulls: 0 });
  }
});
