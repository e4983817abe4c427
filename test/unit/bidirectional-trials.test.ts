import { create } from '@bufbuild/protobuf';
import { describe, expect, test } from 'vitest';
import { IncarnationSchema, KvSettingsSchema } from '../../gen/baton/v1/instance_pb.ts';
import { BidirectionalTrials } from '../../src/services/bidirectional-trials.ts';
import { prefillOf } from '../support/plan-instances.ts';

const life = (generation: number) => ({ incarnation: create(IncarnationSchema, { generation }) });
const withKv = (bidirectional: string, loadFailurePolicy = 'fail') => ({
  kv: create(KvSettingsSchema, { bidirectional, loadFailurePolicy }),
});
const AUTO = prefillOf('p', { ...withKv('auto'), ...life(1) });

describe('auto', () => {
  test('the first leg with a handle is a trial, and runs alone', () => {
    const trials = new BidirectionalTrials();
    expect(trials.mayAdmit(AUTO, 'd1')).toBe(true);
    // Asking opens nothing.
    expect(trials.mayAdmit(AUTO, 'd1')).toBe(true);
    expect(trials.admit(AUTO, 'd1')).toBe('trial');
    expect(trials.mayAdmit(AUTO, 'd1')).toBe(false);
    expect(trials.admit(AUTO, 'd2')).toBe('no');
    expect(trials.known(AUTO)).toBeUndefined();
  });

  test('each instance has a trial of its own', () => {
    const trials = new BidirectionalTrials();
    trials.admit(AUTO, 'd1');
    expect(trials.admit(prefillOf('q', withKv('auto')), 'd1')).toBe('trial');
  });

  test('a good ending opens it for all', () => {
    const trials = new BidirectionalTrials();
    trials.admit(AUTO, 'd1');
    expect(trials.settle(AUTO, 'd1', 'ok')).toBeUndefined();
    expect(trials.known(AUTO)).toBe('on');
    expect(trials.admit(AUTO, 'd1')).toBe('go');
    expect(trials.admit(AUTO, 'd2')).toBe('go');
  });

  test('an ending that says nothing leaves the next leg to be the trial', () => {
    const trials = new BidirectionalTrials();
    trials.admit(AUTO, 'd1');
    expect(trials.settle(AUTO, 'd1', 'other')).toBeUndefined();
    expect(trials.known(AUTO)).toBeUndefined();
    expect(trials.admit(AUTO, 'd1')).toBe('trial');
  });

  test('a trial that hangs switches it off, for every decode instance', () => {
    const trials = new BidirectionalTrials();
    trials.admit(AUTO, 'd1');
    expect(trials.settle(AUTO, 'd1', 'hung')).toBe('switched_off');
    expect(trials.known(AUTO)).toBe('off');
    expect(trials.admit(AUTO, 'd1')).toBe('no');
    expect(trials.admit(AUTO, 'd2')).toBe('no');
  });

  test('one that reads elsewhere loses only the pair, and is drained after two', () => {
    const trials = new BidirectionalTrials();
    trials.admit(AUTO, 'd1');
    trials.settle(AUTO, 'd1', 'ok');
    expect(trials.settle(AUTO, 'd2', 'hung')).toBe('pair_barred');
    expect(trials.isBarred(AUTO, 'd2')).toBe(true);
    expect(trials.admit(AUTO, 'd2')).toBe('no');
    expect(trials.admit(AUTO, 'd1')).toBe('go');
    expect(trials.settle(AUTO, 'd3', 'hung')).toBe('drain');
  });

  test('a restart begins anew', () => {
    const trials = new BidirectionalTrials();
    trials.admit(AUTO, 'd1');
    trials.settle(AUTO, 'd1', 'hung');
    const again = prefillOf('p', { ...withKv('auto'), ...life(2) });
    expect(trials.known(again)).toBeUndefined();
    expect(trials.isBarred(again, 'd1')).toBe(false);
    expect(trials.admit(again, 'd1')).toBe('trial');
    expect(trials.settle(again, 'd1', 'hung')).toBe('switched_off');
  });
});

test('on: no trial; a hung pull bars the pair, two drain', () => {
  const trials = new BidirectionalTrials();
  const on = prefillOf('p', withKv('on'));
  expect(trials.admit(on, 'd1')).toBe('go');
  expect(trials.admit(on, 'd1')).toBe('go');
  trials.settle(on, 'd1', 'hung');
  expect(trials.admit(on, 'd1')).toBe('no');
  expect(trials.admit(on, 'd2')).toBe('go');
  expect(trials.settle(on, 'd2', 'hung')).toBe('drain');
});

test.each([
  ['switched off', prefillOf('p', withKv('off'))],
  ['that would recompute what it cannot load', prefillOf('p', withKv('on', 'recompute'))],
])('an instance %s gets no handle', (_, prefill) => {
  const trials = new BidirectionalTrials();
  expect(trials.mayAdmit(prefill, 'd1')).toBe(false);
  expect(trials.admit(prefill, 'd1')).toBe('no');
});

test('only who needs no trial may stand in for another', () => {
  const trials = new BidirectionalTrials();
  expect(trials.isProven(AUTO, 'd1')).toBe(false);
  trials.admit(AUTO, 'd1');
  expect(trials.isProven(AUTO, 'd1')).toBe(false);
  trials.settle(AUTO, 'd1', 'ok');
  expect(trials.isProven(AUTO, 'd1')).toBe(true);
  expect(trials.isProven(prefillOf('q', withKv('on')), 'd1')).toBe(true);
});
