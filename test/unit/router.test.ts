import { create } from '@bufbuild/protobuf';
import { durationFromMs } from '@bufbuild/protobuf/wkt';
import { afterEach, beforeEach, describe, expect, test, vi } from 'vitest';
import { EngineInfoSchema, type Instance, InstanceState, LoadSampleSchema } from '../../gen/baton/v1/instance_pb.ts';
import {
  ExplainRouteRequestSchema,
  Leg,
  LegEnding,
  LegReportSchema,
  type Plan,
  PlanRouteRequestSchema,
  ReportOutcomeRequestSchema,
} from '../../gen/baton/v1/router_pb.ts';
import { roundRobin } from '../../src/policies/round-robin.ts';
import { toMs } from '../../src/services/durations.ts';
import { RouterService } from '../../src/services/router.ts';
import { decodeOf, Pools, prefillOf } from '../support/plan-instances.ts';

const READY = [prefillOf('p1'), prefillOf('p2'), decodeOf('d1'), decodeOf('d2'), decodeOf('d3')];
const DOWN = READY.map((instance) => ({ ...instance, state: InstanceState.SUSPECT }));

const NO_ABORT = { signal: new AbortController().signal };

interface Setup {
  readonly router: RouterService;
  readonly pools: Pools;
  readonly left: string[];
  readonly planned: string[];
  readonly breakers: string[];
  readonly waits: number[];
}

const NO_LIMITS = { requests: 0, prefill: 0, decode: 0 };

function setup(instances: readonly Instance[] = READY, queueMax = 2, limits = NO_LIMITS): Setup {
  const pools = new Pools(instances);
  const left: string[] = [];
  const planned: string[] = [];
  const waits: number[] = [];
  const breakers: string[] = [];
  const router = new RouterService(pools, {
    rules: { prefillPolicy: roundRobin(), decodePolicy: roundRobin(), minUncachedTokens: 0 },
    connector: 'nixl',
    queue: { max: queueMax, tenantMax: 0 },
    limits,
    slowStartMs: 0,
    breaker: { failures: 3, pairFailures: 2, openMs: 1000 },
    observe: {
      breaker: (owner, to) => breakers.push(`${Object.values(owner).join(' ')} ${to}`),
      planned: (mode, reason) => planned.push(`${mode} ${reason}`),
      queueLeft: (outcome) => left.push(outcome),
      queued: (since, until) => waits.push(until - since),
    },
  });
  return { router, pools, left, planned, breakers, waits };
}

interface Ask {
  readonly planKey?: string;
  readonly model?: string;
  readonly localReasons?: string[];
  readonly maxWaitMs?: number;
  readonly excluded?: string[];
  readonly tenant?: string;
  readonly priority?: number;
  readonly signal?: AbortSignal;
}

async function planOf(router: RouterService, ask: Ask = {}): Promise<Plan> {
  const { planKey = '', model = 'm', localReasons = [], maxWaitMs, excluded = [], signal } = ask;
  const { tenant = '', priority = 0 } = ask;
  const request = create(PlanRouteRequestSchema, {
    planKey,
    facts: { requestId: 'r', tenant, priority, model, localReasons },
    excludedInstanceIds: excluded,
    ...(maxWaitMs === undefined ? {} : { maxWait: durationFromMs(maxWaitMs) }),
  });
  const { result } = await router.planRoute(request, { signal: signal ?? new AbortController().signal });
  if (result.case !== 'plan') throw new Error('no plan');
  return result.value;
}

const pairOf = (plan: Plan) => `${plan.prefill?.instanceId ?? ''}>${plan.decode?.instanceId ?? ''}`;
const reasonOf = (promise: Promise<unknown>) =>
  promise.then(
    () => 'none',
    (error: { readonly reason?: string }) => error.reason ?? String(error),
  );

const finish = (router: RouterService, planId: string, final = true) =>
  router.reportOutcome(create(ReportOutcomeRequestSchema, { planId, final }));
const reportLeg = (
  router: RouterService,
  planId: string,
  instanceId: string,
  ending: LegEnding,
  leg: Leg = Leg.DECODE,
) =>
  router.reportOutcome(
    create(ReportOutcomeRequestSchema, {
      planId,
      legs: [create(LegReportSchema, { leg, instanceId, ending })],
    }),
  );

