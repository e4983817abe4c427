import { equals } from '@bufbuild/protobuf';
import { durationFromMs } from '@bufbuild/protobuf/wkt';
import { type Instance, InstanceSchema, InstanceState } from '../../../gen/baton/v1/instance_pb.ts';
import type { InstanceSpec } from '../../core/instance-spec.ts';
import { stateWord } from '../../core/instance-words.ts';
import { errorFields, type Logger } from '../../obs/log.ts';
import { overLimit } from '../call-arguments.ts';
import type { Clock } from '../clock.ts';
import type { DescribedEngine } from '../engine-details.ts';
import { type HealthSettings, InstanceRecord, LATE_READ } from '../instance-record.ts';
import type { InstanceChange } from '../instance-watch.ts';
import { WatchHub } from '../watch-hub.ts';
import { PastProcesses } from './past-processes.ts';
import { Prober, type ProberOptions } from './prober.ts';

/** Instances that are known at a time, those that have left not counted. */
export const MAX_INSTANCES = 4096;
/** How long one that has left is still listed as GONE. */
const GONE_KEPT_MS = 5 * 60_000;
/** Ids whose generation is remembered after that, so that late calls of an earlier life are known as such. */
const MAX_GENERATIONS = 65_536;
const MAX_WATCHES = 1024;

/** Why instances drain that their source does not name any more. */
export const GONE_FROM_SOURCE = 'removed_from_source';

/** An instance and who named it. */
export interface Member {
  readonly record: InstanceRecord;
  /** Name of its source; `rpc` for a registered one. */
  origin: string;
  /** Its source does not name it any more: it drains, and leaves when that is over. */
  orphaned: boolean;
}

/** Whether it drains because its source names it no more: its engine belongs to whoever names that next. */
export function isLeaving({ orphaned, record }: Member): boolean {
  return orphaned && record.drainReason !== undefined;
}

/** Why an operator drained it, which holds for its engine whatever names that. */
export function heldDrain({ drainReason }: InstanceRecord): string | undefined {
  return drainReason === GONE_FROM_SOURCE ? undefined : drainReason;
}

/** What an {@link InstancePool} runs on. */
export interface InstancePoolOptions extends Omit<ProberOptions, 'onResult'> {
  readonly health: HealthSettings;
  readonly log: Logger;
  readonly clock: Clock;
  /** Names this life of the pool, `[a-z0-9]+`. */
  readonly epoch: string;
  /** Deltas kept for watches that resume. */
  readonly historyLimit: number;
}

/** The instances that are known, each probed and each change told: the state behind the registry's methods. */
export class InstancePool implements AsyncDisposable {
  readonly #log: Logger;
  readonly #clock: Clock;
  readonly #health: HealthSettings;
  readonly #prober: Prober;
  readonly #hub: WatchHub<InstanceChange>;
  readonly #members = new Map<string, Member>();
  /** Those that have not left; of two with one URL, as after a change of the name, the one that is named. */
  readonly #byUrl = new Map<string, Member>();
  readonly #instances = new Map<string, Instance>();
  /** One for each that has left. */
  readonly #removals = new Map<string, () => void>();
  /** Of ids that are not listed any more, those that left last at the end. */
  readonly #generations = new Map<string, number>();
  readonly #told = new WeakSet<InstanceRecord>();
  readonly #past = new PastProcesses(MAX_GENERATIONS);
  readonly #listeners = new Set<() => void>();
  #onFree = () => {};
  /** Made when it is asked for after a change. */
  #snapshot: readonly Instance[] | undefined;
  #closed = false;

