import { expect, test } from 'vitest';
import { TTFT_PHASES } from '../../src/obs/metrics.ts';
import { startSimPools } from '../../src/sim/pools.ts';
import { metricOf } from '../e2e/ladder-support.ts';
import { startBatonProcess } from '../support/baton-process.ts';
import { firstContent } from '../support/first-content.ts';

const REQUESTS = 20;
const BODY = JSON.stringify({ model: 'sim-model', prompt: 'x'.repeat(200), max_tokens: 4, stream: true });

const median = (values: readonly number[]) => values.toSorted((a, b) => a - b)[Math.floor(values.length / 2)] ?? 0;

test('the phases add up to what the client waits for', async () => {
  const engine = { fixedMs: 100, pullMsPerBlock: 5, eosEvery: 0 };
  await using pools = await startSimPools({ prefill: 1, decode: 1, engine });
  const engines = (['prefill', 'decode'] as const).flatMap((role) =>
    pools[role].flatMap(({ url }) => [`--${role}`, url]),
  );
  await using baton = await startBatonProcess(engines);
  await expect.poll(async () => (await fetch(`${baton.url}/readiness`)).status, { timeout: 20_000 }).toBe(200);
  const clients: number[] = [];
  for (let i = 0; i < REQUESTS; i += 1) clients.push(await firstContent(baton.url, BODY));
  const access = () => baton.lines.filter((line) => line.includes('"msg":"request"'));
  // The log of another process comes a moment later.
  await expect.poll(() => access().length, { timeout: 20_000 }).toBe(REQUESTS);
  const told: readonly number[] = access().map((line) => JSON.parse(line).ttft_ms);
  const sumOf = (phase: string) =>
    metricOf(baton, `baton_ttft_seconds_sum{model="sim-model",phase="${phase}"}`).then((seconds) => seconds * 1000);
  const parts = await Promise.all(TTFT_PHASES.map(async (phase) => [phase, await sumOf(phase)] as const));
  const [total, sum] = [await sumOf('total'), parts.reduce((all, [, part]) => all + part, 0)];
  const missed = median(clients.map((client, index) => client - (told[index] ?? 0)));
  process.stdout.write(
    `client ${median(clients).toFixed(1)} ms, of which baton does not see ${missed.toFixed(2)} ms; mean phases: ` +
      `${parts.map(([phase, part]) => `${phase} ${(part / REQUESTS).toFixed(2)}`).join(', ')}\n`,
  );
  expect(sum).toBeCloseTo(total, 3);
  // No client has its first content before baton sends it; the way there and back is what no phase can show.
  for (const [index, client] of clients.entries()) expect(client).toBeGreaterThanOrEqual((told[index] ?? 0) - 0.1);
});
