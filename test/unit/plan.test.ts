import { create } from '@bufbuild/protobuf';
import fc from 'fast-check';
import { describe, expect, test } from 'vitest';
import { type Instance, InstanceState, ModelCardSchema, Role } from '../../gen/baton/v1/instance_pb.ts';
import { PlanMode } from '../../gen/baton/v1/router_pb.ts';
import {
  type Decision,
  decide,
  isRoutable,
  type PlanFacts,
  type PlanRules,
  type PlanView,
} from '../../src/core/plan.ts';
import { POLICIES } from '../../src/policies/index.ts';
import { roundRobin } from '../../src/policies/round-robin.ts';
import { bothOf, decodeOf, type InstanceChanges, prefillOf } from '../support/plan-instances.ts';

const FACTS: PlanFacts = { model: 'm', bodyBytes: 400, localReasons: [] };
const RULES: PlanRules = {
  connector: 'nixl',
  prefillPolicy: roundRobin,
  decodePolicy: roundRobin,
  minUncachedTokens: 0,
  turns: { prefill: 0, decode: 0 },
};
const model = (id: string) => create(ModelCardSchema, { id });

function plan(
  instances: readonly Instance[],
  facts: Partial<PlanFacts> = {},
  rules: Partial<PlanRules> = {},
  view: Partial<PlanView> = {},
): Decision {
  const seen: PlanView = { instances, excluded: new Set(), cooling: new Set(), inFlight: () => 0, ...view };
  return decide({ ...FACTS, ...facts }, seen, { ...RULES, ...rules });
}

/** The plan as ids, or the kind of answer. */
function idsOf(decision: Decision): string {
  if (decision.kind !== 'plan') return decision.kind;
  const ids = (list: readonly Instance[]) => list.map(({ id }) => id).join(',');
  return `${ids(decision.prefill)}>${ids(decision.decode)}`;
}

function verdictsOf(decision: Decision): Readonly<Record<string, string>> {
  if (decision.kind === 'unknown-model') return {};
  return Object.fromEntries(decision.verdicts.map(({ instanceId, reason }) => [instanceId, reason]));
}

const POOLS = [prefillOf('p1'), prefillOf('p2'), prefillOf('p3'), decodeOf('d1'), decodeOf('d2')];

describe('round robin', () => {
  test('gives each pool its turns by its own counter, the others as fallbacks in order', () => {
    const turns = (prefill: number, decode: number) => idsOf(plan(POOLS, {}, { turns: { prefill, decode } }));
    expect(turns(0, 0)).toBe('p1,p2,p3>d1,d2');
    expect(turns(1, 0)).toBe('p2,p3,p1>d1,d2');
    expect(turns(2, 1)).toBe('p3,p1,p2>d2,d1');
    expect(turns(3, 3)).toBe('p1,p2,p3>d2,d1');
    expect(turns(1_000_000_007, 0)).toBe('p3,p1,p2>d1,d2');
  });

  test('every policy ranks all candidates, each once, and nothing else', () => {
    const ids = fc.uniqueArray(fc.string(), { maxLength: 8 });
    for (const policy of Object.values(POLICIES)) {
      fc.assert(
        fc.property(ids, fc.nat(), (names, turn) => {
          const candidates = names.map((id) => ({ id, inFlight: id.length }));
          const ranked = policy.rank({ candidates, turn }).map(({ id }) => id);
          expect(ranked.toSorted()).toEqual(names.toSorted());
        }),
      );
    }
  });
});

describe('who may take a leg', () => {
  test.each<[string, InstanceChanges, string]>([
    ['starts', { state: InstanceState.STARTING }, 'starting'],
    ['is suspect', { state: InstanceState.SUSPECT }, 'suspect'],
    ['drains', { state: InstanceState.DRAINING }, 'draining'],
    ['is gone', { state: InstanceState.GONE }, 'gone'],
    ['is in no state', { state: InstanceState.UNSPECIFIED }, 'not_ready'],
    ['has another connector', { connector: 'mooncake' }, 'connector'],
    ['has another model', { models: [model('other')] }, 'model'],
    ['has no model', { models: [] }, 'model'],
  ])('not one that %s', (_name, changes, reason) => {
    const decision = plan([prefillOf('p0', changes), prefillOf('p1'), decodeOf('d0', changes), decodeOf('d1')]);
    expect(idsOf(decision)).toBe('p1>d1');
    expect(verdictsOf(decision)).toEqual({ p0: reason, d0: reason });
  });

  test('not one that the caller excludes', () => {
    const decision = plan(POOLS, {}, {}, { excluded: new Set(['p1', 'd2']) });
    expect(idsOf(decision)).toBe('p2,p3>d1');
    expect(verdictsOf(decision)).toEqual({ p1: 'excluded', d2: 'excluded' });
  });

  test('one whose models are not known yet may serve any', () => {
    const unknown = { modelsKnown: false, models: [] };
    expect(idsOf(plan([prefillOf('p', unknown), decodeOf('d', unknown)]))).toBe('p>d');
  });

  test('a request without a model goes to any', () => {
    expect(idsOf(plan([prefillOf('p', { models: [] }), decodeOf('d')], { model: '' }))).toBe('p>d');
  });

  test('one that refused a connection is tried last, but tried', () => {
    const cooling = new Set(['p1', 'p2', 'd1']);
    expect(idsOf(plan(POOLS, {}, {}, { cooling }))).toBe('p3,p1,p2>d2,d1');
    expect(idsOf(plan(POOLS, {}, {}, { cooling: new Set(POOLS.map(({ id }) => id)) }))).toBe('p1,p2,p3>d1,d2');
  });

  test('a policy is told what runs where', () => {
    const seen: number[] = [];
    const decodePolicy = {
      name: 'spy',
      rank: ({ candidates }: Parameters<typeof roundRobin.rank>[0]) => {
        seen.push(...candidates.map(({ inFlight }) => inFlight));
        return candidates;
      },
    };
    plan(POOLS, {}, { decodePolicy }, { inFlight: (id) => Number(id.slice(1)) });
    expect(seen).toEqual([1, 2]);
  });
});

