import { create } from '@bufbuild/protobuf';
import type { Client } from '@connectrpc/connect';
import type { Router } from '../../gen/baton/v1/router_pb.ts';
import { TokenChainSchema } from '../../gen/baton/v1/tokens_pb.ts';
import { nixl } from '../../src/connectors/nixl.ts';
import { BatonError } from '../../src/core/errors.ts';
import { readFacts } from '../../src/core/facts.ts';
import { scanObject } from '../../src/core/json-scan.ts';
import type { EngineClient } from '../../src/engine/client.ts';
import type { ClientSink } from '../../src/services/client-sink.ts';
import type { GenerateRequest, HandOverDeps } from '../../src/services/hand-over.ts';
import { ReportSender } from '../../src/services/report-sender.ts';
import { RetryBudget } from '../../src/services/retry-budget.ts';
import { Timeline } from '../../src/services/timeline.ts';

/** What a hand-over without a facade around it works with; no time limits, and the clock is `now`. */
export function handOverDeps(
  engines: EngineClient,
  router: Client<typeof Router>,
  now: () => number,
  more: Partial<HandOverDeps> = {},
): HandOverDeps {
  return {
    router,
    reports: new ReportSender({ router, now: () => performance.now(), neverReached: () => false }),
    engines,
    connectors: { nixl },
    remoteHost: 'auto',
    forwardTokenIds: true,
    streamsOnly: new Set(),
    isAsPlanned: () => true,
    engineHeaders: () => ({ headers: {}, auth: 'none' }),
    silences: { of: () => undefined, silentForMs: () => 0 },
    noteAlive: () => undefined,
    chainOf: () => create(TokenChainSchema),
    toBatonError: (error) => new BatonError({ reason: 'INTERNAL', message: String(error) }),
    retryBudget: new RetryBudget({ budgetPercent: 20 }, () => performance.now()),
    gapsOf: () => ({ observe: () => undefined }),
    limits: {
      queueMs: 0,
      routerMs: 0,
      prefillColdMs: 0,
      firstContentMs: 0,
      wholeReplyMs: 0,
      idleMs: 0,
      tokenizeMs: 0,
      leaseMarginMs: 10_000,
      holdBytes: 65_536,
      streamBufferBytes: 262_144,
    },
    now,
    ...more,
  };
}

/** A completions request that begins now. */
export function generateRequest(body: object, now: () => number): GenerateRequest {
  const bytes = new TextEncoder().encode(JSON.stringify(body));
  const scan = scanObject(bytes);
  if (scan.kind !== 'object') throw new Error('no object');
  return {
    requestId: 'req',
    api: 'completions',
    path: '/v1/completions',
    body: bytes,
    scan,
    facts: readFacts('completions', bytes, scan),
    tenant: 'anonymous',
    link: { conversationId: '', lookups: [], derived: false },
    unprovenMembers: [],
    headers: {},
    authorization: undefined,
    debug: false,
    timeline: new Timeline(now, now(), undefined),
  };
}

/** A client that takes everything and says nothing. */
export function silentSink(signal: AbortSignal): ClientSink {
  return {
    signal,
    start: () => undefined,
    write: () => undefined,
    end: () => undefined,
    bufferedBytes: () => 0,
    onceDrained: () => undefined,
  };
}
