import { create } from '@bufbuild/protobuf';
import { describe, expect, test } from 'vitest';
import { EngineInfoSchema, IncarnationSchema } from '../../gen/baton/v1/instance_pb.ts';
import { HandleHabits } from '../../src/services/handle-habits.ts';
import { decodeOf } from '../support/plan-instances.ts';

const version = (text: string) => decodeOf('d', { engine: create(EngineInfoSchema, { version: text }) });

test.each([
  ['0.31.2', false],
  ['0.32.0', false],
  ['0.33.0', true],
  ['0.34.0rc1', true],
  ['1.0.0', true],
  ['', true],
  ['dev', true],
])('version "%s" streams handles: %s', (text, streams) => {
  expect(new HandleHabits().streams(version(text))).toBe(streams);
  expect(new HandleHabits().mayGive(version(text), true)).toBe(streams);
  expect(new HandleHabits().mayGive(version(text), false)).toBe(true);
});

describe('an instance that gives no handles', () => {
  const decode = version('0.33.0');
  const miss = (habits: HandleHabits, times: number) => {
    for (let i = 0; i < times; i += 1) habits.note(decode, false, false);
  };

  test('is asked eight times, then only now and then', () => {
    const habits = new HandleHabits();
    miss(habits, 7);
    expect(habits.mayGive(decode, false)).toBe(true);
    miss(habits, 1);
    expect(habits.mayGive(decode, false)).toBe(false);
    miss(habits, 55);
    expect(habits.mayGive(decode, false)).toBe(false);
    miss(habits, 1);
    expect(habits.mayGive(decode, false)).toBe(true);
    miss(habits, 1);
    expect(habits.mayGive(decode, false)).toBe(false);
  });

  test('is asked again once it gave one', () => {
    const habits = new HandleHabits();
    miss(habits, 20);
    habits.note(decode, false, true);
    expect(habits.mayGive(decode, false)).toBe(true);
  });

  test('may still give them on streams, on another instance, and in another life', () => {
    const habits = new HandleHabits();
    miss(habits, 20);
    expect(habits.mayGive(decode, true)).toBe(true);
    expect(habits.mayGive({ ...decode, id: 'other' }, false)).toBe(true);
    const incarnation = create(IncarnationSchema, { generation: 2 });
    expect(habits.mayGive({ ...decode, incarnation }, false)).toBe(true);
  });
});

describe('what the replies of an instance show', () => {
  const learn = (text: string, turns: readonly (readonly [streamed: boolean, gave: boolean, groups?: number])[]) => {
    const told: string[] = [];
    const habits = new HandleHabits((id, { handles, kvGroups }, generation) => {
      told.push(`${id} ${generation} ${handles} ${kvGroups}`);
    });
    for (const [streamed, gave, groups] of turns) habits.note(version(text), streamed, gave, groups);
    return { told, habits };
  };
  const misses = (count: number, streamed: boolean) => Array.from({ length: count }, () => [streamed, false] as const);

  test.each([
    ['a handle on a stream', '0.33.0', [[true, true, 1]], ['d 0 all 1']],
    ['a whole one, as the version has them on streams too', '0.33.0', [[false, true, 1]], ['d 0 all 1']],
    ['a whole one, of a version that has none on streams', '0.32.0', [[false, true, 2]], ['d 0 whole 2']],
    ['a whole one, of an unknown version', '', [[false, true, 1]], ['d 0 whole 1']],
    [
      'a later stream of that',
      '',
      [
        [false, true, 1],
        [true, true, 1],
      ],
      ['d 0 whole 1', 'd 0 all 1'],
    ],
    [
      'streams without, whole ones with',
      '0.33.0',
      [[false, true, 1], ...misses(8, true)],
      ['d 0 all 1', 'd 0 whole 1'],
    ],
    ['none', '0.33.0', misses(8, false), ['d 0 none 0']],
    ['too few to tell', '0.33.0', [...misses(7, false), ...misses(7, true)], []],
    ['nothing new', '0.33.0', [[true, true, 1], [true, true, 1], ...misses(9, true)], ['d 0 all 1']],
  ] as const)('%s', (_, text, turns, told) => expect(learn(text, turns).told).toEqual(told));

  test('counts more than the version', () => {
    expect(learn('0.32.0', [[true, true, 1]]).habits.mayGive(version('0.32.0'), true)).toBe(true);
    const learntElsewhere = decodeOf('d', { engine: create(EngineInfoSchema, { version: '0.32.0', handles: 'all' }) });
    expect(new HandleHabits().mayGive(learntElsewhere, true)).toBe(true);
  });
});
