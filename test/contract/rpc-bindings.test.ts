import { create } from '@bufbuild/protobuf';
import { Code, ConnectError, type HandlerContext } from '@connectrpc/connect';
import { describe, expect, test } from 'vitest';
import { InstanceSchema, InstanceState, Role } from '../../gen/baton/v1/instance_pb.ts';
import {
  PlanMode,
  type PlanRouteRequest,
  PlanRouteResponseSchema,
  ReportOutcomeRequestSchema,
} from '../../gen/baton/v1/router_pb.ts';
import { BadRequestSchema, ErrorInfoSchema, RetryInfoSchema } from '../../gen/google/rpc/error_details_pb.ts';
import { callContext, callOptions } from '../../src/call.ts';
import { BatonError } from '../../src/core/errors.ts';
import { batonErrorFrom } from '../../src/rpc/errors.ts';
import { BINDINGS } from '../support/rpc-bindings.ts';

const FACTS = { requestId: 'r-1', api: 'chat.completions', model: 'm' };

describe.each(BINDINGS)('$name', ({ open }) => {
  test('carries every kind of value both ways', async () => {
    const tokenIds = Array.from({ length: 5_000 }, (_, index) => index * 3).concat(0, 4_294_967_295);
    const seen: PlanRouteRequest[] = [];
    await using bound = await open({
      router: {
        planRoute: (request) => {
          seen.push(request);
          return {
            result: {
              case: 'plan',
              value: {
                planId: 'p-1',
                mode: PlanMode.PREFILL_DECODE,
                prefill: {
                  instanceId: 'a:1',
                  incarnation: { processStartSeconds: 0, generation: 2 },
                  kv: { lease: { seconds: 30n, nanos: 500_000_000 } },
                },
                decode: { instanceId: 'b:1', incarnation: { engineId: 'e' } },
                verdicts: [{ instanceId: 'c:1', role: Role.DECODE, reason: 'draining' }],
              },
            },
          };
        },
      },
      poolRegistry: {
        getInstance: () => ({
          instance: {
            id: 'a:1',
            state: InstanceState.READY,
            labels: { zone: 'z', '': 'empty key' },
            revision: 18_446_744_073_709_551_615n,
            load: { kvCacheUsage: 0.1 },
            models: [
              { id: 'm', rawJson: '{"id":"m","x":1519.0}' },
              { id: 'n', maxModelLen: 0 },
            ],
          },
        }),
      },
    });

    const answer = await bound.router.planRoute({
      planKey: 'k',
      facts: FACTS,
      prompt: { instanceId: 'a:1', tokenIds },
      excludedInstanceIds: ['x', 'y'],
      maxWait: { seconds: 1n },
    });

    expect(answer.$typeName).toBe(PlanRouteResponseSchema.typeName);
    expect(seen).toHaveLength(1);
    expect(seen[0]?.$typeName).toBe('baton.v1.PlanRouteRequest');
    expect(seen[0]?.prompt?.tokenIds).toEqual(tokenIds);
    expect(seen[0]?.facts).toMatchObject({ ...FACTS, tenant: '', stream: false });
    expect(seen[0]?.maxWait?.seconds).toBe(1n);
    const plan = answer.result.case === 'plan' ? answer.result.value : undefined;
    expect(plan?.mode).toBe(PlanMode.PREFILL_DECODE);
    expect(plan?.prefill?.incarnation).toMatchObject({ processStartSeconds: 0, engineId: '', generation: 2 });
    expect(plan?.decode?.incarnation?.processStartSeconds).toBeUndefined();
    expect(plan?.prefill?.kv?.lease).toMatchObject({ seconds: 30n, nanos: 500_000_000 });
    expect(plan?.decode?.kv).toBeUndefined();
    expect(plan?.verdicts).toMatchObject([{ instanceId: 'c:1', role: Role.DECODE, reason: 'draining' }]);

    const { instance } = await bound.poolRegistry.getInstance({ instanceId: 'a:1' });
    expect(instance?.revision).toBe(18_446_744_073_709_551_615n);
    expect(instance?.labels).toEqual({ zone: 'z', '': 'empty key' });
    expect(instance?.load?.kvCacheUsage).toBe(0.1);
    expect(instance?.models.map((model) => model.maxModelLen)).toEqual([undefined, 0]);
    expect(instance?.models[0]?.rawJson).toBe('{"id":"m","x":1519.0}');
  });

  test('takes and gives whole messages, bytes included', async () => {
    const digests = [new Uint8Array(16).fill(7), new Uint8Array(16).fill(255)];
    const seen: Uint8Array[][] = [];
    await using bound = await open({
      router: {
        reportOutcome: (request) => {
          seen.push(request.chain?.digests ?? []);
          return {};
        },
        planRoute: () =>
          create(PlanRouteResponseSchema, {
            result: { case: 'needPromptTokens', value: { instanceId: 'a:1', url: 'http://a:1' } },
          }),
      },
    });
    await bound.router.reportOutcome(
      create(ReportOutcomeRequestSchema, { planId: 'p', chain: { algorithm: 'c1', digests, tailTokenIds: [1, 2] } }),
    );
    const answer = await bound.router.planRoute({ facts: FACTS });
    expect(seen.map((list) => list.map((digest) => [...digest]))).toEqual([digests.map((digest) => [...digest])]);
    expect(answer.result).toMatchObject({ case: 'needPromptTokens', value: { instanceId: 'a:1', url: 'http://a:1' } });
  });

  test('tells the request id and the time left', async () => {
    const contexts: HandlerContext[] = [];
    const left: (number | undefined)[] = [];
    await using bound = await open({
      router: {
        reportOutcome: (_, context) => {
          contexts.push(context);
          left.push(callContext(context).timeoutMs);
          return {};
        },
      },
    });
    const { signal } = new AbortController();
    await bound.router.reportOutcome({}, callOptions({ signal, requestId: 'r-7', timeoutMs: 60_000 }));
    await bound.router.reportOutcome({}, callOptions({ signal, requestId: '' }));
    expect(contexts.map((context) => callContext(context).requestId)).toEqual(['r-7', '']);
    expect(contexts.map((context) => context.method.name)).toEqual(['ReportOutcome', 'ReportOutcome']);
    expect(left[0]).toBeGreaterThan(0);
    expect(left[0]).toBeLessThanOrEqual(60_000);
    expect(left[1]).toBeUndefined();
  });

  test('maps a BatonError to its code and details, and back', async () => {
    await using bound = await open({
      router: {
        planRoute: () => {
          throw new BatonError({
            reason: 'NO_ROUTABLE_PAIR',
            message: 'no decode instance is ready',
            metadata: { missing: 'decode' },
            retryAfterMs: 1_500,
          });
        },
        reportOutcome: async () => {
          throw new BatonError({ reason: 'INVALID_ARGUMENT', message: 'is required', param: 'plan_id' });
        },
      },
    });
    const unavailable = await failure(bound.router.planRoute({ facts: FACTS }));
    expect(unavailable.code).toBe(Code.Unavailable);
    expect(unavailable.rawMessage).toBe('no decode instance is ready');
    expect(unavailable.findDetails(ErrorInfoSchema)).toMatchObject([
      { reason: 'NO_ROUTABLE_PAIR', domain: 'baton', metadata: { missing: 'decode' } },
    ]);
    expect(unavailable.findDetails(RetryInfoSchema)[0]?.retryDelay).toMatchObject({ seconds: 1n, nanos: 500_000_000 });
    expect(batonErrorFrom(unavailable, 'ROUTER_UNAVAILABLE')).toMatchObject({
      reason: 'NO_ROUTABLE_PAIR',
      httpStatus: 503,
      metadata: { missing: 'decode' },
      retryAfterMs: 1_500,
      message: 'no decode instance is ready',
    });

    const invalid = await failure(bound.router.reportOutcome({}));
    expect(invalid.code).toBe(Code.InvalidArgument);
    expect(invalid.findDetails(BadRequestSchema)[0]?.fieldViolations).toMatchObject([
      { field: 'plan_id', description: 'is required' },
    ]);
    expect(batonErrorFrom(invalid, 'ROUTER_UNAVAILABLE')).toMatchObject({
      reason: 'INVALID_ARGUMENT',
      param: 'plan_id',
    });
    expect(bound.faults).toEqual([]);
  });

  test('passes a ConnectError on', async () => {
    await using bound = await open({
      router: {
        planRoute: () => {
          const value = { reason: 'OTHER', domain: 'elsewhere' };
          throw new ConnectError('later', Code.DataLoss, undefined, [{ desc: ErrorInfoSchema, value }]);
        },
      },
    });
    const error = await failure(bound.router.planRoute({ facts: FACTS }));
    expect(error.code).toBe(Code.DataLoss);
    expect(error.rawMessage).toBe('later');
    expect(error.findDetails(ErrorInfoSchema)).toMatchObject([{ reason: 'OTHER', domain: 'elsewhere' }]);
    expect(batonErrorFrom(error, 'ROUTER_UNAVAILABLE')).toMatchObject({
      reason: 'ROUTER_UNAVAILABLE',
      metadata: { rpc_code: 'data_loss' },
    });
  });

  test('hides what an unknown throw says, and tells the log', async () => {
    const secret = new Error('secret text');
    await using bound = await open({
      router: {
        planRoute: () => {
          throw secret;
        },
        reportOutcome: () => Promise.reject('not even an error'),
      },
      poolRegistry: {
        // biome-ignore lint/correctness/useYield: fails at its first read.
        watchInstances: async function* () {
          throw secret;
        },
      },
    });
    const headers = { 'x-request-id': 'r-9' };
    for (const call of [
      () => bound.router.planRoute({ facts: FACTS }, { headers }),
      () => bound.router.reportOutcome({}, { headers }),
      () => collect(bound.poolRegistry.watchInstances({}, { headers })),
    ]) {
      const error = await failure(call());
      expect(error.code).toBe(Code.Internal);
      expect(error.rawMessage).toBe('internal error');
      expect(error.findDetails(ErrorInfoSchema)).toMatchObject([{ reason: 'INTERNAL', domain: 'baton' }]);
    }
    expect(bound.faults).toEqual([
      { method: 'baton.v1.Router/PlanRoute', requestId: 'r-9', error: secret },
      { method: 'baton.v1.Router/ReportOutcome', requestId: 'r-9', error: 'not even an error' },
      { method: 'baton.v1.PoolRegistry/WatchInstances', requestId: 'r-9', error: secret },
    ]);
  });

  test('cancels a call in flight, on both sides', async () => {
    const started = Promise.withResolvers<void>();
    const stopped = Promise.withResolvers<void>();
    await using bound = await open({
      router: {
        planRoute: async (_, context) => {
          started.resolve();
          await aborted(context.signal);
          stopped.resolve();
          throw context.signal.reason;
        },
      },
    });
    const caller = new AbortController();
    const call = failure(bound.router.planRoute({ facts: FACTS }, { signal: caller.signal }));
    await started.promise;
    caller.abort();
    const error = await call;
    expect(error.code).toBe(Code.Canceled);
    await stopped.promise;
    expect(batonErrorFrom(error, 'ROUTER_UNAVAILABLE').reason).toBe('CLIENT_GONE');
    expect(bound.faults).toEqual([]);
  });

  test('cancels a call whose implementation does not listen', async () => {
    const started = Promise.withResolvers<void>();
    const gate = Promise.withResolvers<void>();
    await using bound = await open({
      router: {
        planRoute: async () => {
          started.resolve();
          await gate.promise;
          return {};
        },
      },
    });
    const caller = new AbortController();
    const call = failure(bound.router.planRoute({ facts: FACTS }, { signal: caller.signal }));
    await started.promise;
    caller.abort();
    expect((await call).code).toBe(Code.Canceled);
    gate.resolve();
  });

  test('ends a call at its deadline, on both sides', async () => {
    const running: Promise<unknown>[] = [];
    await using bound = await open({
      router: {
        reportOutcome: () => ({}),
        planRoute: async (_, context) => {
          const stopped = aborted(context.signal).then(() => context.signal.reason);
          running.push(stopped);
          throw await stopped;
        },
      },
    });
    await bound.router.reportOutcome({});
    const error = await failure(bound.router.planRoute({ facts: FACTS }, { timeoutMs: 60 }));
    expect(error.code).toBe(Code.DeadlineExceeded);
    // Empty where the machine was too busy to deliver the call in time.
    for (const stopped of running) expect(await stopped).toBeInstanceOf(Error);
    expect(bound.faults).toEqual([]);
  });

  test('surfaces the timeout of a signal as canceled', async () => {
    await using bound = await open({
      router: {
        planRoute: async (_, context) => {
          await aborted(context.signal);
          return {};
        },
      },
    });
    const error = await failure(bound.router.planRoute({ facts: FACTS }, { signal: AbortSignal.timeout(30) }));
    expect(error.code).toBe(Code.Canceled);
  });

  test('does not start a call that is over already', async () => {
    let calls = 0;
    await using bound = await open({
      router: {
        planRoute: () => {
          calls++;
          return {};
        },
      },
      poolRegistry: {
        watchInstances: async function* () {
          calls++;
          yield {};
        },
      },
    });
    const signal = AbortSignal.abort();
    expect((await failure(bound.router.planRoute({ facts: FACTS }, { signal }))).code).toBe(Code.Canceled);
    expect((await failure(collect(bound.poolRegistry.watchInstances({}, { signal })))).code).toBe(Code.Canceled);
    const reason = new ConnectError('own reason', Code.ResourceExhausted);
    const own = await failure(bound.router.planRoute({ facts: FACTS }, { signal: AbortSignal.abort(reason) }));
    expect(own.code).toBe(Code.ResourceExhausted);
    expect(calls).toBe(0);
  });

  test('takes a timeout of 0 as none, and one that is used up as one', async () => {
    const left: (number | undefined)[] = [];
    await using bound = await open({
      router: {
        reportOutcome: (_, context) => {
          left.push(context.timeoutMs());
          return {};
        },
        planRoute: (_, context) => aborted(context.signal).then(() => ({})),
      },
    });
    await bound.router.reportOutcome({}, { timeoutMs: 0 });
    expect(left).toEqual([undefined]);
    const usedUp = callOptions({ signal: new AbortController().signal, requestId: 'r', timeoutMs: -0.5 });
    expect((await failure(bound.router.planRoute({ facts: FACTS }, usedUp))).code).toBe(Code.DeadlineExceeded);
  });

  test('takes any time left, however it is written', async () => {
    await using bound = await open({ router: { reportOutcome: () => ({}) } });
    const { signal } = new AbortController();
    for (const timeoutMs of [59_999.25, 2 ** 40, Number.POSITIVE_INFINITY]) {
      await bound.router.reportOutcome({}, callOptions({ signal, requestId: 'r', timeoutMs }));
    }
  });

  test('leaves nothing on the signal of the caller', async () => {
    await using bound = await open({ router: { planRoute: () => ({}) } });
    const { signal, listeners } = countingSignal();
    await bound.router.planRoute({ facts: FACTS }, { signal, timeoutMs: 60_000 });
    expect(listeners()).toBe(0);
  });

  test('streams in order and ends', async () => {
    await using bound = await open({
      poolRegistry: {
        watchInstances: async function* (request) {
          expect(request.resumeToken).toBe('t');
          for (let index = 0; index < 20; index++) {
            yield { resumeToken: `${index}`, event: { case: 'upserted', value: { id: `i${index}` } } };
          }
          yield { event: { case: 'snapshotComplete', value: { count: 20 } }, revision: 5n };
        },
      },
    });
    const messages = await collect(bound.poolRegistry.watchInstances({ resumeToken: 't' }));
    expect(messages).toHaveLength(21);
    expect(messages.slice(0, 20).map((message) => message.resumeToken)).toEqual(
      messages.slice(0, 20).map((_, i) => `${i}`),
    );
    expect(messages[3]?.event).toMatchObject({
      case: 'upserted',
      value: { $typeName: InstanceSchema.typeName, id: 'i3' },
    });
    expect(messages[20]?.event).toMatchObject({ case: 'snapshotComplete', value: { count: 20 } });
    expect(messages[20]?.revision).toBe(5n);
  });

  test('tells an error in the middle of a stream after what came before', async () => {
    await using bound = await open({
      poolRegistry: {
        watchInstances: async function* () {
          yield { resumeToken: '1' };
          throw new BatonError({ reason: 'SHUTTING_DOWN', message: 'bye' });
        },
      },
    });
    const seen: string[] = [];
    const error = await failure(
      (async () => {
        for await (const message of bound.poolRegistry.watchInstances({})) seen.push(message.resumeToken);
      })(),
    );
    expect(seen).toEqual(['1']);
    expect(error.code).toBe(Code.Unavailable);
    expect(error.findDetails(ErrorInfoSchema)[0]?.reason).toBe('SHUTTING_DOWN');
  });

  test.each(['break', 'abort', 'deadline'])('ends a stream on both sides by %s', async (how) => {
    const running: Promise<void>[] = [];
    await using bound = await open({
      router: { reportOutcome: () => ({}) },
      poolRegistry: {
        watchInstances: async function* (_, context) {
          const stopped = Promise.withResolvers<void>();
          running.push(stopped.promise);
          try {
            yield { resumeToken: 'first' };
            await aborted(context.signal);
            throw context.signal.reason;
          } finally {
            stopped.resolve();
          }
        },
      },
    });
    await bound.router.reportOutcome({});
    const caller = new AbortController();
    const options = how === 'deadline' ? { timeoutMs: 150 } : { signal: caller.signal };
    const seen: string[] = [];
    const reading = (async () => {
      for await (const message of bound.poolRegistry.watchInstances({}, options)) {
        seen.push(message.resumeToken);
        if (how === 'break') break;
        if (how === 'abort') caller.abort();
      }
    })();
    if (how === 'break') await reading;
    else expect((await failure(reading)).code).toBe(how === 'abort' ? Code.Canceled : Code.DeadlineExceeded);
    await Promise.all(running);
    // A busy machine may let the deadline pass before the first message.
    if (how !== 'deadline') expect(seen).toEqual(['first']);
    expect(bound.faults).toEqual([]);
  });

  test('cancels a stream whose implementation does not listen', async () => {
    const gate = Promise.withResolvers<void>();
    await using bound = await open({
      poolRegistry: {
        watchInstances: async function* () {
          yield { resumeToken: 'first' };
          await gate.promise;
        },
      },
    });
    const caller = new AbortController();
    const iterator = bound.poolRegistry.watchInstances({}, { signal: caller.signal })[Symbol.asyncIterator]();
    expect((await iterator.next()).value?.resumeToken).toBe('first');
    const next = failure(iterator.next());
    caller.abort();
    expect((await next).code).toBe(Code.Canceled);
    gate.resolve();
  });

  test('answers UNIMPLEMENTED with a reason for what is not served', async () => {
    await using bound = await open({ router: { planRoute: () => ({}) } });
    const calls = {
      'baton.v1.KVCacheStore/TakeEntry': () => bound.kvCacheStore.takeEntry({}),
      'baton.v1.KVCacheStore/WatchEntries': () => collect(bound.kvCacheStore.watchEntries({})),
      'baton.v1.Router/ExplainRoute': () => bound.router.explainRoute({}),
    };
    for (const [method, call] of Object.entries(calls)) {
      const error = await failure(call());
      expect(error.code).toBe(Code.Unimplemented);
      expect(error.findDetails(ErrorInfoSchema)).toMatchObject([
        { reason: 'NOT_IMPLEMENTED', domain: 'baton', metadata: { method } },
      ]);
    }
  });
});

async function failure(call: Promise<unknown>): Promise<ConnectError> {
  const outcome = await call.then(
    (value) => ({ value }),
    (error: unknown) => ({ error }),
  );
  if ('error' in outcome && outcome.error instanceof ConnectError) return outcome.error;
  throw new Error('expected a ConnectError', { cause: outcome });
}

async function collect<T>(stream: AsyncIterable<T>): Promise<T[]> {
  const all: T[] = [];
  for await (const item of stream) all.push(item);
  return all;
}

function aborted(signal: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    if (signal.aborted) resolve();
    else signal.addEventListener('abort', () => resolve(), { once: true });
  });
}

/** A signal that never aborts and counts the listeners it has. */
function countingSignal(): { signal: AbortSignal; listeners: () => number } {
  const { signal } = new AbortController();
  let count = 0;
  const add = signal.addEventListener.bind(signal);
  const remove = signal.removeEventListener.bind(signal);
  signal.addEventListener = (...args: Parameters<typeof add>) => {
    count++;
    add(...args);
  };
  signal.removeEventListener = (...args: Parameters<typeof remove>) => {
    count--;
    remove(...args);
  };
  return { signal, listeners: () => count };
}
