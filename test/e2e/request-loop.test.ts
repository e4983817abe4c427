import { expect, test } from 'vitest';
import { Role } from '../../gen/baton/v1/instance_pb.ts';
import { connectRemote } from '../../src/rpc/clients.ts';
import { startHarness } from '../support/harness.ts';

const BODY = JSON.stringify({
  model: 'sim-model',
  messages: [{ role: 'user', content: 'hello' }],
  n: 2,
  max_tokens: 2,
});

test('a facade that is among its own engines is asked once: it knows its request again', async () => {
  await using harness = await startHarness({ prefill: 1, decode: 1 });
  await harness.ready();
  using remote = connectRemote({ url: harness.rpcUrl });
  await remote.poolRegistry.registerInstance({
    idempotencyKey: 'loop',
    instance: { url: harness.url, id: 'itself', role: Role.DECODE, connector: 'nixl' },
  });
  const stateOf = async () => (await remote.poolRegistry.getInstance({ instanceId: 'itself' })).instance?.stateReason;
  await expect.poll(stateOf, { timeout: 10_000 }).toBe('probe_ok');
  await remote.poolRegistry.drainInstance({ instanceId: new URL(harness.decode[0]?.url ?? '').host, reason: 'away' });

  const reply = await fetch(`${harness.url}/v1/chat/completions`, { method: 'POST', body: BODY });
  expect(reply.status).toBe(508);
  expect(await reply.json()).toMatchObject({ error: { code: 'request_loop', type: 'upstream_error' } });
  expect(harness.log.filter(({ msg, error }) => msg === 'request' && error === 'request_loop').length).toBeLessThan(4);
});
