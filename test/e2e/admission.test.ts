import { expect, test } from 'vitest';
import { chatBody, errorOf, metricOf, startLadder } from './ladder-support.ts';

test('requests over a limit wait in turn; over the limits of waiting they are told 429 or 503 and when to come again', async () => {
  await using harness = await startLadder({
    yaml: 'limits: { requests: 1 }\nqueue: { max: 2, tenant_max: 1 }\ntimeouts: { queue: 60s }\n',
    engine: { decodeMsPerToken: 40, eosEvery: 0 },
  });
  await harness.ready();
  const tenant = (key: string) => ({ authorization: `Bearer ${key}` });
  const body = chatBody({ stream: true, max_tokens: 24 });
  const running = harness.ask(body, tenant('one'));
  await expect
    .poll(() => harness.decode.some((sim) => sim.state().running > 0), { interval: 5, timeout: 10_000 })
    .toBe(true);
  const waiting = harness.ask(chatBody(), tenant('one'));
  const depth = (count: number) =>
    expect.poll(() => metricOf(harness, 'baton_queue_depth'), { interval: 5, timeout: 10_000 }).toBe(count);
  await depth(1);
  const refused = await harness.ask(chatBody(), tenant('one'));
  expect([refused.status, errorOf(refused).code]).toEqual([429, 'tenant_queue_full']);
  expect(Number(refused.headers.get('retry-after'))).toBeGreaterThanOrEqual(1);
  const other = harness.ask(chatBody(), tenant('two'));
  await depth(2);
  const full = await harness.ask(chatBody(), tenant('three'));
  expect([full.status, errorOf(full).code]).toEqual([503, 'queue_full']);
  expect(Number(full.headers.get('retry-after'))).toBeGreaterThanOrEqual(1);
  await harness.expectRight(await waiting);
  await harness.expectRight(await other);
  expect((await running).status).toBe(200);
  await depth(0);
});

test('who waits in vain for room is told that the engines are busy', async () => {
  await using harness = await startLadder({
    yaml: 'limits: { decode: 1 }\ntimeouts: { queue: 200ms }\n',
    decode: 1,
    engine: { decodeMsPerToken: 40, eosEvery: 0 },
  });
  await harness.ready();
  const running = harness.ask(chatBody({ max_tokens: 24 }));
  await expect.poll(() => harness.decode[0]?.state().running, { interval: 5, timeout: 10_000 }).toBe(1);
  // All of them: also who waits behind another and is never tried himself.
  for (const late of await Promise.all([1, 2, 3].map(() => harness.ask()))) {
    expect([late.status, errorOf(late).code, late.headers.get('retry-after')]).toEqual([503, 'overloaded', '1']);
  }
  expect((await running).status).toBe(200);
});
