import { create } from '@bufbuild/protobuf';
import fc from 'fast-check';
import { describe, expect, test } from 'vitest';
import {
  type EngineInfo,
  EngineInfoSchema,
  type Instance,
  InstanceState,
  ModelCardSchema,
  Role,
} from '../../gen/baton/v1/instance_pb.ts';
import { PlanMode } from '../../gen/baton/v1/router_pb.ts';
import {
  type Decision,
  decide,
  MAX_RANKED,
  type PlanFacts,
  type PlanRules,
  type PlanView,
} from '../../src/core/plan.ts';
import { buildPools, isRoutable, type Seated } from '../../src/core/pools.ts';
import { POLICIES } from '../../src/policies/index.ts';
import { roundRobin } from '../../src/policies/round-robin.ts';
import { bothOf, decodeOf, type InstanceChanges, prefillOf } from '../support/plan-instances.ts';
import { POLICY_SETTINGS as SETTINGS } from '../support/policy-settings.ts';
import { seatOf } from '../support/seats.ts';
import { seeded } from '../support/seeded.ts';

const FACTS: PlanFacts = { model: 'm', bodyBytes: 400, localReasons: [], request: { session: '', prefix: [] } };
const RULES: PlanRules = { prefillPolicy: roundRobin(), decodePolicy: roundRobin(), minUncachedTokens: 0 };
const model = (id: string) => create(ModelCardSchema, { id });

interface Around extends Partial<PlanView> {
  readonly excluded?: readonly string[];
  readonly prefer?: Parameters<typeof decide>[3];
  readonly seats?: readonly Partial<Seated>[];
}