beforeEach(() => {
  vi.useFakeTimers({ toFake: ['setTimeout', 'clearTimeout', 'performance'] });
});
afterEach(() => {
  vi.useRealTimers();
});

describe('turns', () => {
  test('each pool is gone through by its own counter', async () => {
    const { router } = setup();
    const pairs: string[] = [];
    for (let i = 0; i < 6; i++) pairs.push(pairOf(await planOf(router)));
    expect(pairs).toEqual(['p1>d1', 'p2>d2', 'p1>d3', 'p2>d1', 'p1>d2', 'p2>d3']);
  });

  test('a plan without a prefill leg does not use up a turn of that pool', async () => {
    const { router } = setup();
    expect(pairOf(await planOf(router, { localReasons: ['n'] }))).toBe('>d1');
    expect(pairOf(await planOf(router))).toBe('p1>d2');
  });

  test('neither a dry run nor a failed plan does', async () => {
    const { router } = setup();
    const facts = { requestId: 'r', model: 'm' };
    for (let i = 0; i < 3; i++) {
      const { plan } = await router.explainRoute(create(ExplainRouteRequestSchema, { facts }), NO_ABORT);
      expect(plan === undefined ? '' : pairOf(plan)).toBe('p1>d1');
    }
    expect(await reasonOf(planOf(router, { model: 'nobody' }))).toBe('MODEL_NOT_FOUND');
    expect(pairOf(await planOf(router))).toBe('p1>d1');
    expect(['p1', 'd1'].map((id) => router.inFlight(id))).toEqual([1, 1]);
  });
});

test('the pools are filtered once, not for each plan, and not for a new load reading', async () => {
  let looks = 0;
  const watched = READY.map((instance) => ({
    ...instance,
    get state() {
      looks += 1;
      return InstanceState.READY;
    },
  }));
  const { router, pools } = setup(watched);
  await planOf(router);
  const first = looks;
  for (let i = 0; i < 20; i++) await planOf(router);
  expect(looks).toBe(first);
  const load = create(LoadSampleSchema, { running: 1 });
  pools.set(watched.map((instance, i) => (i === 0 ? { ...READY[0], ...instance, load } : instance)));
  for (let i = 0; i < 20; i++) await planOf(router);
  expect(looks - first).toBeLessThan(READY.length);
  pools.set(watched.slice(0, 4));
  await planOf(router);
  expect(looks - first).toBeGreaterThanOrEqual(4);
});

