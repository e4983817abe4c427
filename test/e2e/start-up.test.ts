import { expect, onTestFinished, test } from 'vitest';
import { startBaton } from '../../src/roles.ts';
import { startSim } from '../../src/sim/start-sim.ts';
import { freePort } from '../support/free-port.ts';
import { configOf, post, startQuietly } from '../support/harness.ts';

/** Two engines, the first of which takes its time to say that it is well. */
async function startSlowly() {
  const prefill = await startSim({ role: 'prefill' });
  const decode = await startSim({ role: 'decode' });
  onTestFinished(async () => void (await Promise.all([prefill.close(), decode.close()])));
  await prefill.setFault({ kind: 'stall', path: '/health', ms: 600 });
  return { prefill, decode };
}

test('health is answered before the engines were looked at; what needs them waits until they were', async () => {
  const { prefill, decode } = await startSlowly();
  const port = await freePort();
  const url = `http://127.0.0.1:${port}`;
  const steps: string[] = [];
  const config = configOf({ prefill: prefill.url, decode: decode.url, port: String(port) });
  const starting = startQuietly(config).then((started) => {
    steps.push('up');
    return started;
  });
  onTestFinished(async () => (await starting).baton.stop());
  const statusOf = async (path: string) => (await fetch(`${url}${path}`)).status;
  await expect.poll(() => statusOf('/health').catch(() => 0), { interval: 5, timeout: 10_000 }).toBe(200);
  expect(await (await fetch(`${url}/health`)).json()).toMatchObject({ status: 'ok', ready: false });
  const readiness = await fetch(`${url}/readiness`);
  expect({ status: readiness.status, body: await readiness.json() }).toEqual({
    status: 503,
    body: { status: 'starting' },
  });
  steps.push('asked');
  const messages = [{ role: 'user', content: 'Hello' }];
  const [reply, models] = await Promise.all([
    post(`${url}/v1/chat/completions`, { model: 'sim-model', max_tokens: 4, messages }),
    fetch(`${url}/v1/models`).then((answer) => answer.text()),
  ]);
  expect(reply.status).toBe(200);
  expect(models).toContain('sim-model');
  await starting;
  expect(steps).toEqual(['asked', 'up']);
  expect(await statusOf('/readiness')).toBe(200);
});

test('a start that fails after the facade listens refuses who waits and closes it', async () => {
  const { prefill, decode } = await startSlowly();
  const [port, taken] = [await freePort(), new URL(decode.url).port];
  const url = `http://127.0.0.1:${port}`;
  const config = configOf({ prefill: prefill.url, decode: decode.url, port: String(port), 'rpc-port': taken });
  const failed = expect(startBaton(config)).rejects.toThrow(`port ${taken} is in use (--rpc-port)`);
  await expect
    .poll(
      () =>
        fetch(`${url}/liveness`).then(
          ({ status }) => status,
          () => 0,
        ),
      { interval: 5, timeout: 10_000 },
    )
    .toBe(200);
  const waits = await fetch(`${url}/v1/models`);
  expect({ status: waits.status, body: await waits.text() }).toEqual({
    status: 503,
    body: expect.stringContaining('baton could not start'),
  });
  await failed;
  await expect(fetch(`${url}/liveness`)).rejects.toThrow();
});
