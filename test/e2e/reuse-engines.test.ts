import { afterEach, describe, expect, test, vi } from 'vitest';
import type { FaultRule } from '../../src/sim/faults.ts';
import type { SimOptions } from '../../src/sim/options.ts';
import { Conversation, chatWithPlan } from '../support/conversation.ts';
import { configOf, type Harness, startHarness, startQuietly } from '../support/harness.ts';
import { engine, metricOf } from './ladder-support.ts';

/** Engines that nothing can be reused of, and modes in which nothing is proven. */
const open: AsyncDisposable[] = [];
afterEach(async () => {
  vi.useRealTimers();
  while (open.length > 0) await open.pop()?.[Symbol.asyncDispose]();
});

async function start(options: Omit<SimOptions, 'role' | 'port' | 'sidePort'>): Promise<Harness> {
  const harness = await startHarness({
    prefill: 1,
    decode: 1,
    engine: { bidirectional: true, eosEvery: 0, blockSize: 16, recordRequests: true, ...options },
    yaml: 'timeouts: { store: 5s, tokenize: 5s }',
  });
  open.push(harness);
  await harness.ready();
  return harness;
}

const talkTo = (harness: Harness) => {
  const talk = new Conversation('talk', { stream: true, plain: harness.plain });
  return () => talk.turn((body) => chatWithPlan(harness.url, body));
};

/** Bodies of the prefill legs, of which none may name blocks of a decode engine. */
function expectNoHandle(harness: Harness): void {
  const legs = engine(harness.prefill).requests.filter(({ path }) => path === '/v1/chat/completions');
  expect(legs.length).toBeGreaterThan(1);
  for (const { body } of legs) expect(String(body)).not.toContain('remote_block_ids');
}

test('a version that was not tested: the turns are remembered as such, and no handle is used', async () => {
  const harness = await start({ version: '0.34.0' });
  const turn = talkTo(harness);
  expect([await turn(), await turn(), await turn()]).toEqual(['none', 'miss_unverifiable', 'miss_unverifiable']);
  expectNoHandle(harness);
});

describe('a handle that names more than one KV group, or that an engine could die of', () => {
  const patches: readonly (readonly [string, NonNullable<FaultRule['patch']>])[] = [
    ['two groups', { remote_block_ids: [[1], [2]] }],
    ['flat ids', { remote_block_ids: [1, 2] }],
    ['another transfer mode', { transfer_mode: 'push' }],
    ['pipeline stages', { pp_size: 2 }],
    ['too few blocks', { remote_block_ids: [[1]] }],
  ];
  test.each(patches)('%s: never sent, not even to be given back', async (_what, patch) => {
    const harness = await start({});
    await engine(harness.decode).setFault({ kind: 'patch_handle', leg: 'decode', patch, count: 100 });
    const turn = talkTo(harness);
    expect([await turn(), await turn(), await turn()]).toEqual(['none', 'miss_no_handle', 'miss_no_handle']);
    expectNoHandle(harness);
    expect(await metricOf(harness, 'baton_decode_handles_total{fate="malformed"}')).toBeGreaterThanOrEqual(2);
    expect(await metricOf(harness, 'baton_releases_total{result="sent"}')).toBe(0);
  });
});

// The clock of another process cannot be turned.
test.skipIf(process.env['BATON_BIN'] !== undefined)('an unsafe guard warns at the start, and every hour', async () => {
  vi.useFakeTimers({ toFake: ['setInterval', 'clearInterval'] });
  const { baton, log } = await startQuietly(configOf({ 'reuse-guard': 'off', 'unsafe-reuse': 'true' }));
  open.push({ [Symbol.asyncDispose]: () => baton.stop() });
  const warnings = () => log.filter(({ level, guard }) => level === 'warn' && guard === 'off').length;
  expect(warnings()).toBe(1);
  vi.advanceTimersByTime(3 * 3_600_000);
  expect(warnings()).toBe(4);
});
