import { create } from '@bufbuild/protobuf';
import { describe, expect, test } from 'vitest';
import { EngineInfoSchema, IncarnationSchema } from '../../gen/baton/v1/instance_pb.ts';
import { HandleHabits, streamsHandles } from '../../src/services/handle-habits.ts';
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
  expect(streamsHandles(version(text))).toBe(streams);
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