describe('modes', () => {
  const modeOf = (decision: Decision) =>
    decision.kind === 'plan' ? [decision.mode, decision.reason, idsOf(decision)] : [decision.kind];

  test('prefill and decode as a rule', () => {
    expect(modeOf(plan(POOLS))).toEqual([PlanMode.PREFILL_DECODE, 'disaggregated', 'p1,p2,p3>d1,d2']);
  });

  test('D alone for what cannot be handed over, with the first reason', () => {
    const decision = plan(POOLS, { localReasons: ['n', 'beam_search'] });
    expect(modeOf(decision)).toEqual([PlanMode.DECODE_LOCAL, 'n', '>d1,d2']);
  });

  test('D alone needs no P', () => {
    const down = prefillOf('p', { state: InstanceState.SUSPECT });
    expect(idsOf(plan([down, decodeOf('d')], { localReasons: ['n'] }))).toBe('>d');
    expect(idsOf(plan([down, decodeOf('d')]))).toBe('no-route');
  });

  test('D alone below the threshold, a token for every four bytes; 0 is never', () => {
    const at = (minUncachedTokens: number, bodyBytes: number) =>
      modeOf(plan(POOLS, { bodyBytes }, { minUncachedTokens }))[1];
    expect([at(100, 399), at(100, 400), at(0, 0)]).toEqual(['short_prompt', 'disaggregated', 'disaggregated']);
  });

  test('aggregated engines alone take whole requests, whatever their connector', () => {
    const decision = plan([bothOf('b1', { connector: 'none' }), bothOf('b2')], { localReasons: ['n'] });
    expect(modeOf(decision)).toEqual([PlanMode.AGGREGATED, 'aggregated_pool', '>b1,b2']);
  });
});

describe('nothing to route to', () => {
  test('an unknown model is one only when every living engine has told its models', () => {
    const named = { model: 'other' };
    const silent = { modelsKnown: false, models: [], state: InstanceState.STARTING };
    expect(idsOf(plan(POOLS, named))).toBe('unknown-model');
    expect(idsOf(plan([...POOLS, decodeOf('new', silent)], named))).toBe('no-route');
    expect(idsOf(plan([...POOLS, decodeOf('dead', { ...silent, state: InstanceState.GONE })], named))).toBe(
      'unknown-model',
    );
    expect(idsOf(plan([], named))).toBe('no-route');
  });

  test('a model that only one side has cannot be handed over, and why is told', () => {
    const decision = plan([prefillOf('p', { models: [model('other')] }), decodeOf('d')]);
    expect(idsOf(decision)).toBe('no-route');
    expect(verdictsOf(decision)).toEqual({ p: 'model' });
  });
});

describe('isRoutable', () => {
  const down = { state: InstanceState.SUSPECT };

  test.each<[readonly Instance[], boolean]>([
    [[], false],
    [[prefillOf('p')], false],
    [[decodeOf('d')], false],
    [[prefillOf('p'), decodeOf('d')], true],
    [[prefillOf('p', down), decodeOf('d')], false],
    [[bothOf('b')], true],
    [[bothOf('b', down)], false],
    // An aggregated engine beside a pair takes nothing.
    [[bothOf('b'), prefillOf('p', down), decodeOf('d')], false],
  ])('case %#: %s', (instances, expected) => {
    expect(isRoutable(instances)).toBe(expected);
  });

  test('says what planning does, for any pools', () => {
    const make = fc.constantFrom(prefillOf, decodeOf, bothOf);
    const state = fc.constantFrom(InstanceState.READY, InstanceState.SUSPECT, InstanceState.STARTING);
    fc.assert(
      fc.property(fc.array(fc.tuple(make, state), { maxLength: 5 }), (rows) => {
        const instances = rows.map(([of, is], i) => of(`i${i}`, { state: is }));
        expect(plan(instances).kind === 'plan').toBe(isRoutable(instances));
      }),
    );
  });
});

test('a verdict names the role for which the instance was looked at', () => {
  const decision = plan([...POOLS, decodeOf('x', { connector: 'other' })]);
  expect(decision.kind === 'plan' && decision.verdicts).toEqual([
    { instanceId: 'x', role: Role.DECODE, reason: 'connector' },
  ]);
});