describe('a plan', () => {
  test('ranks the others as fallbacks and says what it is', async () => {
    const { router, planned } = setup();
    const plan = await planOf(router, { excluded: ['d2'] });
    expect(plan.prefillFallbacks.map(({ instanceId }) => instanceId)).toEqual(['p2']);
    expect(plan.decodeFallbacks.map(({ url }) => url)).toEqual(['http://d3']);
    expect(plan.verdicts.map(({ instanceId, reason }) => [instanceId, reason])).toEqual([['d2', 'excluded']]);
    expect(plan).toMatchObject({ connector: 'nixl', reason: 'disaggregated' });
    expect(plan.planId).not.toBe('');
    expect(planned).toEqual(['prefill_decode disaggregated']);
  });

  test('is the same for the same key until it is reported', async () => {
    const { router } = setup();
    const first = await planOf(router, { planKey: 'k' });
    expect((await planOf(router, { planKey: 'k' })).planId).toBe(first.planId);
    expect(router.inFlight('d1')).toBe(1);
    expect((await planOf(router, { planKey: 'other' })).planId).not.toBe(first.planId);
    await finish(router, first.planId);
    expect((await planOf(router, { planKey: 'k' })).planId).not.toBe(first.planId);
  });

  test('is one for two calls with one key at the same time', async () => {
    const { router } = setup();
    const [one, two] = await Promise.all([planOf(router, { planKey: 'k' }), planOf(router, { planKey: 'k' })]);
    expect(two.planId).toBe(one.planId);
    expect(['p1', 'p2', 'd1', 'd2'].map((id) => router.inFlight(id))).toEqual([1, 0, 1, 0]);
    await finish(router, one.planId);
    expect(READY.map(({ id }) => router.inFlight(id))).toEqual([0, 0, 0, 0, 0]);
  });

  test('without a key is always another', async () => {
    const { router } = setup();
    expect((await planOf(router)).planId).not.toBe((await planOf(router)).planId);
  });

  test('reserves both instances until the final report, and is freed once', async () => {
    const { router } = setup();
    const inFlight = () => ['p1', 'd1'].map((id) => router.inFlight(id));
    const { planId } = await planOf(router);
    expect(inFlight()).toEqual([1, 1]);
    await finish(router, planId, false);
    expect(inFlight()).toEqual([1, 1]);
    await finish(router, planId);
    expect(inFlight()).toEqual([0, 0]);
    await finish(router, planId);
    await finish(router, 'unknown');
    expect(inFlight()).toEqual([0, 0]);
  });

  test('frees the prefill instance as soon as it has answered', async () => {
    const { router } = setup();
    const { planId } = await planOf(router);
    await reportLeg(router, planId, 'p1', LegEnding.OK, Leg.PREFILL);
    expect(['p1', 'd1'].map((id) => router.inFlight(id))).toEqual([0, 1]);
    await finish(router, planId);
    expect(['p1', 'd1'].map((id) => router.inFlight(id))).toEqual([0, 0]);
  });

  test('moves with a leg that was never sent to the fallback that is asked next, and ends with the last one', async () => {
    const { router } = setup();
    const counts = () => ['d1', 'd2', 'd3'].map((id) => router.inFlight(id));
    const { planId } = await planOf(router);
    await reportLeg(router, planId, 'd1', LegEnding.NOT_SENT);
    expect(counts()).toEqual([0, 1, 0]);
    await reportLeg(router, planId, 'd2', LegEnding.NOT_SENT);
    expect(counts()).toEqual([0, 0, 1]);
    await reportLeg(router, planId, 'd3', LegEnding.NOT_SENT);
    expect(counts()).toEqual([0, 0, 0]);
    await finish(router, planId);
    expect(counts()).toEqual([0, 0, 0]);
  });

  test('that nobody ever reports is forgotten', async () => {
    const { router } = setup();
    await planOf(router);
    vi.advanceTimersByTime(2 * 60 * 60 * 1000 + 1);
    await planOf(router);
    expect(['p1', 'd1', 'p2', 'd2'].map((id) => router.inFlight(id))).toEqual([0, 0, 1, 1]);
  });

  test('needs facts', async () => {
    const { router } = setup();
    const signal = new AbortController().signal;
    expect(await reasonOf(router.planRoute(create(PlanRouteRequestSchema), { signal }))).toBe('INVALID_ARGUMENT');
    expect(await reasonOf(router.explainRoute(create(ExplainRouteRequestSchema), NO_ABORT))).toBe('INVALID_ARGUMENT');
  });
});

describe('an instance that refused a connection', () => {
  test('is tried last for a second, and the registry is told', async () => {
    const { router, pools } = setup();
    const { planId } = await planOf(router);
    await reportLeg(router, planId, 'd2', LegEnding.NOT_SENT);
    expect(pools.noted).toEqual(['d2 refused']);
    const plan = await planOf(router);
    expect([plan.decode, ...plan.decodeFallbacks].map((target) => target?.instanceId)).toEqual(['d3', 'd1', 'd2']);
    vi.advanceTimersByTime(1001);
    expect((await planOf(router)).decode?.instanceId).toBe('d2');
    expect((await planOf(router)).decodeFallbacks.map(({ instanceId }) => instanceId)).toEqual(['d3', 'd2']);
  });

  test('is back at once when it has answered', async () => {
    const { router } = setup();
    const { planId } = await planOf(router);
    await reportLeg(router, planId, 'd2', LegEnding.NOT_SENT);
    await reportLeg(router, planId, 'd2', LegEnding.OK);
    expect((await planOf(router)).decode?.instanceId).toBe('d2');
  });

  test.each([LegEnding.SERVER_ERROR, LegEnding.RESET, LegEnding.CLIENT_ERROR, LegEnding.BUSY])(
    'differs from one that answered badly (%i)',
    async (ending) => {
      const { router, pools } = setup();
      const { planId } = await planOf(router);
      await reportLeg(router, planId, 'd2', ending);
      expect((await planOf(router)).decode?.instanceId).toBe('d2');
      expect(pools.noted).not.toContain('d2 refused');
    },
  );
});

