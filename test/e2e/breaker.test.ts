import { afterEach, describe, expect, test } from 'vitest';
import type { Sim } from '../../src/sim/start-sim.ts';
import { Conversation, chatWithPlan } from '../support/conversation.ts';
import { engine, type Ladder, legsOf, metricOf, startLadder } from './ladder-support.ts';

let harness: Ladder;
const start = async (openMs = 60_000) => {
  const yaml = `breaker: { failures: 3, pair_failures: 2, open: ${openMs}ms }\nretry: { budget_percent: 100 }\n`;
  harness = await startLadder({ yaml });
  await harness.ready();
};
afterEach(() => harness[Symbol.asyncDispose]());

const lines = (msg: RegExp) => harness.log.filter((line) => msg.test(String(line['msg'])));
const opened = () => lines(/left alone|used for a while/);

describe('a breaker', () => {
  test('is opened by no storm of 4xx, on either leg', async () => {
    await start();
    for (const status of [400, 404, 413, 422, 429]) {
      const fault = { kind: 'status', status, count: 5, body: { error: { message: 'no', code: status } } } as const;
      for (const sim of harness.prefill) await sim.setFault({ ...fault, leg: 'prefill' });
      for (let i = 0; i < 5; i++) expect((await harness.ask()).status).toBe(status);
      for (const sim of harness.prefill) await sim.clearFaults();
      for (const sim of harness.decode) await sim.setFault({ ...fault, leg: 'decode' });
      for (let i = 0; i < 5; i++) expect((await harness.ask()).status).toBe(status);
      for (const sim of harness.decode) await sim.clearFaults();
    }
    expect(opened()).toEqual([]);
    await harness.expectRight(await harness.ask());
  });

  test('takes an engine that answers 500 out of the plans, and a trial brings it back', async () => {
    await start(300);
    const sick = engine(harness.prefill, 1);
    await sick.setFault({ kind: 'status', status: 500, leg: 'prefill', count: 1000 });
    for (let i = 0; i < 8; i++) await harness.expectRight(await harness.ask());
    expect(opened()).toHaveLength(1);
    const series = `baton_breaker_open{scope="instance",engine="${new URL(sick.url).host}",peer=""}`;
    expect(await metricOf(harness, series)).toBe(1);
    // Three failures opened it; beyond these only trials reach it, ever fewer.
    const before = harness.callCounts()[1] ?? 0;
    for (let i = 0; i < 20; i++) await harness.expectRight(await harness.ask());
    expect((harness.callCounts()[1] ?? 0) - before).toBeLessThanOrEqual(3);
    await sick.clearFaults();
    await expect
      .poll(
        async () => {
          await harness.expectRight(await harness.ask());
          return metricOf(harness, series);
        },
        { timeout: 15_000, interval: 50 },
      )
      .toBe(0);
    expect(await metricOf(harness, 'baton_breaker_changes_total{scope="instance",to="closed"}')).toBe(1);
  });

  test('keeps two engines apart that cannot talk, while both serve with others', async () => {
    await start();
    const [p0, p1] = [engine(harness.prefill, 0), engine(harness.prefill, 1)];
    const d0 = engine(harness.decode, 0);
    await d0.setFault({ kind: 'status', status: 500, leg: 'decode', remote: p0.engineId, count: 1000 });
    // Round robin brings the two together every other time, until the breaker does not let it.
    for (let i = 0; i < 10; i++) await harness.expectRight(await harness.ask());
    expect(opened()).toMatchObject([
      { scope: 'pair', prefillId: new URL(p0.url).host, decodeId: new URL(d0.url).host },
    ]);
    const readFrom = (sim: Sim) =>
      legsOf(d0).filter(({ params }) => params?.['remote_engine_id'] === sim.engineId).length;
    expect(readFrom(p0)).toBe(2);
    expect(readFrom(p1)).toBeGreaterThan(0);
    expect(harness.callCounts().every((count) => count > 0)).toBe(true);
  });

  test('keeps stored handles from a prefill engine that cannot read them, and gives them to one that can', async () => {
    const yaml = `breaker: { failures: 9, pair_failures: 2, open: 60s }
retry: { budget_percent: 100 }
timeouts: { store: 5s, tokenize: 5s }
pools: { prefill: { bidirectional: on } }
`;
    harness = await startLadder({ yaml, decode: 1, engine: { bidirectional: true } });
    await harness.ready();
    const [p0, p1] = [engine(harness.prefill, 0), engine(harness.prefill, 1)];
    const d0 = engine(harness.decode);
    // In turn, so that every second turn goes to the second engine first.
    await p1.setFault({ kind: 'status', status: 500, leg: 'prefill', remote: d0.engineId, count: 1000 });
    const outcomes: string[] = [];
    for (let i = 0; i < 8; i++) {
      const talk = new Conversation(`talk-${i}`, { stream: true, plain: harness.plain });
      await talk.turn((body) => chatWithPlan(harness.url, body));
      outcomes.push(await talk.turn((body) => chatWithPlan(harness.url, body)));
    }
    const readings = (sim: Sim) =>
      legsOf(sim).filter(({ params }) => params?.['remote_engine_id'] === d0.engineId).length;
    expect(readings(p1)).toBe(2);
    expect(readings(p0)).toBe(6);
    expect(outcomes.filter((outcome) => outcome === 'hit')).toHaveLength(6);
    expect(opened()).toMatchObject([{ scope: 'pair', decodeId: new URL(d0.url).host }]);
  });
});
