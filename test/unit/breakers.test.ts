import { create } from '@bufbuild/protobuf';
import { describe, expect, test } from 'vitest';
import { IncarnationSchema } from '../../gen/baton/v1/instance_pb.ts';
import { Leg, LegEnding, type LegReport, LegReportSchema } from '../../gen/baton/v1/router_pb.ts';
import { avoidPairs } from '../../src/core/pair-order.ts';
import { Breakers } from '../../src/services/breakers.ts';
import { decodeOf, type InstanceChanges, Pools, prefillOf } from '../support/plan-instances.ts';

const P = ['p1', 'p2'];
const D = ['d1', 'd2', 'd3'];

function setUp() {
  let now = 0;
  const pools = new Pools([...P.map((id) => prefillOf(id)), ...D.map((id) => decodeOf(id))]);
  const events: string[] = [];
  const settings = { failures: 4, pairFailures: 2, openMs: 100 };
  const breakers = new Breakers(
    pools,
    settings,
    (owner, to) => events.push(`${ownerOf(owner)} ${to}`),
    () => now,
  );
  return { breakers, events, pools, pass: (ms: number) => (now += ms), open: () => breakers.open().map(ownerOf) };
}

const ownerOf = (owner: object) => Object.values(owner).join(' ');
const life = (generation: number): InstanceChanges => ({ incarnation: create(IncarnationSchema, { generation }) });

type Changes = Partial<Pick<LegReport, 'httpStatus' | 'contentShown'>>;
const prefillLeg = (instanceId: string, ending: LegEnding, changes: Changes = {}) =>
  create(LegReportSchema, { leg: Leg.PREFILL, instanceId, ending, ...changes });
const decodeLeg = (instanceId: string, ending: LegEnding, changes: Changes = {}) =>
  create(LegReportSchema, { leg: Leg.DECODE, instanceId, ending, ...changes });

describe('of an instance', () => {
  test.each([
    ['SERVER_ERROR', 500],
    ['NOT_SENT', 0],
    ['RESET', 0],
    ['TIMEOUT', 0],
    ['BUSY', 503],
  ] as const)('opens after legs that end with %s in a row', (ending, httpStatus) => {
    const { breakers, events, open } = setUp();
    const fail = () => breakers.note(prefillLeg('p1', LegEnding[ending], { httpStatus }), '');
    for (let i = 0; i < 3; i++) fail();
    breakers.note(prefillLeg('p1', LegEnding.OK), '');
    for (let i = 0; i < 3; i++) fail();
    expect(open()).toEqual([]);
    fail();
    expect(events).toEqual(['instance p1 open']);
    expect([...breakers.avoided()]).toEqual(['p1']);
  });

  test.each([
    ['CLIENT_ERROR', 400],
    ['CLIENT_ERROR', 422],
    ['BUSY', 429],
    ['ABORTED', 0],
  ] as const)('does not for %s (%i), however often', (ending, httpStatus) => {
    const { breakers, open } = setUp();
    for (let i = 0; i < 100; i++) {
      breakers.note(prefillLeg('p1', LegEnding[ending], { httpStatus }), '');
      breakers.note(decodeLeg('d1', LegEnding[ending], { httpStatus }), 'p1');
    }
    expect(open()).toEqual([]);
  });

  test('gives one plan a trial, and the next one only when that has come to nothing', () => {
    const { breakers, pass, events } = setUp();
    for (let i = 0; i < 4; i++) breakers.note(decodeLeg('d1', LegEnding.SERVER_ERROR), '');
    expect(breakers.begin('p1', 'd2')).toBeUndefined();
    pass(100);
    expect(breakers.avoided().size).toBe(0);
    const trial = breakers.begin('p1', 'd1');
    expect([...breakers.avoided()]).toEqual(['d1']);
    trial?.end();
    expect(breakers.avoided().size).toBe(0);
    breakers.begin('p1', 'd1');
    breakers.note(decodeLeg('d1', LegEnding.OK), '');
    expect(events).toEqual(['instance d1 open', 'instance d1 closed']);
  });

  test('is forgotten with the life that failed, and with the instance', () => {
    const { breakers, pools, events, open } = setUp();
    const [p1, p2, ...decodes] = [...pools.snapshot()];
    if (p1 === undefined || p2 === undefined) throw new Error('no instances');
    for (let i = 0; i < 4; i++) {
      breakers.note(prefillLeg('p1', LegEnding.RESET), '');
      breakers.note(prefillLeg('p2', LegEnding.RESET), '');
    }
    pools.set([prefillOf('p1', life(2)), p2, ...decodes]);
    expect(open()).toEqual(['instance p2']);
    pools.set([p1, ...decodes]);
    expect(open()).toEqual([]);
    expect(events.slice(2)).toEqual(['instance p1 closed', 'instance p2 closed']);
    breakers.note(prefillLeg('p2', LegEnding.RESET), '');
    expect(open()).toEqual([]);
  });
});

