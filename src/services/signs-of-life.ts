import { create } from '@bufbuild/protobuf';
import { durationFromMs } from '@bufbuild/protobuf/wkt';
import { type Silence, SilenceSchema } from '../../gen/baton/v1/instance_pb.ts';

/** When an instance was last heard of, and the last time for which it was not; times in milliseconds of one clock. */
export class SignsOfLife {
  readonly #calmMs: () => number;
  /** What held when it was heard of last. */
  #calmBefore = 0;
  #heardAt: number | undefined;
  #from = 0;
  /** When the silence was noticed, or was over. */
  #toldAt = 0;
  #state: 'none' | 'lasting' | 'ended' = 'none';

  /** @param calmMs longest time between two signs of an instance in good health now; Infinity where nobody looks regularly */
  constructor(calmMs: () => number) {
    this.#calmMs = calmMs;
  }

  /** It gave a sign of life. */
  heard(now: number): void {
    const last = this.#heardAt;
    this.#heardAt = now;
    // Whoever looks may have stood still himself: then nothing is known of that time either.
    const calm = this.#calmMs();
    // Where the pace has changed meanwhile, both were kept to.
    const unseen = last !== undefined && now - last > Math.max(calm, this.#calmBefore);
    this.#calmBefore = calm;
    if (this.#state !== 'lasting' && !unseen) return;
    if (this.#state !== 'lasting') this.#from = last ?? now;
    this.#state = 'ended';
    this.#toldAt = now;
  }

  /** It was asked for one in vain. */
  missed(now: number): void {
    if (this.#state === 'lasting' || this.#heardAt === undefined) return;
    this.#state = 'lasting';
    this.#from = this.#heardAt;
    this.#toldAt = now;
  }

  /** The last silence of this life, the same until something changes. */
  toMessage(): Silence | undefined {
    if (this.#state === 'none') return undefined;
    const length = durationFromMs(Math.round(this.#toldAt - this.#from));
    return create(SilenceSchema, { length, ended: this.#state === 'ended' });
  }

  /** How long a silence that lasts has been by now; undefined where none does. */
  lastingMs(now: number): number | undefined {
    return this.#state === 'lasting' ? now - this.#from : undefined;
  }
}
