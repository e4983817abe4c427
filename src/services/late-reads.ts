import { type Instance, InstanceState } from '../../gen/baton/v1/instance_pb.ts';
import type { LegReport } from '../../gen/baton/v1/router_pb.ts';
import { type Lease, mayReadLate, readableUntil, settleMs } from '../core/lease.ts';
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
  /** Empty where the instance was not known any more. */
  readonly url: string;
  /** Names the process that the legs were sent to; undefined where its engine does not tell. */
  readonly processStartSeconds: number | undefined;
  legs: Unread[];
}

/** States in which it is known whether an instance gives signs of life; in others it gets no legs. */
const LOOKED_AT: ReadonlySet<InstanceState> = new Set([
  InstanceState.READY,
  InstanceState.SUSPECT,
  InstanceState.DRAINING,
]);

/** Instances of which something is not known yet, the oldest forgotten: most of them never come back. */
const MAX_OWED = 10_000;

const DEFAULT_LEASE_MS = 30_000;

/**
 * Finds decode engines that may read a prompt's blocks after their lease. Such an engine stood still while its request was
 * given up; when it goes on it reads what the blocks hold by then, answers nobody, and files that in its prefix cache as
 * the KV of the prompt, where later requests hit it. One that runs hears in time that nobody waits any more. Of one that
 * leaves the pool meanwhile nothing is known until it is back.
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
    const reader = view.snapshot().find(({ id }) => id === instanceId);
    const [url, processStartSeconds] = [reader?.url ?? '', startOf(reader)];
    const known = this.#owed.get(instanceId);
    const legs = known === undefined || isOther(known, processStartSeconds) ? [] : known.legs;
    this.#owed.set(instanceId, { url, processStartSeconds, legs: [...legs, { lease, endedAt }] });
    for (const oldest of this.#owed.keys()) {
      if (this.#owed.size <= MAX_OWED) break;
      this.#owed.delete(oldest);
    }
    this.#look();
  }

  #look(): void {
    clearTimeout(this.#timer);
    this.#timer = undefined;
    if (this.#owed.size === 0) return;
    const { now, onLate, view } = this.#deps;
    const at = now();
    let next = Number.POSITIVE_INFINITY;
    const late: string[] = [];
    const lookedAt = view.snapshot().filter(({ state }) => LOOKED_AT.has(state));
    const byId = new Map(lookedAt.map((instance) => [instance.id, instance]));
    const byUrl = new Map(lookedAt.map((instance) => [instance.url, instance]));
    for (const [instanceId, owed] of this.#owed) {
      // The same process may be back under another name.
      const instance = byId.get(instanceId) ?? byUrl.get(owed.url);
      if (instance === undefined) continue;
      const fates = isOther(owed, startOf(instance)) ? [] : owed.legs.map((leg) => this.#fateOf(instance.id, leg, at));
      if (fates.includes('late')) late.push(instance.id);
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
    // An engine that runs has heard by then that its request was given up.
    const heardBy = endedAt + settleMs(lease);
    if (silence !== undefined && silence.from <= heardBy) {
      if (mayReadLate(lease, silence, now)) return 'late';
      if (silence.until === undefined) return readableUntil(lease, silence.from) + 1;
      if (silence.until >= heardBy) return 'in-time';
    }
    const knownAt = heardBy + this.#deps.noticeMs;
    return now >= knownAt ? 'in-time' : knownAt;
  }
}

function startOf(instance: Instance | undefined): number | undefined {
  return instance?.incarnation?.processStartSeconds;
}

/** Whether it is surely another process; where that is open, its silences tell: a new life has none of the old one. */
function isOther({ processStartSeconds: before }: Owed, now: number | undefined): boolean {
  return before !== undefined && now !== undefined && before !== now;
}
