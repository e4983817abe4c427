import { create } from '@bufbuild/protobuf';
import { durationFromMs } from '@bufbuild/protobuf/wkt';
import { describe, expect, test } from 'vitest';
import { KvSettingsSchema } from '../../gen/baton/v1/instance_pb.ts';
import {
  Leg,
  LegEnding,
  PlanMode,
  PlanRouteResponseSchema,
  PlanSchema,
  type ReportOutcomeRequest,
  ReportOutcomeResponseSchema,
  Router,
  TargetSchema,
} from '../../gen/baton/v1/router_pb.ts';
import type { Connector } from '../../src/connectors/connector.ts';
import { nixl } from '../../src/connectors/nixl.ts';
import { EngineClient } from '../../src/engine/client.ts';
import { createDirectClient } from '../../src/rpc/direct-client.ts';
import { type HandOverDeps, type HandOverReport, handOver } from '../../src/services/hand-over.ts';
import type { SilentTime } from '../../src/services/silence-watch.ts';
import { type SimPools, startSimPools } from '../../src/sim/pools.ts';
import type { Sim } from '../../src/sim/start-sim.ts';
import { generateRequest, handOverDeps, silentSink } from '../support/lone-hand-over.ts';
import { engine, legsOf } from './ladder-support.ts';

const LEASE_MS = 30_000;
const MARGIN_MS = 10_000;

interface Handed extends AsyncDisposable {
  readonly pools: SimPools;
  readonly client: AbortController;
  readonly reports: readonly ReportOutcomeRequest[];
  /** Moves the clock of the hand-over. */
  readonly pass: (ms: number) => void;
  readonly now: () => number;
  readonly run: (hooks?: Hooks) => Promise<HandOverReport>;
}

interface Hooks {
  readonly onReport?: (report: ReportOutcomeRequest) => void;
  readonly onHandle?: () => void;
  readonly onLeg?: (instanceId: string) => void;
  /** The last silence of the first D, on the hand-over's clock. */
  readonly silence?: () => SilentTime | undefined;
  /** More of what the hand-over works with. */
  readonly more?: Partial<HandOverDeps>;
}

/** The hand-over itself between two engines of each kind, with a clock that the test moves. */
async function start(): Promise<Handed> {
  await using stack = new AsyncDisposableStack();
  const pools = stack.use(await startSimPools({ prefill: 2, decode: 2, engine: { recordRequests: true } }));
  const engines = stack.use(new EngineClient({ connectMs: 3000, keepAliveMs: 4000 }));
  const reports: ReportOutcomeRequest[] = [];
  const client = new AbortController();
  let offset = 0;
  const now = () => performance.now() + offset;
  const run = ({ onReport, onHandle, onLeg, silence, more }: Hooks = {}) => {
    const connector: Connector = {
      ...nixl,
      readPrefillReply(raw, context) {
        onHandle?.();
        return nixl.readPrefillReply(raw, context);
      },
    };
    const router = createDirectClient(Router, {
      planRoute: async () => create(PlanRouteResponseSchema, { result: { case: 'plan', value: planOf(pools) } }),
      reportOutcome: async (report) => {
        reports.push(report);
        onReport?.(report);
        return create(ReportOutcomeResponseSchema);
      },
    });
    return handOver(
      handOverDeps(engines, router, now, {
        connectors: { nixl: connector },
        engineHeaders: (instanceId) => {
          onLeg?.(instanceId);
          return { headers: {}, auth: 'none' };
        },
        silences: {
          of: (id) => (id === new URL(engine(pools.decode).url).host ? silence?.() : undefined),
          silentForMs: () => 0,
        },
        ...more,
      }),
      generateRequest({ prompt: 'x'.repeat(100), max_tokens: 8, ignore_eos: true }, now),
      silentSink(client.signal),
    );
  };
  const resources = stack.move();
  return {
    pools,
    client,
    reports,
    pass: (ms) => {
      offset += ms;
    },
    now,
    run,
    [Symbol.asyncDispose]: () => resources.disposeAsync(),
  };
}

