import { mkdtempSync, renameSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, expect, test } from 'vitest';
import { type Sim, startSim } from '../../src/sim/start-sim.ts';
import { configOf, post, startQuietly } from '../support/harness.ts';
import { waitUntil } from '../support/wait.ts';

const stack = new AsyncDisposableStack();
afterAll(() => stack.disposeAsync());

async function engine(role: 'prefill' | 'decode'): Promise<Sim> {
  const sim = await startSim({ role, recordRequests: true });
  stack.defer(() => sim.close());
  return sim;
}

test('a pool file is followed while requests run: engines come and go, and no request fails', async () => {
  const folder = mkdtempSync(join(tmpdir(), 'baton-'));
  stack.defer(() => rmSync(folder, { recursive: true }));
  const file = join(folder, 'pools.yaml');
  const write = (...sims: readonly Sim[]) => {
    const instances = sims.map(({ url, role }) => ({ url, role, api_key: `key-of-${role}` }));
    writeFileSync(`${file}.new`, JSON.stringify({ instances }));
    renameSync(`${file}.new`, file);
  };
  const [p, d1, d2] = [await engine('prefill'), await engine('decode'), await engine('decode')];
  write(p, d1);
  const { baton, log } = await startQuietly(configOf({ 'pool-file': file }, 'health: { interval: 100ms }'));
  stack.defer(() => baton.stop());
  const url = `http://${baton.addresses.facade}`;
  const instances = async () => {
    const reply = await fetch(`${url}/health`);
    return ((await reply.json()) as { instances: Record<string, number> }).instances;
  };
  await waitUntil(async () => (await instances())['ready'] === 2);

  const statuses: number[] = [];
  let running = true;
  const client = (async () => {
    while (running) {
      const body = { model: 'sim-model', messages: [{ role: 'user', content: 'hello '.repeat(20) }], max_tokens: 4 };
      statuses.push((await post(`${url}/v1/chat/completions`, body)).status);
    }
  })();
  const served = (sim: Sim) => sim.requests.filter(({ path }) => path === '/v1/chat/completions');
  write(p, d1, d2);
  await waitUntil(() => served(d2).length > 0);
  write(p, d2);
  await waitUntil(() =>
    log.some(({ msg, from, to }) => msg === 'instance changed state' && from === 'ready' && to === 'draining'),
  );
  const before = served(d1).length;
  const after = served(d2).length;
  await waitUntil(() => served(d2).length > after + 5);
  // One may have been on its way.
  expect(served(d1).length - before).toBeLessThanOrEqual(1);
  writeFileSync(file, 'instances: [');
  await waitUntil(() => log.some(({ msg }) => String(msg).startsWith('the pool file cannot be used')));
  const then = served(d2).length;
  await waitUntil(() => served(d2).length > then);
  running = false;
  await client;
  expect(new Set(statuses)).toEqual(new Set([200]));
  expect(served(d2)[0]?.headers['authorization']).toBe('Bearer key-of-decode');
});
