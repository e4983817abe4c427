import { create } from '@bufbuild/protobuf';
import { durationFromMs } from '@bufbuild/protobuf/wkt';
import type { HandlerContext, ServiceImpl } from '@connectrpc/connect';
import { type Incarnation, type Instance, InstanceState } from '../../../gen/baton/v1/instance_pb.ts';
import {
  type DeregisterInstanceRequest,
  type DeregisterInstanceResponse,
  DeregisterInstanceResponseSchema,
  type DrainInstanceRequest,
  type DrainInstanceResponse,
  DrainInstanceResponseSchema,
  type GetInstanceRequest,
  type GetInstanceResponse,
  GetInstanceResponseSchema,
  type ListInstancesRequest,
  type ListInstancesResponse,
  type PoolRegistry,
  type RegisterInstanceRequest,
  type RegisterInstanceResponse,
  RegisterInstanceResponseSchema,
  type RenewLeaseRequest,
  type RenewLeaseResponse,
  RenewLeaseResponseSchema,
  type ResumeInstanceRequest,
  type ResumeInstanceResponse,
  ResumeInstanceResponseSchema,
  type WatchInstancesRequest,
  type WatchInstancesResponse,
} from '../../../gen/baton/v1/pool_registry_pb.ts';
import { BatonError } from '../../core/errors.ts';
import type { InstanceSpec } from '../../core/instance-spec.ts';
import { type Probe, probeInstance } from '../../engine/probe.ts';
import type { Logger } from '../../obs/log.ts';
import { checkReasonWord, invalidField } from '../call-arguments.ts';
import { type Clock, SYSTEM_CLOCK } from '../clock.ts';
import type { DescribedEngine } from '../engine-details.ts';
import { type HealthSettings, type InstanceRecord, isSameLife } from '../instance-record.ts';
import type { InstanceView, LearntOfEngine } from '../instance-view.ts';
import type { InstancePins } from '../pin-watch.ts';
import { heldDrain, InstancePool, isLeaving, type Member } from './instance-pool.ts';
import { Leases } from './leases.ts';
import { listPage, watchPool } from './readings.ts';
import { readLoad, readRegistration } from './register-request.ts';
import { Registrations } from './registrations.ts';
import { type RegistryState, type SavedRegistration, type SavedSpec, savedSpec } from './registry-state.ts';
import { type LeftOut, SourceViews } from './source-views.ts';

/** What a {@link PoolRegistryService} runs on. */
export interface PoolRegistryOptions {
  readonly health: HealthSettings;
  readonly log: Logger;
  /** Connectors that a registered instance may have. Default none. */
  readonly connectors?: readonly string[];
  /** Headers and key of registered instances, which no message tells, by their role. Default none. */
  readonly credentialsOf?: (role: InstanceSpec['role']) => Pick<InstanceSpec, 'headers' | 'apiKey'>;
  /** Key for probes of one instance; undefined sends none. Default the instance's own. */
  readonly probeKey?: (instance: InstanceSpec) => string | undefined;
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

const DEFAULT_HISTORY = 4096;
const LEASE_EXPIRED = 'lease_expired';
/** Origin of instances that no source names. */
const REGISTERED = 'rpc';

/**
 * The registry of this process: instances from the configuration, from sources and from registrations, their states from
 * probes, leases and what requests see. Implements the PoolRegistry service for the direct client and the RPC port; messages
 * it returns are shared, not copies.
 */
export class PoolRegistryService implements ServiceImpl<typeof PoolRegistry>, InstanceView, AsyncDisposable {
  readonly #clock: Clock;
  readonly #pool: InstancePool;
  readonly #sources: SourceViews;
  readonly #leases: Leases;
  readonly #connectors: readonly string[];
  readonly #credentialsOf: NonNullable<PoolRegistryOptions['credentialsOf']>;
  readonly #registrations = new Registrations();

