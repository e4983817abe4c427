import { type Instance, InstanceState } from '../../gen/baton/v1/instance_pb.ts';
import { toMs } from './durations.ts';
import type { InstanceView } from './instance-view.ts';

/** A time without a sign of life, on the caller's clock, milliseconds. */
export interface SilentTime {
  readonly from: number;
  /** Undefined while it lasts. */
  readonly until?: number;
}

interface Known extends SilentTime {
  /** What was told of it: the same words tell nothing new. */
  readonly told: string;
}

/** Beyond that the oldest are forgotten: those that have left the pool are kept, as they may come back in their silence. */
const MAX_KNOWN = 10_000;

/** Knows the last time for which each instance gave no sign of life. */
export class SilenceWatch implements Disposable {
  readonly #known = new Map<string, Known>();
  readonly #now: () => number;
  readonly #unsubscribe: () => void;

  constructor(view: Pick<InstanceView, 'snapshot' | 'onChange'>, now: () => number) {
    this.#now = now;
    this.#unsubscribe = view.onChange(() => this.#read(view));
    this.#read(view);
  }

  /** The last silence of this life, the one that lasts included; also of one that is not in the pool now. */
  of(instanceId: string): SilentTime | undefined {
    return this.#known.get(instanceId);
  }

  /** For how long it has been silent, milliseconds; 0 where it is not. */
  silentForMs(instanceId: string): number {
    const known = this.#known.get(instanceId);
    return known === undefined || known.until !== undefined ? 0 : this.#now() - known.from;
  }

  /** It has sent something to this process, which others may learn later. */
  noteAlive(instanceId: string): void {
    const known = this.#known.get(instanceId);
    if (known !== undefined && known.until === undefined) {
      this.#known.set(instanceId, { ...known, until: this.#now() });
    }
  }

  [Symbol.dispose](): void {
    this.#unsubscribe();
  }

  #read(view: Pick<InstanceView, 'snapshot'>): void {
    for (const instance of view.snapshot()) {
      const told = wordsOf(instance);
      const known = this.#known.get(instance.id);
      if (told === undefined) this.#known.delete(instance.id);
      else if (known?.told !== told) this.#known.set(instance.id, { ...this.#timeOf(instance, known), told });
    }
    for (const oldest of this.#known.keys()) {
      if (this.#known.size <= MAX_KNOWN) return;
      this.#known.delete(oldest);
    }
  }

  #timeOf({ silence }: Instance, known: Known | undefined): SilentTime {
    const now = this.#now();
    const from = now - toMs(silence?.length);
    const begun = known !== undefined && known.until === undefined ? Math.min(known.from, from) : from;
    if (silence?.ended !== true) return { from: begun };
    const heard = known !== undefined && known.until !== undefined && known.until > from ? known.until : now;
    return { from: begun, until: heard };
  }
}

/** The same targets in the same order, but those last that are silent at this time: a plan may be older than that. */
export function awakeFirst<T extends { readonly instanceId: string }>(
  targets: readonly T[],
  silences: Pick<SilenceWatch, 'silentForMs'>,
): T[] {
  const isSilent = ({ instanceId }: T) => silences.silentForMs(instanceId) > 0;
  return [...targets.filter((target) => !isSilent(target)), ...targets.filter(isSilent)];
}

/** A registry that tells no silence tells at least that checks fail. */
function wordsOf({ state, silence, incarnation }: Instance): string | undefined {
  const life = incarnation?.generation ?? 0;
  if (silence !== undefined) return `${life} ${silence.ended} ${toMs(silence.length)}`;
  return state === InstanceState.SUSPECT ? `${life} suspect` : undefined;
}
