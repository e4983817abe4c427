import type { LegReport } from '../../gen/baton/v1/router_pb.ts';
import { type Lease, leaseMayEndAt, mayReadLate } from '../core/lease.ts';
import { toMs } from './durations.ts';
import type { InstanceView } from './instance-view.ts';
import type { SilenceWatch } from './silence-watch.ts';

/** What {@link LateReads} works with; times in milliseconds. */
export interface LateReadsDeps {
  readonly view: InstanceView;
  readonly silences: Pick<SilenceWatch, 'of'>;
  /** After which a silence has been noticed; 0 where instances are not watched. */
  readonly noticeMs: number;
  /** Told of an instance that may have filed wrong blocks, once for each life. */
  readonly onLate: (instanceId: string) => void;
  readonly now: () => number;
}

/** A decode leg that ended without a reply: its engine may still come to read. */
interface Unread {
  readonly lease: Lease;
  readonly endedAt: number;
}

interface Owed {
  readonly generation: number;
  legs: Unread[];
}

/** An engine that runs has heard by then that its request was given up. */
const HEARD_MS = 1000;
const DEFAULT_LEASE_MS = 30_000;

/**
 * Finds decode engines that may read a prompt's blocks after their lease. Such an engine stood still while its request was
 * given up; when it goes on it reads what the blocks hold by then, answers nobody, and files that in its prefix cache as
 * the KV of the prompt, where later requests hit it. One that runs hears in time that nobody waits any more.
 */
export class LateReads {
  readonly #deps: LateReadsDeps;
  readonly #owed = new Map<string, Owed>();
  #timer: NodeJS.Timeout | undefined;

  constructor(deps: LateReadsDeps) {
    this.#deps = deps;
    deps.view.onChange(() => this.#look());
  }

  /** Takes what is reported of a leg. */
  note({ instanceId, peerInstanceId, unreadLease }: LegReport): void {
    const { now, noticeMs, view } = this.#deps;
    if (unreadLease === undefined || noticeMs === 0) return;
    const endedAt = now();
    const lender = view.snapshot().find(({ id }) => id === peerInstanceId);
    const lease = { endsAt: endedAt + toMs(unreadLease), ms: toMs(lender?.kv?.lease) || DEFAULT_LEASE_MS };
    const generation = this.#generations().get(instanceId) ?? 0;
    const known = this.#owed.get(instanceId);
    const legs = known?.generation === generation ? known.legs : [];
    this.#owed.set(instanceId, { generation, legs: [...legs, { lease, endedAt }] });
    this.#look();
  }

  #generations(): ReadonlyMap<string, number> {
    return new Map(this.#deps.view.snapshot().map(({ id, incarnation }) => [id, incarnation?.generation ?? 0]));
  }

  #look(): void {
    clearTimeout(this.#timer);
    this.#timer = undefined;
    if (this.#owed.size === 0) return;
    const { now, onLate } = this.#deps;
    const at = now();
    let next = Number.POSITIVE_INFINITY;
    const late: string[] = [];
    const generations = this.#generations();
    for (const [instanceId, owed] of this.#owed) {
      const isSameLife = owed.generation === (generations.get(instanceId) ?? 0);
      const fates = isSameLife ? owed.legs.map((leg) => this.#fateOf(instanceId, leg, at)) : [];
      if (fates.includes('late')) late.push(instanceId);
      owed.legs = owed.legs.filter((_leg, i) => typeof fates[i] === 'number');
      if (fates.includes('late') || owed.legs.length === 0) this.#owed.delete(instanceId);
      else for (const fate of fates) if (typeof fate === 'number') next = Math.min(next, fate);
    }
    if (next < Number.POSITIVE_INFINITY) this.#timer = setTimeout(() => this.#look(), Math.max(1, next - at)).unref();
    for (const instanceId of late) onLate(instanceId);
  }

  /** What is known of a leg's blocks; a number: to be looked at then. */
  #fateOf(instanceId: string, { lease, endedAt }: Unread, now: number): 'late' | 'in-time' | number {
    const silence = this.#deps.silences.of(instanceId);
    const heardBy = endedAt + HEARD_MS;
    if (silence !== undefined && silence.from <= heardBy) {
      if (mayReadLate(lease, silence, now)) return 'late';
      if (silence.until === undefined) return leaseMayEndAt(lease, silence.from) + 1;
      if (silence.until >= heardBy) return 'in-time';
    }
    const knownAt = heardBy + this.#deps.noticeMs;
    return now >= knownAt ? 'in-time' : knownAt;
  }
}
