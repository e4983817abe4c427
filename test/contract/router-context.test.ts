import { create } from '@bufbuild/protobuf';
import { expect, onTestFinished, test, vi } from 'vitest';
import { EngineInfoSchema, IncarnationSchema, KvSettingsSchema } from '../../gen/baton/v1/instance_pb.ts';
import { KVCacheStore } from '../../gen/baton/v1/kv_cache_store_pb.ts';
import {
  Leg,
  LegEnding,
  LegReportSchema,
  type Plan,
  type PlanContext,
  PlanContextSchema,
  PlanRouteRequestSchema,
  ReportOutcomeRequestSchema,
  RequestFactsSchema,
} from '../../gen/baton/v1/router_pb.ts';
import { TokenChainSchema } from '../../gen/baton/v1/tokens_pb.ts';
import { Settings } from '../../src/config/settings.ts';
import { buildChain } from '../../src/core/chain.ts';
import { decodeKvTransferParams } from '../../src/core/kv-transfer.ts';
import { SILENT_LOGGER } from '../../src/obs/log.ts';
import { Metrics } from '../../src/obs/metrics.ts';
import { buildRouter } from '../../src/roles/router.ts';
import { createDirectClient } from '../../src/rpc/direct-client.ts';
import { EVERYTHING, KvCacheStoreService } from '../../src/services/kv-cache-store.ts';
import { sha256 } from '../../src/services/sha256.ts';
import { openMemoryStore } from '../../src/stores/memory.ts';
import { STORE_LIMITS } from '../../src/stores/store.ts';
import { configOf } from '../support/harness.ts';
import { ids } from '../support/kv-store.ts';
import { decodeOf, Pools, prefillOf } from '../support/plan-instances.ts';

// Two routers over one store: what one planned, the other ends.
const FACTS = create(RequestFactsSchema, { requestId: 'r', model: 'm', tenant: 't', conversationId: 'c' });
const engine = create(EngineInfoSchema, { version: '0.33.0', blockSize: 16, templateFingerprint: 'f' });
const life = (generation: number) => create(IncarnationSchema, { generation });
const kv = create(KvSettingsSchema, { bidirectional: 'on', loadFailurePolicy: 'fail' });
const READY = [prefillOf('p', { engine, kv }), decodeOf('d', { engine, incarnation: life(1) })];
const HANDLE = {
  do_remote_prefill: false,
  do_remote_decode: true,
  remote_block_ids: [ids(13)],
  remote_engine_id: 'e',
  remote_request_id: 'r',
  remote_host: '10.0.0.2',
  remote_port: 5601,
  remote_num_tokens: 200,
  remote_blocks_expiry_time: 5.5,
};

async function setUp() {
  const store = await openMemoryStore({ now: () => performance.now(), limits: STORE_LIMITS });
  const client = createDirectClient(KVCacheStore, new KvCacheStoreService({ store, callerOf: () => EVERYTHING }));
  const pools = new Pools(READY);
  const metrics = new Metrics({ version: '0' });
  const settings = new Settings(configOf({}, 'timeouts: {store: 5s}'));
  const stack = new AsyncDisposableStack();
  onTestFinished(() => stack.disposeAsync());
  const routerOf = () => buildRouter(settings, pools, client, undefined, metrics, SILENT_LOGGER, stack);
  const key = { tenant: 't', model: 'm', conversationId: 'c' };
  const entries = async () => (await client.getEntry({ selector: { case: 'key', value: key } })).entries;
  return { pools, entries, client, key, planner: routerOf(), other: routerOf() };
}

async function planOf(router: Awaited<ReturnType<typeof setUp>>['planner'], tokenIds?: number[]): Promise<Plan> {
  const prompt = tokenIds === undefined ? {} : { prompt: { instanceId: 'p', tokenIds } };
  const request = create(PlanRouteRequestSchema, { planKey: 'k', facts: FACTS, ...prompt });
  const { result } = await router.planRoute(request, { signal: new AbortController().signal });
  if (result.case === 'plan') return result.value;
  if (tokenIds !== undefined) throw new Error('asked for tokens again');
  return planOf(router, ids(220));
}

const leg = (which: Leg, ending: LegEnding, warm = false) =>
  create(LegReportSchema, { leg: which, instanceId: which === Leg.PREFILL ? 'p' : 'd', ending, warm });
const SERVED = [leg(Leg.PREFILL, LegEnding.OK), leg(Leg.DECODE, LegEnding.OK)];

function finalOf(plan: Plan, legs = SERVED, context?: PlanContext) {
  const handle = decodeKvTransferParams(new TextEncoder().encode(JSON.stringify(HANDLE)));
  const chain = create(TokenChainSchema, buildChain(ids(201), { model: 'm', adapter: '', cacheSalt: '' }, sha256));
  return create(ReportOutcomeRequestSchema, {
    planId: plan.planId,
    final: true,
    status: 200,
    legs,
    chain,
    ...(handle === undefined ? {} : { handle }),
    ...(context === undefined ? {} : { context }),
  });
}

const contextOf = (plan: Plan) => create(PlanContextSchema, { facts: FACTS, plan });

