import { expect, test } from 'vitest';
import { engine, legsOf, startLadder } from '../e2e/ladder-support.ts';
import { Conversation, chatWithPlan } from '../support/conversation.ts';

/** Every time of the configuration, off. */
const OFF = [
  ...['connect', 'store', 'tokenize', 'prefill_warm', 'prefill_warm_per_token', 'prefill_cold', 'first_content'],
  ...['whole_reply', 'idle', 'client_stall', 'router', 'queue', 'drain', 'drain_settle', 'keep_alive'],
];

test('with every time off nothing bites: both turns are right however slow the engines are', async () => {
  await using harness = await startLadder({
    yaml: `timeouts: { ${OFF.map((name) => `${name}: 0`).join(', ')} }\nhealth: { timeout: 0 }\n`,
    engine: { bidirectional: true },
  });
  await harness.ready();
  for (const sim of [...harness.prefill, ...harness.decode]) {
    await sim.setFault({ kind: 'stall', ms: 600, count: 2 });
    await sim.setFault({ kind: 'slow', ms: 15, count: 4 });
  }
  const talk = new Conversation('slow', { stream: true, plain: harness.plain });
  await talk.turn((body) => chatWithPlan(harness.url, body));
  expect(await talk.turn((body) => chatWithPlan(harness.url, body))).toBe('hit');
  const legs = [...harness.prefill, ...harness.decode].flatMap(legsOf);
  expect(legs.length).toBeGreaterThanOrEqual(4);
  // No connection is kept, so none is used twice.
  expect(legs.filter(({ onConnection }) => onConnection > 1)).toEqual([]);
  await harness.expectUnharmed();
});

test('with no time to wait, a request that finds no pair is told so at once', async () => {
  await using harness = await startLadder({
    yaml: 'timeouts: { queue: 0 }\nhealth: { interval: 100ms, failures: 1 }\n',
  });
  await harness.ready();
  for (const sim of harness.prefill) await sim.crash();
  await expect.poll(async () => (await fetch(`${harness.url}/readiness`)).status).toBe(503);
  const reply = await fetch(`${harness.url}/v1/chat/completions`, {
    method: 'POST',
    body: JSON.stringify({ model: 'sim-model', messages: [{ role: 'user', content: 'x' }] }),
  });
  expect([reply.status, reply.headers.get('retry-after')]).toEqual([503, '1']);
  expect(legsOf(engine(harness.decode))).toEqual([]);
});