function planOf({ prefill, decode }: SimPools) {
  const kv = create(KvSettingsSchema, { lease: durationFromMs(LEASE_MS) });
  const target = ({ url }: Sim) => create(TargetSchema, { instanceId: new URL(url).host, url, kv });
  const [firstPrefill, ...prefillFallbacks] = prefill.map(target);
  const [firstDecode, ...decodeFallbacks] = decode.map(target);
  if (firstPrefill === undefined || firstDecode === undefined) throw new Error('no engines');
  return create(PlanSchema, {
    planId: 'plan',
    mode: PlanMode.PREFILL_DECODE,
    connector: 'nixl',
    prefill: firstPrefill,
    prefillFallbacks,
    decode: firstDecode,
    decodeFallbacks,
  });
}

/** Runs a hand-over whose first D refuses, `ms` after P's reply. */
async function runRefused(handed: Handed, ms: number): Promise<HandOverReport> {
  await engine(handed.pools.decode).setFault({ kind: 'refuse' });
  let passed = false;
  return handed.run({
    onReport: ({ legs }) => {
      if (passed || !legs.some(({ ending }) => ending === LegEnding.NOT_SENT)) return;
      passed = true;
      handed.pass(ms);
    },
  });
}

describe('another process has the place of a planned one', () => {
  const replaced = (...sims: readonly Sim[]): Partial<HandOverDeps> => {
    const gone = sims.map(({ url }) => new URL(url).host);
    return { isAsPlanned: ({ instanceId }) => !gone.includes(instanceId) };
  };

  test('of D, where both render the prompt: it is not asked, the next one gets the handle', async () => {
    await using handed = await start();
    const [first, second] = [engine(handed.pools.decode), engine(handed.pools.decode, 1)];
    const report = await handed.run({ more: { ...replaced(first), forwardTokenIds: false } });
    expect(report).toMatchObject({ ending: 'ok', retries: [] });
    expect([legsOf(first), legsOf(second)]).toMatchObject([[], [{ id: 'req' }]]);
    expect(legsOf(engine(handed.pools.prefill))).toHaveLength(1);
  });

  test('of P: what it computed is not used', async () => {
    await using handed = await start();
    const [first, second] = [engine(handed.pools.prefill), engine(handed.pools.prefill, 1)];
    const report = await handed.run({ more: { ...replaced(first), forwardTokenIds: false } });
    expect(report).toMatchObject({ ending: 'ok', retries: [], prefillId: new URL(second.url).host });
    expect([legsOf(first).length, legsOf(second).length]).toEqual([1, 1]);
  });

  test('of all of a kind: the client is told to come again', async () => {
    await using handed = await start();
    const more = { ...replaced(...handed.pools.decode), forwardTokenIds: false };
    const report = await handed.run({ more });
    expect(report).toMatchObject({ ending: 'failed', refusal: { status: 503, retryAfterSeconds: 1 } });
  });

  test('where the legs carry the prompt’s tokens, it does not matter', async () => {
    await using handed = await start();
    const report = await handed.run({ more: replaced(engine(handed.pools.decode)) });
    expect(report).toMatchObject({ ending: 'ok', decodeId: new URL(engine(handed.pools.decode).url).host });
  });
});

test('D refuses late in the lease: the handle is not used any more, P runs again', async () => {
  await using handed = await start();
  const report = await runRefused(handed, LEASE_MS - MARGIN_MS);
  expect(report).toMatchObject({ ending: 'ok', retries: ['lease'] });
  const prefills = legsOf(engine(handed.pools.prefill));
  expect(prefills.map(({ id }) => id)).toEqual(['req', 'req-r1']);
  const [decode, ...more] = legsOf(engine(handed.pools.decode, 1));
  expect(more).toEqual([]);
  expect(decode?.params?.['remote_request_id']).toMatch(/^cmpl-req-r1-/);
  expect(legsOf(engine(handed.pools.prefill, 1))).toEqual([]);
});

