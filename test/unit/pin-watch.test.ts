import { create } from '@bufbuild/protobuf';
import type { Client } from '@connectrpc/connect';
import { afterEach, expect, test } from 'vitest';
import { EngineInfoSchema, IncarnationSchema, LoadSampleSchema } from '../../gen/baton/v1/instance_pb.ts';
import type { KVCacheStore } from '../../gen/baton/v1/kv_cache_store_pb.ts';
import { type InstancePins, PinWatch } from '../../src/services/pin-watch.ts';
import { decodeOf, Pools, prefillOf } from '../support/plan-instances.ts';
import { FakeClock } from '../support/registry.ts';

const open: AsyncDisposable[] = [];
afterEach(async () => {
  while (open.length > 0) await open.pop()?.[Symbol.asyncDispose]();
});

const decode = (id: string, used: number, generation = 1) =>
  decodeOf(id, {
    engine: create(EngineInfoSchema, { numGpuBlocks: 1000 }),
    load: create(LoadSampleSchema, { kvCacheUsage: used / 1000 }),
    incarnation: create(IncarnationSchema, { generation }),
  });

function start(blocks: Record<string, number>, watermark = 0.5) {
  const clock = new FakeClock();
  const pools = new Pools([prefillOf('p'), decode('d1', 900), decode('d2', 900)]);
  const told = new Map<string, InstancePins>();
  const events: string[] = [];
  const settings = { watermark };
  let wakes = 0;
  let isAway = false;
  const store = {
    getStats: async () => {
      if (isAway) throw new Error('away');
      return {
        owners: Object.entries(blocks).map(([instanceId, pinned]) => ({
          instanceId,
          entries: pinned / 10,
          pinnedBlocks: BigInt(pinned),
        })),
      };
    },
  };
  const watch = new PinWatch({
    store: store as unknown as Client<typeof KVCacheStore>,
    view: pools,
    clock,
    watermark: () => settings.watermark,
    lookMs: 100,
    settleMs: () => 300,
    tell: (id, pins) => told.set(id, pins),
    observe: (id, event) => events.push(`${id} ${event}`),
    onAllowance: () => {
      wakes += 1;
    },
  });
  open.push(watch);
  return {
    clock,
    settings,
    pools,
    watch,
    told,
    events,
    wakes: () => wakes,
    away: (state: boolean) => {
      isAway = state;
    },
  };
}

test('tells what handles pin on each decode instance, and lets handles go where that is too much', async () => {
  const blocks = { d1: 600, d2: 100, elsewhere: 900 };
  const { clock, watch, told, events, wakes } = start(blocks);
  expect(watch.mayRelease('d1')).toBe(false);
  await clock.pass(100);
  expect([...told]).toEqual([
    ['d1', { entries: 60, blocks: 600, share: 0.6 }],
    ['d2', { entries: 10, blocks: 100, share: 0.1 }],
  ]);
  expect(watch.pins).toEqual(told);
  expect([watch.mayRelease('d1'), watch.mayRelease('d2'), watch.mayRelease('elsewhere')]).toEqual([true, false, false]);
  expect([events, wakes()]).toEqual([['d1 above'], 1]);
  for (let i = 0; i < 20; i++) watch.noteReleased('d1', 10);
  expect(watch.mayRelease('d1')).toBe(false);
  blocks.d1 = 400;
  await clock.pass(100);
  expect([events, wakes()]).toEqual([['d1 above', 'd1 below'], 1]);
});

test('without a watermark it counts alone', async () => {
  const { clock, settings, watch, told, events, wakes } = start({ d1: 1000 }, 0);
  await clock.pass(100);
  expect(told.get('d1')).toEqual({ entries: 100, blocks: 1000, share: 0.9 });
  expect([watch.mayRelease('d1'), events, wakes()]).toEqual([false, [], 0]);
  // The setting is read again with every look.
  settings.watermark = 0.5;
  await clock.pass(100);
  expect([watch.mayRelease('d1'), events]).toEqual([true, ['d1 above']]);
  settings.watermark = 0;
  await clock.pass(100);
  expect([watch.mayRelease('d1'), events]).toEqual([false, ['d1 above']]);
});

test('a store that is away changes nothing; a new life of an instance and one that left begin anew', async () => {
  const blocks: Record<string, number> = { d1: 600, d2: 600 };
  const { clock, pools, watch, events, away } = start(blocks);
  await clock.pass(100);
  away(true);
  await clock.pass(100);
  expect(watch.pins.get('d1')?.blocks).toBe(600);
  away(false);
  pools.set([prefillOf('p'), decode('d1', 900, 2)]);
  blocks['d1'] = 10;
  await clock.pass(100);
  expect([...watch.pins]).toEqual([['d1', { entries: 1, blocks: 10, share: 0.01 }]]);
  expect([watch.mayRelease('d1'), watch.mayRelease('d2')]).toEqual([false, false]);
  expect(events).toEqual(['d1 above', 'd2 above']);
});