function plan(
  instances: readonly Instance[],
  facts: Partial<PlanFacts> = {},
  rules: Partial<PlanRules> = {},
  { excluded = [], prefer, seats = [], ...view }: Around = {},
): Decision {
  const all = { ...FACTS, ...facts };
  const seated = instances.map((instance, i) => seatOf(instance, seats[i]));
  const barred = new Map(excluded.map((id) => [id, 'excluded']));
  const pools = buildPools(seated, { model: all.model, connector: 'nixl', barred });
  const seen: PlanView = { pools, cooling: new Set(), random: () => 0, now: 0, ...view };
  return decide(all, seen, { ...RULES, ...rules }, prefer);
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

test('a plan names no more than a few fallbacks, however large the pool', () => {
  const many = (of: typeof prefillOf, name: string) => Array.from({ length: 30 }, (_, i) => of(`${name}${i}`));
  const decision = plan([...many(prefillOf, 'p'), ...many(decodeOf, 'd')]);
  expect(decision.kind === 'plan' && [decision.prefill.length, decision.decode.length]).toEqual([
    MAX_RANKED,
    MAX_RANKED,
  ]);
});

describe('who may take a leg', () => {
  test.each<[string, InstanceChanges, string]>([
    ['starts', { state: InstanceState.STARTING }, 'starting'],
    ['is suspect', { state: InstanceState.SUSPECT }, 'suspect'],
    ['drains', { state: InstanceState.DRAINING }, 'draining'],
    ['is gone', { state: InstanceState.GONE }, 'gone'],
    ['is in no state', { state: InstanceState.UNSPECIFIED }, 'unspecified'],
    ['has another connector', { connector: 'mooncake' }, 'connector'],
    ['has another model', { models: [model('other')] }, 'model'],
    ['has no model', { models: [] }, 'model'],
  ])('not one that %s', (_name, changes, reason) => {
    const decision = plan([prefillOf('p0', changes), prefillOf('p1'), decodeOf('d0', changes), decodeOf('d1')]);
    expect(idsOf(decision)).toBe('p1>d1');
    expect(verdictsOf(decision)).toEqual({ p0: reason, d0: reason });
  });

  test('not one that the caller excludes', () => {
    const decision = plan(POOLS, {}, {}, { excluded: ['p1', 'd2'] });
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

  test('what is preferred goes first where it can be chosen, the others follow in their order', () => {
    const prefer = { prefill: 'p3', decode: 'd2' };
    expect(idsOf(plan(POOLS, {}, {}, { prefer }))).toBe('p3,p1,p2>d2,d1');
    expect(idsOf(plan(POOLS, {}, {}, { prefer, excluded: ['p3', 'd2'] }))).toBe('p1,p2>d1');
  });

  test('a policy is told what runs where', () => {
    const seen: number[] = [];
    const decodePolicy: PlanRules['decodePolicy'] = {
      name: 'spy',
      rank: ({ candidates }) => {
        seen.push(...candidates.map(({ inFlight }) => inFlight));
        return candidates;
      },
    };
    plan(POOLS, {}, { decodePolicy }, { seats: POOLS.map(({ id }) => ({ inFlight: Number(id.slice(1)) })) });
    expect(seen).toEqual([1, 2]);
  });
});

describe('a pair', () => {
  const engine = (changes: Partial<Omit<EngineInfo, '$typeName' | '$unknown'>>) => ({
    engine: create(EngineInfoSchema, {
      kind: 'vllm',
      version: '0.33.0',
      blockSize: 16,
      templateFingerprint: 'f',
      ...changes,
    }),
  });
  const rooted = (root: string) => ({ models: [create(ModelCardSchema, { id: 'm', root })] });
  const VARIANTS: readonly InstanceChanges[] = [
    engine({}),
    engine({ version: '0.32.0' }),
    engine({ blockSize: 32 }),
    engine({ kind: 'sglang' }),
    engine({ templateFingerprint: 'g' }),
    rooted('weights-1'),
    rooted('weights-2'),
    { labels: { compat_group: 'blue' } },
    { labels: { compat_group: 'green' } },
    { connector: 'mooncake' },
    {},
  ];
  /** Written down a second time, as plainly as can be. */
  const mayPair = (p: Instance, d: Instance) => {
    const differ = (a: string | number | undefined, b: string | number | undefined) =>
      a !== undefined && b !== undefined && a !== '' && b !== '' && a !== 0 && b !== 0 && a !== b;
    return !(
      differ(p.engine?.version, d.engine?.version) ||
      differ(p.engine?.kind, d.engine?.kind) ||
      differ(p.engine?.blockSize, d.engine?.blockSize) ||
      differ(p.engine?.templateFingerprint, d.engine?.templateFingerprint) ||
      differ(p.models[0]?.root, d.models[0]?.root) ||
      differ(p.labels['compat_group'], d.labels['compat_group']) ||
      differ(p.connector, d.connector)
    );
  };

  test.each(Object.keys(POLICIES))('of what cannot exchange KV is never chosen, not even as a fallback: %s', (name) => {
    const [, make = roundRobin] = Object.entries(POLICIES).find(([key]) => key === name) ?? [];
    const side = fc.array(fc.constantFrom(...VARIANTS), { minLength: 1, maxLength: 5 });
    let planned = 0;
    fc.assert(
      fc.property(side, side, fc.nat(), fc.string(), (prefills, decodes, seed, session) => {
        const pool = [
          ...prefills.map((changes, i) => prefillOf(`p${i}`, changes)),
          ...decodes.map((changes, i) => decodeOf(`d${i}`, changes)),
        ];
        const [prefillPolicy, decodePolicy] = [make(SETTINGS), make(SETTINGS)];
        const request = { session, prefix: [] };
        const decision = plan(pool, { request }, { prefillPolicy, decodePolicy }, { random: seeded(seed) });
        const usable = pool.filter(({ connector }) => connector === 'nixl');
        const [ps, ds] = [usable.filter(({ id }) => id.startsWith('p')), usable.filter(({ id }) => id.startsWith('d'))];
        expect(decision.kind === 'plan').toBe(ps.some((p) => ds.some((d) => mayPair(p, d))));
        if (decision.kind !== 'plan') return;
        planned += 1;
        for (const p of decision.prefill) for (const d of decision.decode) expect(mayPair(p, d)).toBe(true);
      }),
    );
    expect(planned).toBeGreaterThan(10);
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
    expect(isRoutable(instances, 'nixl')).toBe(expected);
  });

  test('says what planning does, for any pools', () => {
    const make = fc.constantFrom(prefillOf, decodeOf, bothOf);
    const state = fc.constantFrom(InstanceState.READY, InstanceState.SUSPECT, InstanceState.STARTING);
    fc.assert(
      fc.property(fc.array(fc.tuple(make, state), { maxLength: 5 }), (rows) => {
        const instances = rows.map(([of, is], i) => of(`i${i}`, { state: is }));
        expect(plan(instances).kind === 'plan').toBe(isRoutable(instances, 'nixl'));
      }),
    );
  });
});

test('a verdict names the role for which the instance was looked at', () => {
  const decision = plan([...POOLS, decodeOf('x', { connector: 'other' })]);
  expect(decision.kind === 'plan' && decision.verdicts).toEqual([
    { instanceId: 'x', role: Role.DECODE, reason: 'connector', detail: '' },
  ]);
});