  constructor(options: PoolRegistryOptions) {
    const { health, log } = options;
    this.#clock = options.clock ?? SYSTEM_CLOCK;
    this.#connectors = options.connectors ?? [];
    this.#credentialsOf = options.credentialsOf ?? (() => ({ headers: {} }));
    this.#pool = new InstancePool({
      health,
      log,
      clock: this.#clock,
      probe: options.probe ?? probeInstance,
      random: options.random ?? Math.random,
      probeKey: options.probeKey ?? (({ apiKey }) => apiKey),
      onProbe: options.onProbe ?? (() => {}),
      epoch: options.epoch ?? crypto.randomUUID().replaceAll('-', ''),
      historyLimit: options.historyLimit ?? DEFAULT_HISTORY,
    });
    this.#sources = new SourceViews(this.#pool, log);
    this.#leases = new Leases(this.#clock, (id) => this.#expire(id));
  }

  /** Begins to probe, every instance at once; before that all are STARTING. A second call changes nothing. */
  start(): void {
    this.#pool.start();
  }

  /** Other health settings are in force. */
  repace(): void {
    this.#pool.repace();
  }

  /** Revision of the newest change. */
  get revision(): bigint {
    return this.#pool.revision;
  }

  /** The instances in the order in which they came, GONE ones included; the same array until something changes. */
  readonly snapshot = (): readonly Instance[] => this.#pool.snapshot;

  /** Calls `listener` after each change, in the same turn; returns what ends that. */
  readonly onChange = (listener: () => void): (() => void) => this.#pool.onChange(listener);

  /** Takes what a request learnt: a refused connection makes a READY instance SUSPECT and probes it at once. */
  readonly notePassive = (instanceId: string, outcome: 'refused' | 'ok'): void => {
    const member = this.#member(instanceId);
    if (member === undefined) return;
    const { record } = member;
    const before = record.state;
    const now = this.#clock.now();
    const wasSilent = record.silentMs(now) !== undefined;
    record.applyPassive(outcome, now);
    if (outcome === 'ok' && !wasSilent) return;
    this.#pool.publish(record);
    if (record.state !== before) this.#pool.probeSoon(record);
  };

  /** Takes what a trial found out about an instance whose setting is `auto`; shows in ListInstances. */
  readonly noteBidirectional = (instanceId: string, state: 'on' | 'off'): void => {
    const member = this.#member(instanceId);
    if (member === undefined) return;
    member.record.noteBidirectional(state);
    this.#pool.publish(member.record);
  };

  /** Takes what replies showed of an engine; shows in ListInstances. */
  readonly noteLearnt = (instanceId: string, learnt: LearntOfEngine, generation: number): void => {
    const member = this.#member(instanceId);
    if (member?.record.incarnation.generation !== generation) return;
    member.record.noteLearnt(learnt);
    this.#pool.publish(member.record);
  };

  /** Takes what stored handles pin on a decode instance; shows in ListInstances. */
  readonly notePins = (instanceId: string, pins: InstancePins): void => {
    const member = this.#member(instanceId);
    if (member === undefined) return;
    member.record.notePins(pins);
    this.#pool.publish(member.record);
  };

  /** Drains an instance that would do harm; the same as DrainInstance. */
  readonly drain = (instanceId: string, reason: string): void => {
    const member = this.#member(instanceId);
    if (member !== undefined) this.#pool.drain(member.record, reason);
  };

  /** How an instance is described, with the key and the headers that no message tells. */
  readonly specOf = (instanceId: string): InstanceSpec | undefined => this.#pool.get(instanceId)?.record.spec;

  /** Takes the newest view of a source of instances, all of it. */
  applySource(source: string, specs: readonly InstanceSpec[]): void {
    this.#sources.apply(source, specs);
  }

  /** What sources name and the pool does not have from them. */
  get leftOut(): readonly LeftOut[] {
    return this.#sources.leftOut;
  }

  /** What is to outlive this process; `sources` are those whose last view is a part of it. */
  state(sources: readonly string[]): RegistryState {
    const registered: SavedRegistration[] = [];
    const views: Record<string, SavedSpec[]> = Object.fromEntries(sources.map((source) => [source, []]));
    const drains: Record<string, string> = { ...this.#sources.pendingDrains };
    const generations: Record<string, number> = Object.fromEntries(this.#pool.pastGenerations);
    for (const { origin, orphaned, record } of this.#pool.members) {
      const { generation, engineId } = record.incarnation;
      const spec = savedSpec(record.spec);
      if (origin === REGISTERED && record.hasLeft) generations[spec.id] = generation;
      if (orphaned || record.hasLeft) continue;
      if (record.outOfUse !== undefined) drains[spec.id] = record.outOfUse;
      views[origin]?.push(spec);
      if (origin === REGISTERED) {
        registered.push({ spec, leaseMs: this.#leases.lengthOf(spec.id), generation, engineId });
      }
    }
    return { registered, views, drains, dismissed: this.#sources.dismissed, generations };
  }

  /**
   * Takes over what an earlier process left, before any source is followed. Leases begin anew: nobody could renew them while
   * no process was there.
   */
  restore(state: RegistryState): void {
    this.#sources.restore(state);
    for (const [id, generation] of Object.entries(state.generations)) this.#pool.restoreGeneration(id, generation);
    for (const { spec, leaseMs, generation, engineId } of state.registered) {
      // The life goes on: whoever renews its lease knows it by this generation.
      this.#pool.restoreGeneration(spec.id, generation - 1);
      this.#sources.drainAsBefore(this.#put(spec, leaseMs, { ...UNKNOWN_ENGINE, engineId }));
    }
    for (const [source, specs] of Object.entries(state.views)) {
      const full = specs.map((spec) => ({ ...spec, ...this.#credentials(spec.role) }));
      if (full.length > 0) this.applySource(source, full);
    }
  }

  /** What drains, and what its load was when it was read last; times by the clock of this registry. */
  draining(): readonly DrainingInstance[] {
    return [...this.#pool.members].flatMap(({ record }) => {
      if (record.state !== InstanceState.DRAINING) return [];
      const { id, role, kvLeaseMs, decoderTtlMs } = record.spec;
      const load = this.#pool.instanceOf(record)?.load;
      if (load === undefined) return [{ id, role, kvLeaseMs, decoderTtlMs }];
      const busy = load.running + load.waiting + load.waitingDeferred > 0;
      const shared = this.#heirOf(record) !== undefined;
      return [{ id, role, kvLeaseMs, decoderTtlMs, load: { busy, at: record.loadReadAt, shared } }];
    });
  }

  /** What a draining instance held is used or past its time: it is GONE until it is resumed. */
  endDrain(instanceId: string): void {
    const member = this.#member(instanceId);
    if (member === undefined) return;
    member.record.endDrain();
    this.#pool.publish(member.record);
  }

  /** Stops probes, leases and watches; resolves when no timer and no socket is left. */
  async [Symbol.asyncDispose](): Promise<void> {
    this.#leases[Symbol.dispose]();
    await this.#pool[Symbol.asyncDispose]();
  }

  async registerInstance(request: RegisterInstanceRequest): Promise<RegisterInstanceResponse> {
    const now = this.#clock.now();
    return this.#registrations.replayOr(request, now, () => this.#register(request, now));
  }

  async renewLease(request: RenewLeaseRequest): Promise<RenewLeaseResponse> {
    const { instanceId, incarnation, load } = request;
    if (incarnation === undefined || incarnation.generation === 0) {
      throw invalidField('incarnation.generation', 'is required: the registration told it');
    }
    const { origin, record } = this.#find(instanceId, incarnation);
    if (origin !== REGISTERED || record.hasLeft) {
      const what = record.hasLeft ? 'the instance has left: register it again' : `no lease: it is ${origin}`;
      throw notFound(instanceId, what);
    }
    if (load !== undefined) record.noteLoad(readLoad('load', load, this.#clock.now()));
    const leaseMs = this.#leases.renew(instanceId);
    const { state, stateReason } = this.#pool.publish(record);
    return create(RenewLeaseResponseSchema, {
      state,
      stateReason,
      ...(leaseMs === undefined ? {} : { lease: durationFromMs(leaseMs) }),
    });
  }

  async deregisterInstance(request: DeregisterInstanceRequest): Promise<DeregisterInstanceResponse> {
    const { instanceId, incarnation } = request;
    const reason = reasonWord(request.reason);
    if (instanceId === '') throw invalidField('instance_id', 'is required');
    const member = this.#pool.get(instanceId);
    if (member === undefined || member.record.hasLeft) {
      return create(DeregisterInstanceResponseSchema, { removed: false });
    }
    checkLife(member, incarnation);
    this.#leases.revoke(instanceId);
    if (member.origin !== REGISTERED) this.#sources.dismiss(member);
    this.#pool.leave(member, reason);
    return create(DeregisterInstanceResponseSchema, { removed: true });
  }

  async drainInstance(request: DrainInstanceRequest): Promise<DrainInstanceResponse> {
    const { record } = this.#find(request.instanceId, request.incarnation);
    const instance = this.#pool.drain(record, reasonWord(request.reason));
    return create(DrainInstanceResponseSchema, { instance: this.#pool.withAge(instance) });
  }

  async resumeInstance(request: ResumeInstanceRequest): Promise<ResumeInstanceResponse> {
    const { record } = this.#find(request.instanceId, request.incarnation);
    reasonWord(request.reason);
    const drained = record.outOfUse !== undefined;
    const heir = this.#heirOf(record);
    if (drained && heir !== undefined) {
      throw invalidField('instance_id', `its engine is in the pool as ${heir} now, and is in service only once`);
    }
    if (drained) record.resume();
    const instance = this.#pool.publish(record);
    if (drained) this.#pool.probeSoon(record);
    return create(ResumeInstanceResponseSchema, { instance: this.#pool.withAge(instance) });
  }

  async getInstance(request: GetInstanceRequest): Promise<GetInstanceResponse> {
    const { record } = this.#find(request.instanceId, undefined);
    return create(GetInstanceResponseSchema, { instance: this.#pool.withAge(this.#pool.publish(record)) });
  }

  async listInstances(request: ListInstancesRequest): Promise<ListInstancesResponse> {
    return listPage(this.#pool, request);
  }

  watchInstances(
    request: WatchInstancesRequest,
    context: Pick<HandlerContext, 'signal'>,
  ): AsyncIterable<WatchInstancesResponse> {
    return watchPool(this.#pool, request, context.signal);
  }

  /** An instance that can still change; undefined once this registry is closed. */
  #member(instanceId: string): Member | undefined {
    return this.#pool.isClosed ? undefined : this.#pool.get(instanceId);
  }

  #register(request: RegisterInstanceRequest, now: number): RegisterInstanceResponse {
    const { spec, engine, load, leaseMs } = readRegistration(request, this.#connectors);
    const reading = load === undefined ? undefined : readLoad('instance.load', load, now);
    this.#checkFree(spec);
    const { record } = this.#put(spec, leaseMs, engine);
    if (reading !== undefined) record.noteLoad(reading);
    return create(RegisterInstanceResponseSchema, {
      instance: this.#pool.publish(record),
      ...(leaseMs === undefined ? {} : { lease: durationFromMs(leaseMs) }),
    });
  }

  #credentials(role: InstanceSpec['role']): Pick<InstanceSpec, 'headers' | 'apiKey'> {
    const { headers, apiKey } = this.#credentialsOf(role);
    return { headers, ...(apiKey === undefined ? {} : { apiKey }) };
  }

  #put(spec: SavedSpec, leaseMs: number | undefined, engine: DescribedEngine): Member {
    // A drain holds until it is ended, whatever restarts meanwhile.
    const known = this.#pool.get(spec.id);
    const before = known && heldDrain(known.record);
    const member = this.#pool.put({ ...spec, ...this.#credentials(spec.role) }, REGISTERED, engine);
    if (before !== undefined) member.record.drain(before);
    if (leaseMs === undefined) this.#leases.revoke(spec.id);
    else this.#leases.grant(spec.id, leaseMs);
    return member;
  }

  /** Refuses an id that a source names, and the URL of another instance: an engine is in the pool once. */
  #checkFree({ id, url }: InstanceSpec): void {
    const known = this.#pool.get(id);
    if (known !== undefined && !known.record.hasLeft && known.origin !== REGISTERED && !known.orphaned) {
      throw invalidField('instance.id', `is named by another source (${known.origin}), which needs no registration`);
    }
    const other = this.#pool.memberAt(url);
    if (other !== undefined && other !== known && !isLeaving(other)) {
      const { id: otherId } = other.record.spec;
      throw invalidField('instance.url', `is that of the instance ${otherId}: use its id, or deregister it`);
    }
  }

  /** The id under which the engine of this one is named now, where that is another. */
  #heirOf(record: InstanceRecord): string | undefined {
    const holder = this.#pool.memberAt(record.spec.url)?.record;
    return holder === record ? undefined : holder?.spec.id;
  }

  #expire(id: string): void {
    const member = this.#member(id);
    if (member !== undefined) this.#pool.leave(member, LEASE_EXPIRED);
  }

  #find(instanceId: string, life: Incarnation | undefined): Member {
    if (instanceId === '') throw invalidField('instance_id', 'is required');
    const member = this.#pool.get(instanceId);
    if (member === undefined) throw notFound(instanceId, 'the registry does not know this instance');
    checkLife(member, life);
    return member;
  }
}

const UNKNOWN_ENGINE: DescribedEngine = {
  engineId: '',
  models: [],
  modelsKnown: false,
  kind: '',
  version: '',
  blockSize: 0,
  numGpuBlocks: 0,
  templateFingerprint: '',
};

/** An instance that drains. */
export interface DrainingInstance extends Pick<InstanceSpec, 'id' | 'role' | 'kvLeaseMs' | 'decoderTtlMs'> {
  /** Whether it had work when it was asked; absent for an engine that does not tell. */
  readonly load?: {
    readonly busy: boolean;
    readonly at: number;
    /** The engine works under another id too. */
    readonly shared: boolean;
  };
}

function checkLife({ record }: Member, life: Incarnation | undefined): void {
  const current = record.incarnation;
  if (life === undefined || isSameLife(life, current)) return;
  throw new BatonError({
    reason: 'STALE_INCARNATION',
    message: 'the instance is in another life than the call speaks of',
    metadata: { instance_id: record.spec.id, generation: String(current.generation) },
  });
}

function notFound(instanceId: string, message: string): BatonError {
  return new BatonError({ reason: 'INSTANCE_NOT_FOUND', message, metadata: { instance_id: instanceId } });
}

function reasonWord(reason: string): string {
  checkReasonWord(reason);
  return reason === '' ? 'operator' : reason;
}