describe('breakers', () => {
  const failing = async (router: RouterService, times: number) => {
    const { planId } = await planOf(router);
    for (let i = 0; i < times; i++) await reportLeg(router, planId, 'd2', LegEnding.SERVER_ERROR);
    await finish(router, planId);
  };

  test('an instance that fails leg after leg is tried last, with the reason, until a trial ends well', async () => {
    const { router, breakers } = setup();
    await failing(router, 3);
    expect(breakers).toEqual(['instance d2 open']);
    const plan = await planOf(router);
    expect([plan.decode, ...plan.decodeFallbacks].map((target) => target?.instanceId)).toEqual(['d3', 'd1', 'd2']);
    expect(plan.verdicts).toMatchObject([{ instanceId: 'd2', reason: 'breaker_open' }]);
    vi.advanceTimersByTime(1000);
    const trial = await planOf(router);
    expect(trial.decode?.instanceId).toBe('d2');
    const during: (string | undefined)[] = [];
    for (let i = 0; i < 3; i++) during.push((await planOf(router)).decode?.instanceId);
    expect(during).not.toContain('d2');
    await reportLeg(router, trial.planId, 'd2', LegEnding.OK);
    expect(breakers.at(-1)).toBe('instance d2 closed');
  });

  test('the only instance is used in spite of it, and its success closes it', async () => {
    const { router, breakers } = setup([prefillOf('p1'), decodeOf('d2')]);
    await failing(router, 3);
    const plan = await planOf(router);
    expect([pairOf(plan), plan.verdicts.length]).toEqual(['p1>d2', 0]);
    await reportLeg(router, plan.planId, 'd2', LegEnding.OK);
    expect(breakers).toEqual(['instance d2 open', 'instance d2 closed']);
  });

  test('a pair that cannot hand over is avoided, in plans and in dry runs', async () => {
    const { router } = setup();
    for (let i = 0; i < 2; i++) {
      const { planId } = await planOf(router);
      const legs = [
        create(LegReportSchema, {
          leg: Leg.DECODE,
          instanceId: 'd1',
          ending: LegEnding.SERVER_ERROR,
          peerInstanceId: 'p1',
        }),
      ];
      await router.reportOutcome(create(ReportOutcomeRequestSchema, { planId, legs, final: true }));
    }
    const facts = { requestId: 'r', model: 'm' };
    const pairs = new Set<string>();
    for (let i = 0; i < 12; i++) {
      const explained = await router.explainRoute(create(ExplainRouteRequestSchema, { facts }), NO_ABORT);
      const plan = await planOf(router);
      expect(explained.plan?.decode?.instanceId).toBe(plan.decode?.instanceId);
      pairs.add(pairOf(plan));
    }
    expect(pairs.has('p1>d1')).toBe(false);
    const served = [...pairs].flatMap((pair) => pair.split('>'));
    expect([...new Set(served)].toSorted()).toEqual(READY.map(({ id }) => id).toSorted());
  });
});

describe('a dry run', () => {
  const of = (id: string, version: string) => ({ id, engine: create(EngineInfoSchema, { kind: 'vllm', version }) });
  const explain = (router: RouterService) =>
    router.explainRoute(create(ExplainRouteRequestSchema, { facts: { requestId: 'r', model: 'm' } }), NO_ABORT);

  test('says of each other instance why it lost', async () => {
    const [old, next] = ['0.32.0', '0.33.0'];
    const { router } = setup([
      prefillOf('p1', of('p1', old)),
      prefillOf('p2', of('p2', next)),
      prefillOf('p3', of('p3', next)),
      { ...decodeOf('d1'), state: InstanceState.DRAINING },
      decodeOf('d2', of('d2', next)),
      decodeOf('d3', of('d3', '0.31.0')),
    ]);
    const { plan } = await explain(router);
    expect(plan && pairOf(plan)).toBe('p2>d2');
    expect(plan?.verdicts.map(({ instanceId, reason, detail }) => [instanceId, reason, detail])).toEqual([
      ['d1', 'draining', ''],
      ['p1', 'incompatible_version', 'version 0.32.0, but d2 has 0.33.0'],
      ['p3', 'not_picked', '0 in flight'],
      ['d3', 'incompatible_version', 'version 0.31.0, but p1 has 0.32.0'],
    ]);
  });

  test('that finds no pair says why in its error, which a plan does not tell its client', async () => {
    const { router } = setup([prefillOf('p1', of('p1', '1')), decodeOf('d1', of('d1', '2')), DOWN[3] ?? decodeOf('x')]);
    await expect(explain(router)).rejects.toMatchObject({
      reason: 'NO_ROUTABLE_PAIR',
      message:
        'No engine can take this request at the moment: d2 suspect; d1 incompatible_version (version 2, but p1 has 1); ' +
        'p1 incompatible_version (version 1, but d1 has 2).',
    });
    await expect(planOf(router)).rejects.toMatchObject({ message: 'No engine can take this request at the moment.' });
  });
});