describe('of a pair', () => {
  const failPair = (breakers: Breakers, p: string, d: string, changes: Changes = {}) =>
    breakers.note(decodeLeg(d, LegEnding.SERVER_ERROR, changes), p);

  test('opens when the one can make nothing of the KV of the other, while both serve with others', () => {
    const { breakers, open } = setUp();
    for (let i = 0; i < 2; i++) {
      failPair(breakers, 'p1', 'd1');
      breakers.note(decodeLeg('d1', LegEnding.OK, { contentShown: true }), 'p2');
      breakers.note(decodeLeg('d2', LegEnding.OK, { contentShown: true }), 'p1');
    }
    expect(open()).toEqual(['pair p1 d1']);
    expect(breakers.avoided().size).toBe(0);
    expect(breakers.isPairAvoided('p1', 'd1')).toBe(true);
    expect([breakers.isPairAvoided('p2', 'd1'), breakers.isPairAvoided('p1', 'd2')]).toEqual([false, false]);
  });

  test('counts a prefill leg that was to read from the decode instance', () => {
    const { breakers, open } = setUp();
    for (let i = 0; i < 2; i++) breakers.note(prefillLeg('p1', LegEnding.TIMEOUT), 'd2');
    expect(open()).toEqual(['pair p1 d2']);
  });

  test('does not count what ended after its first content, or never reached the engine', () => {
    const { breakers, open } = setUp();
    for (let i = 0; i < 3; i++) {
      failPair(breakers, 'p1', 'd1', { contentShown: true });
      breakers.note(decodeLeg('d2', LegEnding.NOT_SENT), 'p1');
    }
    expect(open()).toEqual([]);
  });

  test('a prefill instance whose KV is of use to nobody is left alone, although its own legs end well', () => {
    const { breakers, events } = setUp();
    for (let i = 0; i < 4; i++) {
      breakers.note(prefillLeg('p1', LegEnding.OK), '');
      failPair(breakers, 'p1', D[i % 3] ?? '');
      breakers.note(decodeLeg(D[i % 3] ?? '', LegEnding.OK, { contentShown: true }), 'p2');
    }
    expect(events.at(-1)).toBe('transfer p1 open');
    expect([...breakers.avoided()]).toEqual(['p1']);
  });
});

describe('the order of a plan', () => {
  const order = (broken: readonly string[]) => {
    const decision = avoidPairs(
      {
        kind: 'plan',
        mode: 1,
        reason: 'x',
        prefill: P.map((id) => prefillOf(id)),
        decode: D.map((id) => decodeOf(id)),
        verdicts: [],
      },
      (p, d) => broken.includes(`${p}${d}`),
    );
    const ids = (all: readonly { readonly id: string }[]) => all.map(({ id }) => id).join();
    const verdicts = decision.verdicts.map(({ instanceId, reason }) => `${instanceId} ${reason}`);
    return [`${ids(decision.prefill)}>${ids(decision.decode)}`, verdicts.join()];
  };

  test.each([
    ['nothing is broken', [], 'p1,p2>d1,d2,d3', ''],
    ['the first pair is: the decode instance moves', ['p1d1'], 'p1,p2>d2,d3,d1', 'd1 pair_breaker_open'],
    ['a fallback comes last', ['p1d2'], 'p1,p2>d1,d3,d2', 'd2 pair_breaker_open'],
    ['another prefill instance', ['p2d1'], 'p1,p2>d1,d2,d3', 'p2 pair_breaker_open'],
    ['nobody is left for the first one', ['p1d1', 'p1d2', 'p1d3'], 'p2,p1>d1,d2,d3', 'p1 pair_breaker_open'],
    ['everything is: as if nothing were', P.flatMap((p) => D.map((d) => `${p}${d}`)), 'p1,p2>d1,d2,d3', ''],
  ])('where %s', (_, broken, ids, verdicts) => {
    expect(order(broken)).toEqual([ids, verdicts]);
  });
});
