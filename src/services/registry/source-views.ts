import type { InstanceSpec } from '../../core/instance-spec.ts';
import type { Logger } from '../../obs/log.ts';
import type { InstancePool, Member } from './instance-pool.ts';
import type { RegistryState } from './registry-state.ts';

/** Why instances drain that their source does not name any more. */
const GONE_FROM_SOURCE = 'removed_from_source';

/**
 * Follows what sources name. A new instance is taken on; one that is named no more drains and leaves when that is over; one
 * that is named again meanwhile is resumed. An id or a URL belongs to whoever named it first.
 */
export class SourceViews {
  readonly #pool: InstancePool;
  readonly #log: Logger;
  /** By source: ids that it names and an operator removed. */
  readonly #dismissed = new Map<string, Set<string>>();
  /** Drains of an earlier process, of instances that were not named yet. */
  readonly #drains = new Map<string, string>();
  /** By source: the complaints of its newest view, so that each is told once. */
  readonly #complaints = new Map<string, ReadonlySet<string>>();

  constructor(pool: InstancePool, log: Logger) {
    this.#pool = pool;
    this.#log = log;
  }

  /** Takes the newest view of a source, all of it. */
  apply(source: string, specs: readonly InstanceSpec[]): void {
    if (this.#pool.isClosed) return;
    const named = new Set(specs.map(({ id }) => id));
    const dismissed = this.#dismissed.get(source) ?? new Set();
    for (const id of dismissed) if (!named.has(id)) dismissed.delete(id);
    // First those that go: one of them may leave a URL to another id.
    for (const member of [...this.#pool.members]) {
      if (member.origin === source && !named.has(member.record.spec.id)) this.#orphan(member);
    }
    const complaints = new Set<string>();
    const taken = new Set<string>();
    for (const spec of specs) {
      if (dismissed.has(spec.id)) continue;
      const complaint = taken.has(spec.id) ? 'it is named twice' : this.#take(source, spec);
      taken.add(spec.id);
      if (complaint === undefined) continue;
      const key = `${spec.id}: ${complaint}`;
      complaints.add(key);
      if (this.#complaints.get(source)?.has(key) === true) continue;
      this.#log.warn({ instance: spec.id, source }, `an instance of a source is left out: ${complaint}`);
    }
    this.#complaints.set(source, complaints);
  }

  /** An operator removed it: it stays away while its source goes on naming it. */
  dismiss(member: Member): void {
    const { origin, record } = member;
    const ids = this.#dismissed.get(origin) ?? new Set();
    this.#dismissed.set(origin, ids.add(record.spec.id));
  }

  /** By source: ids that it names and an operator removed. */
  get dismissed(): RegistryState['dismissed'] {
    return Object.fromEntries([...this.#dismissed].map(([source, ids]) => [source, [...ids]]));
  }

  /** Drains that wait for their instance to be named again. */
  get pendingDrains(): RegistryState['drains'] {
    return Object.fromEntries(this.#drains);
  }

  /** Takes over what operators told an earlier process. */
  restore({ dismissed, drains }: Pick<RegistryState, 'dismissed' | 'drains'>): void {
    for (const [source, ids] of Object.entries(dismissed)) this.#dismissed.set(source, new Set(ids));
    for (const [id, reason] of Object.entries(drains)) this.#drains.set(id, reason);
  }

  /** Drains an instance that an earlier process drained. */
  drainAsBefore({ record }: Member): void {
    const reason = this.#drains.get(record.spec.id);
    if (reason === undefined) return;
    this.#drains.delete(record.spec.id);
    record.drain(reason);
    this.#pool.publish(record);
  }

  #orphan(member: Member): void {
    const { record } = member;
    if (member.orphaned || record.hasLeft) return;
    member.orphaned = true;
    if (record.hasServed) {
      record.drain(GONE_FROM_SOURCE);
      this.#pool.publish(record);
    } else {
      this.#pool.leave(member, GONE_FROM_SOURCE);
    }
  }

  /** @returns why it cannot be taken, if so */
  #take(source: string, spec: InstanceSpec): string | undefined {
    const member = this.#pool.get(spec.id);
    if (member !== undefined && !member.record.hasLeft && member.origin !== source) {
      return `its id is known from another source (${member.origin})`;
    }
    const other = this.#pool.memberAt(spec.url);
    if (other !== undefined && other.record.spec.id !== spec.id) return `its URL is that of ${other.record.spec.id}`;
    if (member === undefined || member.record.hasLeft || !isSameEngine(member.record.spec, spec)) {
      return this.#put(source, spec);
    }
    const { record } = member;
    const resumed = member.orphaned && record.drainReason === GONE_FROM_SOURCE;
    member.orphaned = false;
    if (resumed) record.resume();
    record.respec(spec);
    this.#pool.publish(record);
    if (resumed) this.#pool.probeSoon(record);
    return undefined;
  }

  #put(source: string, spec: InstanceSpec): string | undefined {
    try {
      this.drainAsBefore(this.#pool.put(spec, source));
      return undefined;
    } catch (error) {
      return error instanceof Error ? error.message : String(error);
    }
  }
}

/** Whether a changed description is of the engine that is there, and not of another one under its id. */
function isSameEngine(a: InstanceSpec, b: InstanceSpec): boolean {
  return a.url === b.url && a.role === b.role && a.connector === b.connector;
}
