import { create } from '@bufbuild/protobuf';
import {
  Leg,
  LegEnding,
  LegReportSchema,
  PlanRouteRequestSchema,
  ReportOutcomeRequestSchema,
} from '../../gen/baton/v1/router_pb.ts';
import type { POLICIES } from '../../src/policies/index.ts';
import { loneRouter } from './lone-router.ts';
import { decodeOf, Pools, prefillOf } from './plan-instances.ts';
import { seeded } from './seeded.ts';

/** Balance of one role over a run. */
export interface Balance {
  /** Greatest mean number of legs of an instance over the mean of all, both over the whole time. */
  readonly overall: number;
  /** The same of the numbers at the moment at which an instance got a request, at its worst while the pool was busy. */
  readonly worst: number;
  /** Most plans that an instance had more than another. */
  readonly spread: number;
}

/** What a run is made of; times are in units of a short request. */
export interface BalanceRun {
  readonly policy: keyof typeof POLICIES;
  readonly requests: number;
  readonly instances: number;
  /** Mean number of requests that run at once on one decode instance. */
  readonly perInstance: number;
  readonly seed: number;
}

/** Conversations, a few of which have most of the turns. */
const SESSIONS = 3000;

const SETTINGS = {
  consistentHash: { loadFactor: 1.25 },
  cacheAware: {
    cacheThreshold: 0.3,
    balanceAbsThreshold: 64,
    balanceRelThreshold: 1.5,
    maxBytes: 1024 ** 2,
    maxAgeMs: 0,
  },
  stickyLeastLoaded: { maxLegs: 8, sessions: 100_000 },
};

/**
 * Sends requests through a router at random times and of very different sizes (Pareto: one in a hundred is forty times
 * the shortest) and keeps account of what runs where.
 */
export async function runBalance(run: BalanceRun): Promise<{ readonly prefill: Balance; readonly decode: Balance }> {
  const random = seeded(run.seed);
  const names = (of: string) => Array.from({ length: run.instances }, (_, i) => `${of}${i}`);
  let now = 0;
  const router = loneRouter(
    new Pools([...names('p').map((id) => prefillOf(id)), ...names('d').map((id) => decodeOf(id))]),
    run.policy,
    SETTINGS,
    { now: () => now, random },
  );
  const [prefill, decode] = [new Account(names('p')), new Account(names('d'))];
  /** Latest first. */
  const ends: { readonly at: number; readonly act: () => Promise<unknown> }[] = [];
  const schedule = (at: number, act: () => Promise<unknown>) => {
    ends.splice(ends.findLastIndex((end) => end.at > at) + 1, 0, { at, act });
  };
  const advance = async (to: number) => {
    for (let end = ends.at(-1); end !== undefined && end.at <= to; end = ends.at(-1)) {
      ends.pop();
      now = end.at;
      await end.act();
    }
    now = to;
  };
  const gap = MEAN_SIZE / (run.instances * run.perInstance);
  for (let i = 0; i < run.requests; i += 1) {
    await advance(now - Math.log(1 - random()) * gap);
    const session = Math.floor(SESSIONS * random() ** 2);
    const request = create(PlanRouteRequestSchema, {
      facts: { requestId: 'r', tenant: 't', model: 'm', conversationId: `c${session}` },
    });
    const { result } = await router.planRoute(request, { signal: NEVER });
    const plan = result.case === 'plan' ? result.value : undefined;
    const [p, d] = [plan?.prefill?.instanceId, plan?.decode?.instanceId];
    if (plan === undefined || p === undefined || d === undefined) throw new Error('no plan');
    const size = sizeOf(random());
    prefill.add(p, 1, now);
    decode.add(d, 1, now);
    const report = async (final: boolean) => {
      const legs = final ? [] : [create(LegReportSchema, { leg: Leg.PREFILL, instanceId: p, ending: LegEnding.OK })];
      await router.reportOutcome(create(ReportOutcomeRequestSchema, { planId: plan.planId, legs, final }));
    };
    schedule(now + size * PREFILL_SHARE, async () => {
      prefill.add(p, -1, now);
      await report(false);
    });
    schedule(now + size, async () => {
      decode.add(d, -1, now);
      await report(true);
    });
  }
  return { prefill: prefill.balance(now), decode: decode.balance(now) };
}

const NEVER = new AbortController().signal;
const PREFILL_SHARE = 0.5;
/** Pareto with this exponent, from 1 to this most. */
const EXPONENT = 1.25;
const LARGEST = 200;
const MEAN_SIZE = (EXPONENT / (EXPONENT - 1)) * ((1 - LARGEST ** (1 - EXPONENT)) / (1 - LARGEST ** -EXPONENT));

function sizeOf(chance: number): number {
  return (1 - chance * (1 - LARGEST ** -EXPONENT)) ** (-1 / EXPONENT);
}

/** What runs where, added up over time. */
class Account {
  readonly #counts: Map<string, { running: number; since: number; total: number; plans: number }>;
  #running = 0;
  #worst = 0;

  constructor(ids: readonly string[]) {
    this.#counts = new Map(ids.map((id) => [id, { running: 0, since: 0, total: 0, plans: 0 }]));
  }

  add(id: string, change: 1 | -1, now: number): void {
    const count = this.#counts.get(id);
    if (count === undefined) throw new Error(`no instance ${id}`);
    count.total += count.running * (now - count.since);
    count.since = now;
    count.running += change;
    this.#running += change;
    if (change > 0) count.plans += 1;
    const mean = this.#running / this.#counts.size;
    if (change > 0 && mean >= BUSY) this.#worst = Math.max(this.#worst, count.running / mean);
  }

  balance(now: number): Balance {
    const all = [...this.#counts.values()];
    const totals = all.map(({ total, running, since }) => total + running * (now - since));
    const plans = all.map((count) => count.plans);
    return {
      overall: (Math.max(...totals) * totals.length) / totals.reduce((sum, total) => sum + total, 0),
      worst: this.#worst,
      spread: Math.max(...plans) - Math.min(...plans),
    };
  }
}

/** Mean of legs from which the numbers of a moment are compared: of fewer, one more is a large share. */
const BUSY = 16;
