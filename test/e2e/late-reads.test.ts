import { expect, test } from 'vitest';
import { stateWord } from '../../src/core/instance-words.ts';
import { connectRemote } from '../../src/rpc/clients.ts';
import { chatBody, engine, legsOf, metricOf, startLadder } from './ladder-support.ts';

test('a decode engine that stood still past a lease gets no turns until it is restarted: its cache is poisoned', async () => {
  await using harness = await startLadder({
    prefill: 1,
    // Small enough that other prompts take the place of one whose lease is over.
    engine: { recordRequests: true, numBlocks: 48, kvLeaseMs: 1500 },
    yaml: `
pools: { prefill: { kv_lease: 1500ms } }
kv: { lease_margin: 500ms }
health: { interval: 100ms, timeout: 250ms, failures: 1, damping: 0 }
`,
  });
  using remote = connectRemote({ url: harness.rpcUrl });
  const [still, other] = [engine(harness.decode, 0), engine(harness.decode, 1)];
  const instanceId = new URL(still.url).host;
  const stateOf = async () => {
    const { instance } = await remote.poolRegistry.getInstance({ instanceId });
    return `${stateWord(instance?.state ?? 0)} ${instance?.stateReason}`;
  };
  const another = (i: number) =>
    chatBody({ messages: [{ role: 'user', content: `${i} `.repeat(120) }], max_tokens: 8, ignore_eos: true });

  await still.setFault({ kind: 'pause' });
  const reply = await harness.ask();
  await harness.expectRight(reply);
  expect(legsOf(other)).toHaveLength(1);
  await expect.poll(stateOf, { timeout: 10_000 }).toMatch(/^gone/);
  // Before that it would read in time, and what others ask could not take the place.
  await expect.poll(() => engine(harness.prefill, 0).state().pins, { timeout: 10_000 }).toBe(0);
  for (let i = 0; i < 6; i += 1) await harness.expectRight(await harness.ask(another(i)), another(i));

  await still.clearFaults();
  await expect.poll(stateOf, { timeout: 10_000 }).toBe('draining late_read');
  // What the test is about did happen.
  await expect.poll(() => still.state().latePulls).toBe(1);
  expect(still.state().mismatchedPulls).toBe(1);
  const before = legsOf(still).length;
  for (let i = 0; i < 4; i += 1) await harness.expectRight(await harness.ask());
  expect(legsOf(still)).toHaveLength(before);
  expect(await metricOf(harness, 'baton_late_reads_total')).toBe(1);
  expect(harness.log.some(({ msg, instance }) => instance === instanceId && /stood still/.test(String(msg)))).toBe(
    true,
  );

  await still.restart();
  await expect.poll(stateOf, { timeout: 10_000 }).toBe('ready probe_ok');
  for (let i = 0; i < 4; i += 1) await harness.expectRight(await harness.ask());
  expect(legsOf(still).length).toBeGreaterThan(before);
});
