import { create } from '@bufbuild/protobuf';
import { Code, ConnectError } from '@connectrpc/connect';
import { expect, test } from 'vitest';
import {
  Leg,
  LegEnding,
  LegReportSchema,
  PlanSchema,
  type ReportOutcomeRequest,
  ReportOutcomeRequestSchema,
  ReportOutcomeResponseSchema,
  RequestFactsSchema,
  Router,
} from '../../gen/baton/v1/router_pb.ts';
import { BatonError } from '../../src/core/errors.ts';
import { createDirectClient } from '../../src/rpc/direct-client.ts';
import { connectErrorFromBaton, neverReached } from '../../src/rpc/errors.ts';
import { toMs } from '../../src/services/durations.ts';
import { ReportSender } from '../../src/services/report-sender.ts';

const LEGS = [LegEnding.RESET, LegEnding.OK].map((ending) =>
  create(LegReportSchema, { leg: Leg.DECODE, instanceId: 'd1', ending }),
);
const CONTEXT = {
  plan: create(PlanSchema, { planId: 'plan', verdicts: [{ instanceId: 'd2', reason: 'suspect' }] }),
  facts: create(RequestFactsSchema, { requestId: 'r', model: 'm', conversationId: 'c' }),
  legs: LEGS,
};
const report = (final: boolean) =>
  create(ReportOutcomeRequestSchema, {
    planId: 'plan',
    final,
    legs: LEGS.slice(1),
    handle: {},
    paused: { nanos: 5_000_000 },
  });

/** Sends one report to a router that answers as `answer` says, and waits for its end. */
async function deliver(final: boolean, answer: (request: ReportOutcomeRequest, call: number) => boolean, stepMs = 10) {
  const seen: ReportOutcomeRequest[] = [];
  const router = createDirectClient(Router, {
    reportOutcome: async (request) => {
      seen.push(request);
      return create(ReportOutcomeResponseSchema, { planUnknown: answer(request, seen.length) });
    },
  });
  let now = 0;
  const sender = new ReportSender({ router, now: () => (now += stepMs), waitMs: 1, neverReached });
  sender.send(report(final), {}, () => CONTEXT);
  await sender[Symbol.asyncDispose]();
  return seen;
}

test('a handle goes along only as long as no try before can have stored it', async () => {
  const withHandle = (seen: readonly ReportOutcomeRequest[]) => seen.map(({ handle }) => handle !== undefined);
  const refused = () => {
    throw new ConnectError(
      'refused',
      Code.Unavailable,
      undefined,
      undefined,
      Object.assign(new Error(), { code: 'ECONNREFUSED' }),
    );
  };
  const shutting = () => {
    throw connectErrorFromBaton(new BatonError({ reason: 'SHUTTING_DOWN', message: 'stops' }));
  };
  const unknown = (_: unknown, call: number) => call === 1;
  expect(withHandle(await deliver(true, (_, call) => (call < 3 ? refused() : false)))).toEqual([true, true, true]);
  expect(withHandle(await deliver(true, (_, call) => (call < 2 ? shutting() : false)))).toEqual([true, true]);
  expect(withHandle(await deliver(true, unknown))).toEqual([true, true]);
  // The answer is lost: the router may have stored it, the store lost its memory of that, and another turn have it now.
  expect(withHandle(await deliver(true, (_, call) => (call < 2 ? away() : call === 2)))).toEqual([true, false, false]);
});

const away = () => {
  throw new ConnectError('away', Code.Unavailable);
};

test('a final report outlasts a router that is away, and says that it is late', async () => {
  const seen = await deliver(true, (_request, call) => (call < 3 ? away() : false));
  expect(seen.map(({ planId }) => planId)).toEqual(['plan', 'plan', 'plan']);
  const paused = seen.map((request) => toMs(request.paused));
  expect(paused[0]).toBe(15);
  expect(paused[2]).toBeGreaterThan(paused[1] ?? 0);
  expect(seen.every(({ context }) => context === undefined)).toBe(true);
});

test('any other report is sent once', async () => {
  expect(await deliver(false, away)).toHaveLength(1);
});

test('a router that does not know the plan is told all of it, once', async () => {
  const seen = await deliver(true, () => true);
  expect(seen).toHaveLength(2);
  const [first, second] = seen;
  expect([first?.context, first?.legs.length]).toEqual([undefined, 1]);
  expect(second).toMatchObject({
    final: true,
    legs: LEGS,
    context: { facts: CONTEXT.facts, plan: { planId: 'plan' } },
  });
  // Nobody needs to know again why others lost.
  expect(second?.context?.plan?.verdicts).toEqual([]);
});

test('a router that stays away is given up', async () => {
  expect(await deliver(true, away, 2500)).toHaveLength(3);
});
