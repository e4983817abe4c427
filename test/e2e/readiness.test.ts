import { expect, test } from 'vitest';
import { connectRemote } from '../../src/rpc/clients.ts';
import { engine, startLadder } from './ladder-support.ts';

test('readiness turns false exactly when no pair is left, whatever took the engines away', async () => {
  await using harness = await startLadder({
    yaml: 'health: { interval: 100ms, timeout: 1s, failures: 1, damping: 0 }',
  });
  using remote = connectRemote({ url: harness.rpcUrl });
  const { poolRegistry } = remote;
  await harness.ready();
  const readiness = async () => (await fetch(`${harness.url}/readiness`)).status;
  const turns = (status: number) => expect.poll(readiness, { interval: 20, timeout: 10_000 }).toBe(status);
  const [p0, p1] = [engine(harness.prefill, 0), engine(harness.prefill, 1)];
  const [d0, d1] = [engine(harness.decode, 0), engine(harness.decode, 1)];
  const id = (sim: typeof p0) => new URL(sim.url).host;
  const stateOf = async (sim: typeof p0) =>
    (await poolRegistry.getInstance({ instanceId: id(sim) })).instance?.stateReason;

  await p0.setFault({ kind: 'refuse' });
  await d1.setFault({ kind: 'refuse' });
  await expect.poll(() => stateOf(p0)).toMatch(/refused/);
  await expect.poll(() => stateOf(d1)).toMatch(/refused/);
  // One of each is left.
  expect(await readiness()).toBe(200);
  await harness.expectRight(await harness.ask());
  await poolRegistry.drainInstance({ instanceId: id(d0) });
  await turns(503);
  await d1.clearFaults();
  await turns(200);
  await p1.crash();
  await turns(503);
  await p1.restart();
  await turns(200);
  await poolRegistry.drainInstance({ instanceId: id(d1) });
  await turns(503);
  await poolRegistry.resumeInstance({ instanceId: id(d0) });
  await turns(200);
  await harness.expectRight(await harness.ask());
});
