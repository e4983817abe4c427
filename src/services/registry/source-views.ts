import type { InstanceSpec } from '../../core/instance-spec.ts';
import type { Logger } from '../../obs/log.ts';
import { GONE_FROM_SOURCE, type InstancePool, isLeaving, type Member } from './instance-pool.ts';
import type { RegistryState } from './registry-state.ts';

/** An instance that a source names and that the pool does not have from it. */
export interface LeftOut {
  readonly source: string;
  readonly instance: string;
  readonly why: string;
}

/** With what is tried again when an id or a URL becomes free; absent where no time helps. */
interface Waiting extends LeftOut {
  readonly spec?: InstanceSpec;
}

/**
 * Follows what sources name. A new instance is taken on; one that is named no more drains and leaves when that is over; one
 * that is named again meanwhile is resumed. An id or a URL belongs to whoever named it first, until that names it no more;
 * who comes second waits for that.
 */
export class SourceViews {
  readonly #pool: InstancePool;
  readonly #log: Logger;
  /** By source: ids that it names and an operator removed. */
  readonly #dismissed = new Map<string, Set<string>>();
  /** Drains of an earlier process, of instances that were not named yet. */
  readonly #drains = new Map<string, string>();
  /** By source: what of its newest view is left out; each is told once while the reason is the same. */
  readonly #leftOut = new Map<string, readonly Waiting[]>();
  #isRetryDue = false;

  constructor(pool: InstancePool, log: Logger) {
    this.#pool = pool;
    this.#log = log;
    pool.onFree(() => this.#retrySoon());
  }

  /** Takes the newest view of a source, all of it. */
  apply(source: string, specs: readonly InstanceSpec[]): void {
    if (this.#pool.isClosed) return;
    const named = new Map<string, InstanceSpec>();
    const twice: Waiting[] = [];
    for (const spec of specs) {
      if (named.has(spec.id)) twice.push({ source, instance: spec.id, why: 'it is named twice' });
      else named.set(spec.id, spec);
    }
    const dismissed = this.#dismissed.get(source) ?? new Set();
    for (const id of dismissed) if (!named.has(id)) dismissed.delete(id);
    // First those that go: one of them may leave its URL to another id, or two their URLs to each other.
    for (const member of [...this.#pool.members]) {
      const { id, url } = member.record.spec;
      if (member.origin === source && named.get(id)?.url !== url) this.#orphan(member);
    }
    const wanted = [...named.values()].filter(({ id }) => !dismissed.has(id));
    this.#keepLeftOut(source, [
      ...wanted.flatMap((spec) => this.#take(source, spec)),
      ...twice.filter(({ instance }) => !dismissed.has(instance)),
    ]);
    this.#retry();
  }

  /** An operator removed it: it stays away while its source, or one that waits for its place, goes on naming it. */
  dismiss(member: Member): void {
    const { origin, orphaned, record } = member;
    const { id, url } = record.spec;
    this.#dismissFrom(origin, id);
    // What is named in place of it is another matter.
    if (orphaned) return;
    for (const [source, waiting] of this.#leftOut) {
      const same = waiting.filter(({ spec }) => spec?.id === id || spec?.url === url);
      for (const { instance } of same) this.#dismissFrom(source, instance);
      this.#leftOut.set(
        source,
        waiting.filter((one) => !same.includes(one)),
      );
    }
  }

  /** What sources name and the pool does not have from them. */
  get leftOut(): readonly LeftOut[] {
    return [...this.#leftOut.values()].flat().map(({ source, instance, why }) => ({ source, instance, why }));
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
    this.#pool.drain(record, reason);
  }

  #dismissFrom(source: string, id: string): void {
    const ids = this.#dismissed.get(source) ?? new Set();
    this.#dismissed.set(source, ids.add(id));
  }

  /** Its source names it no more: whoever waits for this very instance has it at once, else it drains. */
  #orphan(member: Member): void {
    const { record } = member;
    if (member.orphaned || record.hasLeft) return;
    const heir = [...this.#leftOut.values()]
      .flat()
      .find(({ source, spec }) => source !== member.origin && spec !== undefined && isSameEngine(spec, record.spec));
    if (heir?.spec !== undefined) {
      this.#pool.adopt(member, heir.source, heir.spec);
      this.#pool.publish(record);
      // The next try finds that it is in the pool.
      return;
    }
    member.orphaned = true;
    if (record.hasServed) this.#pool.drain(record, GONE_FROM_SOURCE);
    else this.#pool.leave(member, GONE_FROM_SOURCE);
  }

  /** @returns what it is left out for, if it is */
  #take(source: string, spec: InstanceSpec): readonly Waiting[] {
    const why = this.#blockOf(source, spec) ?? this.#takeFree(source, spec);
    return why === undefined ? [] : [{ source, instance: spec.id, why, spec }];
  }

  #blockOf(source: string, { id, url }: InstanceSpec): string | undefined {
    const known = this.#pool.get(id);
    if (known !== undefined && !known.record.hasLeft && known.origin !== source && !known.orphaned) {
      return `its id is known from another source (${known.origin}); it waits until that names it no more`;
    }
    const other = this.#pool.memberAt(url);
    if (other === undefined || other === known || isLeaving(other)) return undefined;
    return `its URL is that of ${other.record.spec.id}; it waits until that has it no more`;
  }

  #takeFree(source: string, spec: InstanceSpec): string | undefined {
    const member = this.#pool.get(spec.id);
    if (member === undefined || member.record.hasLeft || !isSameEngine(member.record.spec, spec)) {
      return this.#put(source, spec);
    }
    const { record } = member;
    const resumed = member.orphaned && record.drainReason === GONE_FROM_SOURCE;
    this.#pool.adopt(member, source, spec);
    if (resumed) record.resume();
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

  #keepLeftOut(source: string, next: readonly Waiting[]): void {
    const told = this.#leftOut.get(source) ?? [];
    this.#leftOut.set(source, next);
    for (const { instance, why } of next) {
      if (told.some((before) => before.instance === instance && before.why === why)) continue;
      this.#log.warn({ instance, source }, `an instance of a source is left out: ${why}`);
    }
  }

  /** Something is free: after what frees it is done, as that may give it to another. */
  #retrySoon(): void {
    if (this.#isRetryDue || [...this.#leftOut.values()].every(({ length }) => length === 0)) return;
    this.#isRetryDue = true;
    queueMicrotask(() => {
      this.#isRetryDue = false;
      if (!this.#pool.isClosed) this.#retry();
    });
  }

  #retry(): void {
    for (const [source, waiting] of this.#leftOut) {
      const next = waiting.flatMap((one) => (one.spec === undefined ? [one] : this.#take(source, one.spec)));
      this.#keepLeftOut(source, next);
      const still = new Set(next.map(({ instance }) => instance));
      for (const { instance } of waiting) {
        if (!still.has(instance)) this.#log.info({ instance, source }, 'an instance that was left out is taken up');
      }
    }
  }
}

/** Whether a changed description is of the engine that is there, and not of another one under its id. */
function isSameEngine(a: InstanceSpec, b: InstanceSpec): boolean {
  return a.id === b.id && a.url === b.url && a.role === b.role && a.connector === b.connector;
}