describe('the queue', () => {
  const WAIT = { maxWaitMs: 1000 };

  test('is not entered without a wait, or for a model that nobody has', async () => {
    const { router, left } = setup(DOWN);
    expect(await reasonOf(planOf(router))).toBe('NO_ROUTABLE_PAIR');
    expect(await reasonOf(planOf(router, { ...WAIT, model: 'nobody' }))).toBe('MODEL_NOT_FOUND');
    expect(left).toEqual([]);
  });

  test('gives a plan as soon as a pair is ready', async () => {
    const { router, pools, left, waits } = setup(DOWN);
    const waiting = planOf(router, WAIT);
    await vi.advanceTimersByTimeAsync(500);
    expect(router.queueDepth).toBe(1);
    pools.set([prefillOf('p1'), ...DOWN.slice(1)]);
    await vi.advanceTimersByTimeAsync(100);
    expect(router.queueDepth).toBe(1);
    pools.set([prefillOf('p1'), decodeOf('d1')]);
    const plan = await waiting;
    expect(pairOf(plan)).toBe('p1>d1');
    expect([toMs(plan.queued), ...waits]).toEqual([600, 600]);
    expect((await planOf(router)).queued).toBeUndefined();
    expect([router.queueDepth, pools.listeners, vi.getTimerCount()]).toEqual([0, 0, 0]);
    expect(left).toEqual(['routed']);
  });

  test('ends when the time is up, however often the pools change meanwhile', async () => {
    const { router, pools, left } = setup(DOWN);
    const waiting = reasonOf(planOf(router, WAIT));
    for (let i = 0; i < 9; i++) {
      await vi.advanceTimersByTimeAsync(100);
      pools.set([...DOWN]);
    }
    expect(left).toEqual([]);
    await vi.advanceTimersByTimeAsync(100);
    expect(await waiting).toBe('NO_ROUTABLE_PAIR');
    expect(left).toEqual(['timeout']);
    expect([router.queueDepth, pools.listeners, vi.getTimerCount()]).toEqual([0, 0, 0]);
  });

  test('ends when the client leaves, also one that has left before', async () => {
    const { router, pools, left } = setup(DOWN);
    const client = new AbortController();
    const waiting = reasonOf(planOf(router, { ...WAIT, signal: client.signal }));
    await vi.advanceTimersByTimeAsync(10);
    client.abort();
    expect(await waiting).toBe('CLIENT_GONE');
    expect(await reasonOf(planOf(router, { ...WAIT, signal: client.signal }))).toBe('CLIENT_GONE');
    expect(left).toEqual(['client_gone', 'client_gone']);
    expect([router.queueDepth, pools.listeners, vi.getTimerCount()]).toEqual([0, 0, 0]);
  });

  test('ends when the router stops, and nobody enters it then', async () => {
    const { router, pools, left } = setup(DOWN);
    const waiting = reasonOf(planOf(router, WAIT));
    await vi.advanceTimersByTimeAsync(10);
    router.stopWaiting();
    expect(await waiting).toBe('SHUTTING_DOWN');
    expect(await reasonOf(planOf(router, WAIT))).toBe('SHUTTING_DOWN');
    expect(await reasonOf(planOf(router))).toBe('NO_ROUTABLE_PAIR');
    expect(left).toEqual(['shutting_down', 'shutting_down']);
    expect([router.queueDepth, pools.listeners, vi.getTimerCount()]).toEqual([0, 0, 0]);
  });

  test('is bounded; who does not fit is told when to come again', async () => {
    const { router, pools } = setup(DOWN, 2);
    const waiting = [planOf(router, WAIT), planOf(router, WAIT)];
    await expect(planOf(router, WAIT)).rejects.toMatchObject({ reason: 'QUEUE_FULL', retryAfterMs: 1000 });
    pools.set(READY);
    expect((await Promise.all(waiting)).map(pairOf)).toEqual(['p1>d1', 'p2>d2']);
  });

  test('learns meanwhile that a model is unknown', async () => {
    const silent = { modelsKnown: false, models: [], state: InstanceState.STARTING };
    const { router, pools } = setup([prefillOf('p', silent), decodeOf('d', silent)]);
    const waiting = reasonOf(planOf(router, { ...WAIT, model: 'x' }));
    await vi.advanceTimersByTimeAsync(10);
    pools.set(READY);
    expect(await waiting).toBe('MODEL_NOT_FOUND');
  });
});