  constructor(options: InstancePoolOptions) {
    this.#log = options.log;
    this.#clock = options.clock;
    this.#health = options.health;
    this.#prober = new Prober({ ...options, onResult: (record) => this.publish(record) });
    this.#hub = new WatchHub({
      clock: options.clock,
      epoch: options.epoch,
      historyLimit: options.historyLimit,
      maxWatches: MAX_WATCHES,
    });
  }

  /** Begins to probe. */
  start(): void {
    this.#prober.start();
  }

  /** The pace of the probes has changed. */
  repace(): void {
    this.#prober.repace();
  }

  get isClosed(): boolean {
    return this.#closed;
  }

  /** Revision of the newest change. */
  get revision(): bigint {
    return this.#hub.revision;
  }

  get watches(): Pick<WatchHub<InstanceChange>, 'watch'> {
    return this.#hub;
  }

  /** The instances in the order in which they came, GONE ones included; the same array until something changes. */
  get snapshot(): readonly Instance[] {
    this.#snapshot ??= [...this.#instances.values()];
    return this.#snapshot;
  }

  get members(): Iterable<Member> {
    return this.#members.values();
  }

  get(id: string): Member | undefined {
    return this.#members.get(id);
  }

  /** The instance as it was told last. */
  instanceOf({ spec }: InstanceRecord): Instance | undefined {
    return this.#instances.get(spec.id);
  }

  /** The member that has a URL, if it has not left. */
  memberAt(url: string): Member | undefined {
    return this.#byUrl.get(url);
  }

  /** Calls `listener` after each change, in the same turn; returns what ends that. */
  onChange(listener: () => void): () => void {
    this.#listeners.add(listener);
    return () => void this.#listeners.delete(listener);
  }

  /** Calls `listener` after an id or a URL became free, in the same turn and before others can have it. */
  onFree(listener: () => void): void {
    this.#onFree = listener;
  }

  /**
   * Takes an instance on, in place of one with its id, as its next generation.
   *
   * @throws BatonError LIMIT_EXCEEDED where there are too many
   */
  put(spec: InstanceSpec, origin: string, engine?: DescribedEngine): Member {
    const before = this.#members.get(spec.id);
    if (before === undefined || before.record.hasLeft) this.#checkRoom();
    const generation = this.generationOf(spec.id) + 1;
    if (before !== undefined) this.#release(before.record);
    this.#removals.get(spec.id)?.();
    this.#removals.delete(spec.id);
    const record = new InstanceRecord(spec, this.#health, generation, engine);
    const past = this.#past.of(spec);
    if (past !== undefined) record.inherit(past);
    const other = this.#byUrl.get(spec.url);
    const drain = other === undefined ? undefined : heldDrain(other.record);
    if (drain !== undefined) record.drain(drain);
    const member: Member = { record, origin, orphaned: false };
    this.#members.set(spec.id, member);
    this.#byUrl.set(spec.url, member);
    this.publish(record);
    this.#prober.add(record);
    return member;
  }

  /** A source names it from now on; its life goes on. */
  adopt(member: Member, origin: string, spec: InstanceSpec): void {
    member.origin = origin;
    member.orphaned = false;
    member.record.respec(spec);
    this.#byUrl.set(spec.url, member);
  }

  /** Drains an instance; what is wrong with its process is so under each id that the process has. */
  drain(record: InstanceRecord, reason: string): Instance {
    record.drain(reason);
    if (reason === LATE_READ) {
      for (const { record: other } of this.#members.values()) {
        if (other === record || other.spec.url !== record.spec.url || other.hasLeft) continue;
        other.drain(reason);
        this.publish(other);
      }
    }
    return this.publish(record);
  }

  /** The newest generation of an id; 0 for one that is not known. */
  generationOf(id: string): number {
    const known = this.#generations.get(id) ?? 0;
    return Math.max(known, this.#members.get(id)?.record.incarnation.generation ?? 0);
  }

  /** Ids that are not listed any more, with their newest generation. */
  get pastGenerations(): Iterable<readonly [string, number]> {
    return this.#generations;
  }

  /** Makes the generations of an id go on from this one. */
  restoreGeneration(id: string, generation: number): void {
    this.#generations.delete(id);
    this.#generations.set(id, generation);
    for (const oldest of this.#generations.keys()) {
      if (this.#generations.size <= MAX_GENERATIONS) return;
      this.#generations.delete(oldest);
    }
  }

  /** It is GONE at once; for a while it is still listed. */
  leave(member: Member, reason: string): Instance {
    const { record } = member;
    record.leave(reason);
    return this.publish(record);
  }

  /** Looks at an instance as soon as the pace of its probes allows. */
  probeSoon(record: InstanceRecord): void {
    this.#prober.probeSoon(record);
  }

  /** Tells what changed about an instance; the answer is what all see now. */
  publish(record: InstanceRecord): Instance {
    const { id } = record.spec;
    const member = this.#members.get(id);
    const known = this.#instances.get(id);
    // A late word of an earlier life.
    if (member?.record !== record) return known ?? record.toInstance(this.revision);
    if (member.orphaned && record.state === InstanceState.GONE) record.leave(record.reason);
    this.#past.keep(record.spec, record.past);
    if (known !== undefined && equals(InstanceSchema, known, record.toInstance(known.revision))) return known;
    const { instance } = this.#hub.publish((revision) => ({
      instance: record.toInstance(revision),
      removed: false,
    }));
    this.#instances.set(id, instance);
    if (known !== undefined) this.#logChange(known, instance, this.#told.has(record));
    this.#told.add(record);
    if (record.hasLeft && !this.#removals.has(id)) this.#bury(record);
    this.#tell();
    return instance;
  }

  /** A copy that says how old its load and how long its silence is; the shared message would change with every read. */
  withAge(instance: Instance): Instance {
    const record = this.#members.get(instance.id)?.record;
    if (record === undefined) return instance;
    const now = this.#clock.now();
    const { load, silence } = instance;
    const silentMs = record.silentMs(now);
    return {
      ...instance,
      ...(load && { load: { ...load, age: durationFromMs(Math.max(0, Math.round(now - record.loadReadAt))) } }),
      ...(silence &&
        silentMs !== undefined && { silence: { ...silence, length: durationFromMs(Math.round(silentMs)) } }),
    };
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.#closed = true;
    for (const cancel of this.#removals.values()) cancel();
    this.#removals.clear();
    this.#listeners.clear();
    this.#hub.close();
    await this.#prober[Symbol.asyncDispose]();
  }

  #checkRoom(): void {
    if (this.#members.size - this.#removals.size >= MAX_INSTANCES) throw overLimit('instances', MAX_INSTANCES);
    // Those that have left make room early.
    for (const [id, { record }] of this.#members) {
      if (this.#members.size < 2 * MAX_INSTANCES) return;
      if (record.hasLeft) this.#forget(id);
    }
  }

  #release(record: InstanceRecord): void {
    this.#prober.forget(record);
    const { url } = record.spec;
    if (this.#byUrl.get(url)?.record === record) this.#byUrl.delete(url);
    this.#onFree();
  }

  #bury(record: InstanceRecord): void {
    const { id } = record.spec;
    this.#release(record);
    this.#removals.set(
      id,
      this.#clock.setTimer(() => this.#forget(id), GONE_KEPT_MS),
    );
  }

  #forget(id: string): void {
    this.restoreGeneration(id, this.generationOf(id));
    this.#removals.get(id)?.();
    this.#removals.delete(id);
    this.#members.delete(id);
    const instance = this.#instances.get(id);
    this.#instances.delete(id);
    if (instance !== undefined) this.#hub.publish(() => ({ instance, removed: true }));
    this.#tell();
  }

  #tell(): void {
    this.#snapshot = undefined;
    for (const listener of [...this.#listeners]) {
      try {
        listener();
      } catch (error) {
        this.#log.error(errorFields(error), 'a listener of the pool failed');
      }
    }
  }

  #logChange(before: Instance, after: Instance, isSame: boolean): void {
    const instance = after.id;
    const generation = after.incarnation?.generation;
    if (before.state !== after.state) {
      const fields = { instance, from: stateWord(before.state), to: stateWord(after.state), reason: after.stateReason };
      this.#log.info(fields, 'instance changed state');
    }
    if (before.incarnation?.generation !== generation) {
      if (isSame) this.#log.warn({ instance, generation }, 'instance restarted');
      else this.#log.info({ instance, generation }, 'instance was named anew');
    }
  }
}
