import type { Client } from '@connectrpc/connect';
import type { KVCacheStore } from '../../gen/baton/v1/kv_cache_store_pb.ts';
import { derive, follow, type Settings } from '../config/settings.ts';
import type { Policy, PolicySettings } from '../core/policy.ts';
import type { Logger } from '../obs/log.ts';
import type { Metrics } from '../obs/metrics.ts';
import type { Tracer } from '../obs/tracer.ts';
import { POLICIES } from '../policies/index.ts';
import { BidirectionalTrials } from '../services/bidirectional-trials.ts';
import { Bindings } from '../services/bindings.ts';
import { CachedPrefixes } from '../services/cached-prefixes.ts';
import { ConversationMemory } from '../services/conversation-memory.ts';
import { HandleClaims } from '../services/handle-claims.ts';
import { HandleHabits } from '../services/handle-habits.ts';
import { LATE_READ, longestCalmMs } from '../services/instance-record.ts';
import type { InstanceView } from '../services/instance-view.ts';
import { LateReads } from '../services/late-reads.ts';
import { Reuse } from '../services/reuse.ts';
import { ReusePlanner, type ReuseSettings } from '../services/reuse-planner.ts';
import { RouterService } from '../services/router.ts';
import { SilenceWatch } from '../services/silence-watch.ts';
import { TurnRecorder } from '../services/turn-recorder.ts';
import { firstTokenConnector } from './first-token.ts';
import { StartError } from './listen.ts';

/** Builds the router of this process; without a store it plans without reuse. The stack ends its claims on handles. */
export function buildRouter(
  settings: Settings,
  view: InstanceView,
  store: Client<typeof KVCacheStore> | undefined,
  tracer: Tracer | undefined,
  metrics: Metrics,
  log: Logger,
  stack: AsyncDisposableStack,
): RouterService {
  const config = settings.current;
  const prefillPolicy = policyOf('prefill', settings);
  const decodePolicy = policyOf('decode', settings);
  const router = new RouterService(view, {
    rules: {
      get prefillPolicy() {
        return prefillPolicy();
      },
      get decodePolicy() {
        return decodePolicy();
      },
      get minUncachedTokens() {
        return settings.current.disagg.minUncachedTokens;
      },
    },
    connector: config.kvConnector,
    queue: follow(() => settings.current.queue),
    limits: follow(() => settings.current.limits),
    breaker: follow(() => settings.current.breaker),
    get slowStartMs() {
      return settings.current.health.slowStartMs;
    },
    lateReads: buildLateReads(settings, view, metrics, log),
    ...(config.identity.clientBound
      ? { bindings: new Bindings((place, reason) => metrics.rebound(place, reason)) }
      : {}),
    ...(store === undefined ? {} : { reuse: buildReuse(settings, view, store, metrics, log, stack) }),
    observe: {
      planned: (mode, reason) => metrics.planned(mode, reason),
      queueLeft: (outcome, ms) => metrics.queueLeft(outcome, ms),
      queued: (since, until) => tracer?.note('queue', since, until),
      breaker: (owner, to) => {
        metrics.breakerChanged(owner.scope, to);
        if (to === 'open') log.warn({ ...owner }, BREAKER_TEXTS[owner.scope]);
        else log.info({ ...owner }, 'a breaker has closed');
      },
    },
  });
  metrics.watchQueueDepth(() => router.queueDepth);
  metrics.watchLegs(() => router.busy());
  metrics.watchBreakers(() =>
    router.breakers
      .open()
      .map((owner) =>
        owner.scope === 'pair'
          ? { scope: owner.scope, instance: owner.prefillId, peer: owner.decodeId }
          : { scope: owner.scope, instance: owner.instanceId, peer: '' },
      ),
  );
  return router;
}

const LATE_READ_TEXT =
  'a decode engine stood still while it had blocks of a prefill engine to read, past their lease; its prefix cache may hold wrong KV, so it is drained until it is restarted';

function buildLateReads(settings: Settings, view: InstanceView, metrics: Metrics, log: Logger): LateReads {
  const now = () => performance.now();
  return new LateReads({
    view,
    silences: new SilenceWatch(view, now),
    // A silence is seen with the first health check that fails.
    get noticeMs() {
      const { health } = settings.current;
      return health.intervalMs > 0 && health.timeoutMs > 0 ? longestCalmMs(health) : 0;
    },
    onLate(instance) {
      view.drain(instance, LATE_READ);
      metrics.lateRead();
      log.error({ instance }, LATE_READ_TEXT);
    },
    now,
  });
}

const BREAKER_TEXTS = {
  instance: 'an engine fails leg after leg and is left alone for a while',
  transfer: 'what an engine hands over fails with others and it is left alone for a while',
  pair: 'two engines cannot hand KV over to each other; others are used for a while',
} as const;

/** One for each role: a policy may remember what it was told, and begins anew when its settings have changed. */
function policyOf(role: 'prefill' | 'decode', settings: Settings): () => Policy {
  return derive(
    settings,
    ({ policy, policies }) => ({ name: policy[role], policies }),
    ({ name, policies }) => makePolicy(name, policies),
  );
}

function makePolicy(name: string, settings: PolicySettings): Policy {
  const policies: Readonly<Record<string, (settings: PolicySettings) => Policy>> = POLICIES;
  const make = policies[name];
  if (make === undefined) throw new StartError(`unknown policy "${name}"; known: ${Object.keys(policies).join(', ')}`);
  return make(settings);
}

function buildReuse(
  settings: Settings,
  view: InstanceView,
  store: Client<typeof KVCacheStore>,
  metrics: Metrics,
  log: Logger,
  stack: AsyncDisposableStack,
): Reuse {
  const config = settings.current;
  const { guard } = config.reuse;
  const trials = new BidirectionalTrials();
  const memory = new ConversationMemory();
  const habits = new HandleHabits(view.noteLearnt);
  const cached = new CachedPrefixes();
  const rules = derive(
    settings,
    ({ timeouts, kv, reuse, disagg }): ReuseSettings => ({
      guard,
      prefillWarmMs: timeouts.prefillWarmMs,
      prefillWarmPerTokenMs: timeouts.prefillWarmPerTokenMs,
      remoteHost: kv.remoteHost,
      minSavedTokens: reuse.minSavedTokens,
      localTailTokens: disagg.localTailTokens,
    }),
    (part) => part,
  );
  const claims = stack.use(
    new HandleClaims(
      store,
      follow(() => settings.current.timeouts),
    ),
  );
  const planner = new ReusePlanner(claims, view, trials, memory, cached, follow(rules));
  const recorder = new TurnRecorder(store, view, memory, habits, cached, guard);
  return new Reuse(
    { view, planner, claims, recorder, trials, memory, habits },
    {
      clientBound: config.identity.clientBound,
      hasHandles: firstTokenConnector(config) === undefined,
      guard,
      convertsStreams: () => settings.current.reuse.decodeStream === 'convert',
      observe: {
        handleFate: (fate) => metrics.decodeHandle(fate),
        alarm: (instance, what) => {
          metrics.reuseAlarm(what);
          log.error({ instance, what }, ALARMS[what]);
        },
      },
    },
  );
}

const ALARMS = {
  switched_off:
    'a prefill engine hung on the first handle it got: is bidirectional_kv_xfer on? It gets no more handles',
  pair_barred: 'a prefill engine hung while it read from a decode engine; the pair gets no more handles',
  drain: 'a prefill engine hung on two handles and is drained',
  guard_breach: 'an engine used other tokens than those of the KV that it was given and is drained',
} as const;
