import { create, equals } from '@bufbuild/protobuf';
import { durationFromMs } from '@bufbuild/protobuf/wkt';
import type { HandlerContext, ServiceImpl } from '@connectrpc/connect';
import { type Incarnation, type Instance, InstanceSchema, InstanceState } from '../../gen/baton/v1/instance_pb.ts';
import {
  type DrainInstanceRequest,
  type DrainInstanceResponse,
  DrainInstanceResponseSchema,
  type GetInstanceRequest,
  type GetInstanceResponse,
  GetInstanceResponseSchema,
  type ListInstancesRequest,
  type ListInstancesResponse,
  ListInstancesResponseSchema,
  type PoolRegistry,
  type ResumeInstanceRequest,
  type ResumeInstanceResponse,
  ResumeInstanceResponseSchema,
  type WatchInstancesRequest,
  type WatchInstancesResponse,
} from '../../gen/baton/v1/pool_registry_pb.ts';
import { BatonError } from '../core/errors.ts';
import { type Probe, type ProbeResult, type ProbeTarget, probeInstance } from '../engine/probe.ts';
import { errorFields, type Logger } from '../obs/log.ts';
import { type Clock, SYSTEM_CLOCK } from './clock.ts';
import { passesFilter } from './instance-filter.ts';
import { type HealthSettings, InstanceRecord, isSameLife, type StaticInstance } from './instance-record.ts';
import type { InstanceView } from './instance-view.ts';
import { toWatchResponses } from './instance-watch.ts';
import { stateWord } from './instance-words.ts';
import { clampPageSize, decodePageToken, encodePageToken } from './page-token.ts';
import { readCheckpointInterval, WatchHub } from './watch-hub.ts';

/** What a {@link PoolRegistryService} runs on. */
export interface PoolRegistryOptions {
  /** Ids are unique. */
  readonly instances: readonly StaticInstance[];
  readonly health: HealthSettings;
  readonly log: Logger;
  /** Key for probes of one instance; undefined sends none. Default the instance's own. */
  readonly probeKey?: (instance: StaticInstance) => string | undefined;
  /** Told the kind of each probe's health, for a counter. */
  readonly onProbe?: (kind: string) => void;
  /** Default undici. */
  readonly probe?: Probe;
  /** Default the system's. */
  readonly clock?: Clock;
  /** Uniform in [0, 1). Default Math.random. */
  readonly random?: () => number;
  /** Default a random one per service. */
  readonly epoch?: string;
  /** Deltas kept for watches that resume. Default 4,096. */
  readonly historyLimit?: number;
}

const MAX_WATCHES = 1024;
const DEFAULT_HISTORY = 4096;
/** Share of a delay by which probes are spread, so that instances started together are not probed together for ever. */
const JITTER = 0.1;
/** Least time between two probes that requests ask for. */
const MIN_PROBE_GAP_MS = 250;
/** Failed probes in a row after which an engine that never answered is worth a warning. */
const WARN_AFTER = 3;

interface Runner {
  readonly record: InstanceRecord;
  readonly target: ProbeTarget;
  cancelTimer: (() => void) | undefined;
  probing: boolean;
  /** Another probe is wanted after the running one, which may have begun before the event. */
  again: boolean;
  lastProbeAt: number;
  failuresInRow: number;
  keyWarned: boolean;
}

/**
 * The registry of this process: instances from the configuration, their states from probes and from what requests see.
 * Implements the PoolRegistry service for the direct client and the RPC port; messages it returns are shared, not copies.
 */
export class PoolRegistryService implements ServiceImpl<typeof PoolRegistry>, InstanceView, AsyncDisposable {
  readonly #health: HealthSettings;
  readonly #log: Logger;
  readonly #probe: Probe;
  readonly #clock: Clock;
  readonly #random: () => number;
  readonly #onProbe: (kind: string) => void;
  readonly #runners = new Map<string, Runner>();
  readonly #instances = new Map<string, Instance>();
  readonly #hub: WatchHub<Instance>;
  readonly #listeners = new Set<() => void>();
  readonly #running = new Set<Promise<void>>();
  readonly #stop = new AbortController();
  #snapshot: readonly Instance[] = [];
  #started = false;