describe('limits', () => {
  const WAIT = { maxWaitMs: 1000 };
  const D_ONE = { ...NO_LIMITS, decode: 1 };

  test('an engine gets no more legs than it may have; the request that fits nowhere waits until one has ended', async () => {
    const { router, left } = setup(READY, 9, D_ONE);
    const plans = await Promise.all([1, 2, 3].map(() => planOf(router)));
    expect(plans.map(({ decode }) => decode?.instanceId).toSorted()).toEqual(['d1', 'd2', 'd3']);
    const waiting = planOf(router, WAIT);
    await vi.advanceTimersByTimeAsync(500);
    expect(router.queueDepth).toBe(1);
    await finish(router, plans[1]?.planId ?? '');
    expect((await waiting).decode?.instanceId).toBe(plans[1]?.decode?.instanceId);
    expect(left).toEqual(['routed']);
  });

  test('a full engine is no fallback either, and a dry run says why it lost', async () => {
    const { router } = setup(READY, 9, D_ONE);
    const first = await planOf(router);
    const second = await planOf(router);
    expect(second.decodeFallbacks.map(({ instanceId }) => instanceId)).not.toContain(first.decode?.instanceId);
    const facts = { requestId: 'r', model: 'm' };
    const { plan } = await router.explainRoute(create(ExplainRouteRequestSchema, { facts }), NO_ABORT);
    expect(plan?.verdicts.filter(({ reason }) => reason === 'full')).toHaveLength(2);
  });

  test('a request that found no room in time is told that the engines are busy, not that there are none', async () => {
    const { router } = setup(READY, 9, { ...NO_LIMITS, requests: 1 });
    await planOf(router);
    expect(await reasonOf(planOf(router))).toBe('OVERLOADED');
    const waiting = reasonOf(planOf(router, WAIT));
    await vi.advanceTimersByTimeAsync(1000);
    expect(await waiting).toBe('OVERLOADED');
    expect(router.queueDepth).toBe(0);
  });

  test('room goes to tenants in turn, and within one by priority', async () => {
    const { router } = setup(READY, 9, { ...NO_LIMITS, requests: 1 });
    let { planId } = await planOf(router);
    const order: string[] = [];
    const ask = (name: string, priority: number) =>
      planOf(router, { ...WAIT, tenant: name[0] ?? '', priority }).then((plan) => {
        order.push(name);
        planId = plan.planId;
      });
    const all = [ask('a1', 0), ask('a2', -1), ask('a3', 0), ask('b1', 5)];
    for (let i = 0; i < 4; i++) {
      await finish(router, planId);
      await vi.advanceTimersByTimeAsync(0);
    }
    await Promise.all(all);
    expect(order).toEqual(['a2', 'b1', 'a1', 'a3']);
  });

  test('requests that ask at the same moment do not get the same last place', async () => {
    const { router } = setup([prefillOf('p1'), decodeOf('d1')], 9, D_ONE);
    const asked = await Promise.all([1, 2, 3].map(() => reasonOf(planOf(router))));
    expect(asked.toSorted()).toEqual(['OVERLOADED', 'OVERLOADED', 'none']);
    expect(router.inFlight('d1')).toBe(1);
  });
});
