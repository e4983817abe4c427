import { create } from '@bufbuild/protobuf';
import { expect, test } from 'vitest';
import {
  IncarnationSchema,
  type Instance,
  InstanceState,
  LoadSampleSchema,
  PinnedKvSchema,
} from '../../gen/baton/v1/instance_pb.ts';
import { Seats } from '../../src/services/seats.ts';
import { decodeOf, prefillOf } from '../support/plan-instances.ts';

const life = (generation: number, more: Partial<Instance> = {}) => ({
  ...more,
  incarnation: create(IncarnationSchema, { generation }),
});

test('an instance that begins gets ever more of its share; those of the start, and one that was only away, the whole', () => {
  let now = 0;
  const seats = new Seats(() => now, { prefill: 0, decode: 0 }, { slowStartMs: 1000 });
  const describe = (instances: readonly Instance[]) => {
    for (const instance of instances) seats.describe(instance);
    seats.retain(new Set(instances.map(({ id }) => id)));
  };
  const weight = (id: string) => seats.get(id)?.weight;
  const [d1, d2] = [decodeOf('d1', life(1)), decodeOf('d2', life(1, { weight: 4 }))];
  describe([d1, { ...d2, state: InstanceState.STARTING }]);
  now = 5000;
  describe([d1, d2]);
  expect([weight('d1'), weight('d2')]).toEqual([1, 0.4]);
  now += 500;
  expect([weight('d1'), weight('d2')]).toEqual([1, 2]);
  now += 500;
  expect([weight('d1'), weight('d2')]).toEqual([1, 4]);
  describe([{ ...d1, state: InstanceState.SUSPECT }, d2]);
  now += 10;
  describe([d1, d2]);
  expect(weight('d1')).toBe(1);
  describe([decodeOf('d1', life(2)), d2]);
  expect(weight('d1')).toBe(0.1);
});

test('is full at its limit, which is its role’s, and not any more when a leg has ended', () => {
  const seats = new Seats(() => 0, { prefill: 1, decode: 2 }, { slowStartMs: 0 });
  for (const instance of [prefillOf('p'), decodeOf('d')]) seats.describe(instance);
  for (const id of ['p', 'd']) seats.take(id);
  expect([...seats.full]).toEqual(['p']);
  seats.take('d');
  expect([...seats.full].toSorted()).toEqual(['d', 'p']);
  seats.free('d');
  seats.free('p');
  seats.free('p');
  expect([...seats.full]).toEqual([]);
  expect(seats.busy()).toEqual([{ instance: 'd', legs: 1 }]);
});

test('is full by the limits that hold now', () => {
  const limits = { prefill: 0, decode: 0 };
  const seats = new Seats(() => 0, limits, { slowStartMs: 0 });
  seats.describe(decodeOf('d'));
  seats.take('d');
  expect([...seats.full]).toEqual([]);
  limits.decode = 1;
  expect([...seats.full]).toEqual(['d']);
  limits.decode = 2;
  expect([...seats.full]).toEqual([]);
});

test('a reading is told once: what else changes of an instance makes it no newer, and pins stand for a use that is not told', () => {
  let now = 0;
  const seats = new Seats(() => now, { prefill: 0, decode: 0 }, { slowStartMs: 0 });
  const load = (kvCacheUsage: number) => create(LoadSampleSchema, { running: 2, kvCacheUsage });
  const pins = (share: number) => create(PinnedKvSchema, { share });
  const reading = (changes: Partial<Instance>) => seats.describe(decodeOf('d', changes)).reading;
  seats.describe(decodeOf('d'));
  seats.take('d');
  seats.take('d');
  expect(reading({ load: load(0.5), pins: pins(0.2) })).toEqual({ foreign: 0, waiting: 0, kvUsage: 0.5, at: 0 });
  seats.free('d');
  now = 1000;
  expect(reading({ load: load(0.5), pins: pins(0.4) })).toEqual({ foreign: 0, waiting: 0, kvUsage: 0.5, at: 0 });
  expect(reading({ load: load(0), pins: pins(0.4) })).toEqual({ foreign: 1, waiting: 0, kvUsage: 0.4, at: 1000 });
  now = 2000;
  expect(reading({ load: load(0), pins: pins(0.7) })).toEqual({ foreign: 1, waiting: 0, kvUsage: 0.7, at: 1000 });
});