  constructor(options: PoolRegistryOptions) {
    this.#health = options.health;
    this.#log = options.log;
    this.#probe = options.probe ?? probeInstance;
    this.#clock = options.clock ?? SYSTEM_CLOCK;
    this.#random = options.random ?? Math.random;
    this.#onProbe = options.onProbe ?? (() => {});
    this.#hub = new WatchHub({
      clock: this.#clock,
      epoch: options.epoch ?? crypto.randomUUID().replaceAll('-', ''),
      historyLimit: options.historyLimit ?? DEFAULT_HISTORY,
      maxWatches: MAX_WATCHES,
    });
    const probeKey = options.probeKey ?? ((instance: StaticInstance) => instance.apiKey);
    for (const spec of options.instances) {
      if (this.#runners.has(spec.id)) throw new Error(`two instances have the id ${spec.id}`);
      const key = probeKey(spec);
      const runner: Runner = {
        record: new InstanceRecord(spec, options.health),
        target: { url: spec.url, headers: spec.headers, ...(key === undefined ? {} : { apiKey: key }) },
        cancelTimer: undefined,
        probing: false,
        again: false,
        lastProbeAt: Number.NEGATIVE_INFINITY,
        failuresInRow: 0,
        keyWarned: false,
      };
      this.#runners.set(spec.id, runner);
      this.#publish(runner.record);
    }
  }

  /** Begins to probe, every instance at once; before that all are STARTING. A second call changes nothing. */
  start(): void {
    if (this.#started || this.#stop.signal.aborted) return;
    this.#started = true;
    for (const runner of this.#runners.values()) this.#schedule(runner, 0);
  }

  /** Revision of the newest change. */
  get revision(): bigint {
    return this.#hub.revision;
  }

  /** The instances in the order of the configuration, GONE ones included; the same array until something changes. */
  readonly snapshot = (): readonly Instance[] => this.#snapshot;

  /** Calls `listener` after each change, in the same turn; returns what ends that. */
  readonly onChange = (listener: () => void): (() => void) => {
    this.#listeners.add(listener);
    return () => void this.#listeners.delete(listener);
  };

  /** Takes what a request learnt: a refused connection makes a READY instance SUSPECT and probes it at once. */
  readonly notePassive = (instanceId: string, outcome: 'refused' | 'ok'): void => {
    const runner = this.#runners.get(instanceId);
    if (runner === undefined || this.#stop.signal.aborted) return;
    const before = runner.record.state;
    runner.record.applyPassive(outcome, this.#clock.now());
    if (outcome === 'ok') return;
    this.#publish(runner.record);
    if (runner.record.state !== before) this.#probeSoon(runner);
  };

  /** Takes what a trial found out about an instance whose setting is `auto`; shows in ListInstances. */
  readonly noteBidirectional = (instanceId: string, state: 'on' | 'off'): void => {
    const runner = this.#runners.get(instanceId);
    if (runner === undefined || this.#stop.signal.aborted) return;
    runner.record.noteBidirectional(state);
    this.#publish(runner.record);
  };

  /** Drains an instance that would do harm; the same as DrainInstance. */
  readonly drain = (instanceId: string, reason: string): void => {
    const runner = this.#runners.get(instanceId);
    if (runner === undefined || this.#stop.signal.aborted) return;
    runner.record.drain(reason);
    this.#publish(runner.record);
  };

  /** Stops probes and watches; resolves when no timer and no socket is left. */
  async [Symbol.asyncDispose](): Promise<void> {
    this.#stop.abort();
    for (const runner of this.#runners.values()) {
      runner.cancelTimer?.();
      runner.cancelTimer = undefined;
    }
    this.#listeners.clear();
    this.#hub.close();
    await Promise.all(this.#running);
  }

  async registerInstance(): Promise<never> {
    throw notImplemented('RegisterInstance');
  }

  async renewLease(): Promise<never> {
    throw notImplemented('RenewLease');
  }

  async deregisterInstance(): Promise<never> {
    throw notImplemented('DeregisterInstance');
  }

  async drainInstance(request: DrainInstanceRequest): Promise<DrainInstanceResponse> {
    const { record } = this.#find(request.instanceId, request.incarnation);
    record.drain(reasonWord(request.reason));
    return create(DrainInstanceResponseSchema, { instance: this.#withAge(this.#publish(record)) });
  }

  async resumeInstance(request: ResumeInstanceRequest): Promise<ResumeInstanceResponse> {
    const runner = this.#find(request.instanceId, request.incarnation);
    reasonWord(request.reason);
    const drained = runner.record.isDrained;
    runner.record.resume();
    const instance = this.#publish(runner.record);
    if (drained) this.#probeSoon(runner);
    return create(ResumeInstanceResponseSchema, { instance: this.#withAge(instance) });
  }

  async getInstance(request: GetInstanceRequest): Promise<GetInstanceResponse> {
    const { record } = this.#find(request.instanceId, undefined);
    return create(GetInstanceResponseSchema, { instance: this.#withAge(this.#current(record)) });
  }

  async listInstances(request: ListInstancesRequest): Promise<ListInstancesResponse> {
    const after = decodePageToken(request.pageToken);
    const size = clampPageSize(request.pageSize);
    const matching = [...this.#snapshot]
      .filter((instance) => passesFilter(instance, request.filter) && (after === undefined || instance.id > after))
      .sort((a, b) => (a.id < b.id ? -1 : 1));
    const page = matching.slice(0, size);
    const last = page.at(-1);
    return create(ListInstancesResponseSchema, {
      instances: page.map((instance) => this.#withAge(instance)),
      nextPageToken: last !== undefined && matching.length > size ? encodePageToken(last.id) : '',
      revision: this.revision,
      stale: false,
    });
  }

  watchInstances(
    request: WatchInstancesRequest,
    context: Pick<HandlerContext, 'signal'>,
  ): AsyncIterable<WatchInstancesResponse> {
    const { checkpointInterval, filter, resumeToken } = request;
    const events = this.#hub.watch({
      token: resumeToken,
      // A copy: what changes while it is told comes as a delta.
      snapshot: () =>
        this.#snapshot.filter((instance) => passesFilter(instance, filter)).map((instance) => this.#withAge(instance)),
      checkpointMs: readCheckpointInterval(checkpointInterval),
      signal: context.signal,
    });
    return toWatchResponses(events, filter, resumeToken !== '');
  }

  #find(instanceId: string, life: Incarnation | undefined): Runner {
    if (instanceId === '') throw invalidField('instance_id', 'is required');
    const runner = this.#runners.get(instanceId);
    if (runner === undefined) {
      throw new BatonError({
        reason: 'INSTANCE_NOT_FOUND',
        message: 'the registry does not know this instance',
        metadata: { instance_id: instanceId },
      });
    }
    const current = runner.record.incarnation;
    if (life !== undefined && !isSameLife(life, current)) {
      throw new BatonError({
        reason: 'STALE_INCARNATION',
        message: 'the instance is in another life than the call speaks of',
        metadata: { instance_id: instanceId, generation: String(current.generation) },
      });
    }
    return runner;
  }

  #current(record: InstanceRecord): Instance {
    return this.#instances.get(record.spec.id) ?? record.toInstance(this.revision);
  }

  /** A copy whose load says how old it is; the shared message cannot, it would change with every read. */
  #withAge(instance: Instance): Instance {
    const record = this.#runners.get(instance.id)?.record;
    if (instance.load === undefined || record === undefined) return instance;
    const age = Math.max(0, Math.round(this.#clock.now() - record.loadReadAt));
    return { ...instance, load: { ...instance.load, age: durationFromMs(age) } };
  }

  #publish(record: InstanceRecord): Instance {
    const before = this.#instances.get(record.spec.id);
    if (before !== undefined && equals(InstanceSchema, before, record.toInstance(before.revision))) return before;
    const instance = this.#hub.publish((revision) => record.toInstance(revision));
    this.#instances.set(instance.id, instance);
    this.#snapshot = [...this.#instances.values()];
    if (before !== undefined) this.#logChange(before, instance);
    for (const listener of [...this.#listeners]) {
      try {
        listener();
      } catch (error) {
        this.#log.error(errorFields(error), 'a listener of the pool failed');
      }
    }
    return instance;
  }

  #logChange(before: Instance, after: Instance): void {
    const instance = after.id;
    const generation = after.incarnation?.generation;
    if (before.state !== after.state) {
      const fields = { instance, from: stateWord(before.state), to: stateWord(after.state), reason: after.stateReason };
      this.#log.info(fields, 'instance changed state');
    }
    if (before.incarnation?.generation !== generation) {
      this.#log.warn({ instance, generation }, 'instance restarted');
    }
  }

  #schedule(runner: Runner, delayMs: number | undefined): void {
    runner.cancelTimer?.();
    runner.cancelTimer = undefined;
    if (delayMs === undefined || !this.#started || this.#stop.signal.aborted) return;
    runner.cancelTimer = this.#clock.setTimer(() => {
      runner.cancelTimer = undefined;
      const run = this.#probeOnce(runner).finally(() => this.#running.delete(run));
      this.#running.add(run);
    }, delayMs);
  }

  #probeSoon(runner: Runner): void {
    if (runner.probing) {
      runner.again = true;
      return;
    }
    this.#schedule(runner, Math.max(0, runner.lastProbeAt + MIN_PROBE_GAP_MS - this.#clock.now()));
  }

  /** An engine that never came up, or that refuses baton's key, would else be silent at the usual log level. */
  #warnUnseen(runner: Runner, result: ProbeResult): void {
    const { record } = runner;
    const { kind, detail } = result.health;
    runner.failuresInRow = kind === 'ok' ? 0 : runner.failuresInRow + 1;
    const instance = record.spec.id;
    if (runner.failuresInRow === WARN_AFTER && record.state === InstanceState.STARTING) {
      this.#log.warn({ instance, kind, detail }, 'an engine cannot be reached since it was configured');
    }
    if (result.keyRefused === true && !runner.keyWarned) {
      this.#log.warn({ instance }, "an engine refuses baton's key (OPENAI_API_KEY or the pool's api_key)");
    }
    runner.keyWarned = result.keyRefused ?? runner.keyWarned;
  }

  async #probeOnce(runner: Runner): Promise<void> {
    const { record, target } = runner;
    const startedAt = this.#clock.now();
    runner.probing = true;
    runner.lastProbeAt = startedAt;
    try {
      const result = await this.#probe(target, record.partsDue(startedAt), this.#health.timeoutMs, this.#stop.signal);
      if (this.#stop.signal.aborted) return;
      this.#onProbe(result.health.kind);
      if (result.health.kind !== 'ok' && this.#log.isEnabled('debug')) {
        this.#log.debug(
          { instance: record.spec.id, kind: result.health.kind, detail: result.health.detail },
          'probe failed',
        );
      }
      record.applyProbe(result, startedAt, this.#clock.now());
      this.#warnUnseen(runner, result);
    } catch (error) {
      if (this.#stop.signal.aborted) return;
      this.#log.error({ instance: record.spec.id, ...errorFields(error) }, 'probe broke');
      record.applyProbe({ health: { kind: 'unreachable', detail: 'probe broke' } }, startedAt, this.#clock.now());
    } finally {
      runner.probing = false;
    }
    this.#publish(record);
    const again = runner.again;
    runner.again = false;
    if (again) {
      this.#probeSoon(runner);
      return;
    }
    const delay = record.nextDelayMs();
    this.#schedule(runner, delay === undefined ? undefined : delay * (1 - JITTER + 2 * JITTER * this.#random()));
  }
}

function notImplemented(method: string): BatonError {
  return new BatonError({
    reason: 'NOT_IMPLEMENTED',
    message: `this registry has static instances and does not serve ${method}`,
    metadata: { method: `baton.v1.PoolRegistry/${method}` },
  });
}

function invalidField(field: string, what: string): BatonError {
  return new BatonError({ reason: 'INVALID_ARGUMENT', message: `${field} ${what}`, param: field, metadata: { field } });
}

function reasonWord(reason: string): string {
  if (reason === '') return 'operator';
  if (!/^[a-z][a-z0-9_]{0,63}$/.test(reason)) throw invalidField('reason', 'is not a snake_case word');
  return reason;
}