test('a router that did not make the plan says so, and with its context stores the handle', async () => {
  const { planner, other, entries } = await setUp();
  const plan = await planOf(planner);
  expect(await other.reportOutcome(finalOf(plan))).toMatchObject({ planUnknown: true });
  expect(await entries()).toEqual([]);
  expect(await other.reportOutcome(finalOf(plan, SERVED, contextOf(plan)))).toMatchObject({ planUnknown: false });
  expect(await entries()).toMatchObject([{ storedTokens: 200, chainTokens: 201 }]);
});

test('a report whose answer was lost stores its handle once', async () => {
  const { planner, entries } = await setUp();
  const plan = await planOf(planner);
  expect(await planner.reportOutcome(finalOf(plan))).toMatchObject({ planUnknown: false });
  expect(await planner.reportOutcome(finalOf(plan))).toMatchObject({ planUnknown: true });
  await planner.reportOutcome(finalOf(plan, SERVED, contextOf(plan)));
  expect(await entries()).toHaveLength(1);
});

test('what a decode engine held before its restart is not stored', async () => {
  const { planner, other, entries, pools } = await setUp();
  const plan = await planOf(planner);
  pools.set(READY.map((instance) => (instance.id === 'd' ? { ...instance, incarnation: life(2) } : instance)));
  await other.reportOutcome(finalOf(plan, SERVED, contextOf(plan)));
  expect(await entries()).toEqual([]);
});

test.each([
  ['a leg that may have read it spends the claim', [leg(Leg.PREFILL, LegEnding.RESET, true)], 'taken'],
  ['a leg that was never sent puts it back', [leg(Leg.PREFILL, LegEnding.NOT_SENT, true)], 'back'],
  ['a leg that was refused puts it back', [leg(Leg.PREFILL, LegEnding.CLIENT_ERROR, true)], 'back'],
])('%s', async (_, legs, end) => {
  const { planner, other, entries } = await setUp();
  const first = await planOf(planner);
  await planner.reportOutcome(finalOf(first));
  const plan = await planOf(planner);
  expect(plan.prefillHandle?.matchedTokens).toBe(200);
  expect(await entries()).toMatchObject([{ claimed: true }]);
  const report = create(ReportOutcomeRequestSchema, {
    planId: plan.planId,
    final: true,
    legs,
    context: contextOf(plan),
  });
  await other.reportOutcome(report);
  await expect.poll(async () => (await entries()).map(({ claimed }) => claimed)).toEqual(end === 'back' ? [false] : []);
});

test('a planning that is asked for twice at once has one plan, and no claim beside it', async () => {
  const { planner, entries } = await setUp();
  await planner.reportOutcome(finalOf(await planOf(planner)));
  const [one, two] = await Promise.all([planOf(planner, ids(220)), planOf(planner, ids(220))]);
  expect(one.planId).toBe(two.planId);
  const claimed = one.prefillHandle !== undefined;
  await expect.poll(async () => (await entries()).map((entry) => entry.claimed)).toEqual([claimed]);
});

test('the same planning on two routers claims once, and what the one gives back the other does not lose', async () => {
  const { planner, other, entries } = await setUp();
  await planner.reportOutcome(finalOf(await planOf(planner)));
  const [one, two] = await Promise.all([planOf(planner, ids(220)), planOf(other, ids(220))]);
  const handles = [one, two].flatMap(({ prefillHandle }) => prefillHandle?.claimId ?? []);
  expect(handles).toHaveLength(1);
  const winner = one.prefillHandle === undefined ? other : planner;
  const plan = one.prefillHandle === undefined ? two : one;
  await winner.reportOutcome(create(ReportOutcomeRequestSchema, { planId: plan.planId, final: true }));
  await expect.poll(async () => (await entries()).map((entry) => entry.claimed)).toEqual([false]);
});

type StoreClient = Awaited<ReturnType<typeof setUp>>['client'];

/** Calls `leave` when the store has answered the next call of a method. */
const AFTER = {
  'the look': (client: StoreClient, leave: () => void) => {
    const look = client.getEntry;
    vi.spyOn(client, 'getEntry').mockImplementationOnce((...call) => look(...call).finally(leave));
  },
  'the take': (client: StoreClient, leave: () => void) => {
    const take = client.takeEntry;
    vi.spyOn(client, 'takeEntry').mockImplementationOnce((...call) => take(...call).finally(leave));
  },
};

test.each(['the look', 'the take'] as const)(
  'a planning whose caller goes after %s holds nothing, and its repeat gets the handle, here or at another router',
  async (step) => {
    const { planner, other, entries, client } = await setUp();
    for (const next of [planner, other]) {
      await planner.reportOutcome(finalOf(await planOf(planner)));
      const caller = new AbortController();
      AFTER[step](client, () => caller.abort());
      const prompt = { instanceId: 'p', tokenIds: ids(220) };
      const request = create(PlanRouteRequestSchema, { planKey: 'k', facts: FACTS, prompt });
      await expect(planner.planRoute(request, { signal: caller.signal })).rejects.toThrow('aborted');
      expect(planner.busy()).toEqual([]);
      await expect.poll(async () => (await entries()).map(({ claimed }) => claimed)).toEqual([false]);
      const plan = await planOf(next, ids(220));
      expect(plan.prefillHandle?.matchedTokens).toBe(200);
      await next.reportOutcome(
        create(ReportOutcomeRequestSchema, {
          planId: plan.planId,
          final: true,
          legs: [leg(Leg.PREFILL, LegEnding.OK, true)],
        }),
      );
      await expect.poll(entries).toEqual([]);
    }
  },
);