test('D refuses early in the lease: the next one gets the handle', async () => {
  await using handed = await start();
  const report = await runRefused(handed, LEASE_MS - MARGIN_MS - 5000);
  expect(report).toMatchObject({ ending: 'ok', retries: [] });
  expect(legsOf(engine(handed.pools.prefill))).toHaveLength(1);
});

test('P’s reply takes longer than its lease to be read: it is not used', async () => {
  await using handed = await start();
  let passed = false;
  const report = await handed.run({
    onHandle: () => {
      if (!passed) handed.pass(LEASE_MS);
      passed = true;
    },
  });
  expect(report).toMatchObject({ ending: 'ok', retries: ['lease'] });
  expect(legsOf(engine(handed.pools.decode))).toHaveLength(1);
});

test('connecting to D takes the rest of the lease: nothing is sent, P runs again', async () => {
  await using handed = await start();
  const [first, second] = [engine(handed.pools.decode), engine(handed.pools.decode, 1)];
  const report = await handed.run({
    onLeg: (instanceId) => {
      if (instanceId === new URL(first.url).host) handed.pass(LEASE_MS);
    },
  });
  expect(report).toMatchObject({ ending: 'ok', retries: ['lease'] });
  expect(legsOf(first)).toEqual([]);
  expect(legsOf(second).map(({ id }) => id)).toEqual(['req-r1']);
  expect(legsOf(engine(handed.pools.prefill))).toHaveLength(2);
});

test('P’s replies are always too old: an error, no decode', async () => {
  await using handed = await start();
  const report = await handed.run({ onHandle: () => handed.pass(LEASE_MS) });
  expect(report).toMatchObject({ ending: 'failed', refusal: { status: 504, error: { code: 'engine_timeout' } } });
  expect(handed.pools.decode.map((sim) => legsOf(sim).length)).toEqual([0, 0]);
  expect(handed.reports.at(-1)).toMatchObject({ final: true, status: 504 });
});

test('the client leaves between the legs: D is not asked, the lease frees P’s blocks', async () => {
  await using handed = await start();
  const report = await handed.run({ onHandle: () => handed.client.abort() });
  expect(report.ending).toBe('gone');
  expect(handed.pools.decode.map((sim) => legsOf(sim).length)).toEqual([0, 0]);
  expect(engine(handed.pools.prefill).state().pins).toBe(1);
  expect(handed.reports.at(-1)).toMatchObject({ final: true });
});

/** Runs a hand-over whose first D stands still from its request on, and answers `ms` later. */
function runStill(handed: Handed, ms: number): Promise<HandOverReport> {
  let silence: SilentTime | undefined;
  return handed.run({
    // Asked when the first content is there.
    silence: () => {
      if (silence !== undefined) return silence;
      const from = handed.now();
      handed.pass(ms);
      silence = { from, until: handed.now() };
      return silence;
    },
  });
}

test('D stood still past the lease and answers: nobody sees that, another D generates', async () => {
  await using handed = await start();
  const report = await runStill(handed, LEASE_MS + 1000);
  expect(report).toMatchObject({ ending: 'ok', retries: ['unhealthy'] });
  expect(handed.pools.decode.map((sim) => legsOf(sim).length)).toEqual([1, 1]);
  const decodes = handed.reports.flatMap(({ legs }) => legs).filter(({ leg }) => leg === Leg.DECODE);
  expect(decodes[0]).toMatchObject({ ending: LegEnding.RESET, contentShown: false, unreadLease: { seconds: -1n } });
  expect(decodes[1]).toMatchObject({ ending: LegEnding.OK, contentShown: true });
});

test('D stood still within the lease: its answer is the one', async () => {
  await using handed = await start();
  const report = await runStill(handed, LEASE_MS - LEASE_MS / 6 - 1000);
  expect(report).toMatchObject({ ending: 'ok', retries: [] });
  expect(handed.pools.decode.map((sim) => legsOf(sim).length)).toEqual([1, 0]);
});
