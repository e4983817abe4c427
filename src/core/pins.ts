/** What is known of the pins of a decode instance at one moment. */
export interface PinReading {
  /** Blocks that stored handles name; a block that several share counts once for each. */
  readonly pinnedBlocks: number;
  /** KV blocks of the instance; 0 while unknown. */
  readonly totalBlocks: number;
  /** Share of its KV blocks in use, 0 to 1, as the engine told last; undefined while unknown. */
  readonly usage: number | undefined;
  /** Requests that the engine had then. */
  readonly requests: number;
}

/**
 * `above` and `below`: the watermark was crossed; `effective` and `ineffective`: the engine's use of its blocks fell, or
 * did not, after handles were given back; `stuck`: nothing carries them back.
 */
export type PinEvent = 'above' | 'below' | 'effective' | 'ineffective' | 'stuck';

/** Settings of a {@link PinGuard}. */
export interface PinGuardSettings {
  /** Pinned share above which handles are given back, 0 to 1. */
  readonly watermark: number;
  /** How long it takes until what was given back shows in the engine's readings, milliseconds. */
  readonly settleMs: number;
}

/** Handles are given back until the share is this part of the watermark, so that not every turn crosses it anew. */
const LOW = 0.8;
/** Handles after which the engine must show something. */
const MIN_RELEASES = 16;
/** Share of the blocks that must have become free by the store's count before the engine's is compared. */
const MIN_FALL = 0.05;

/** Share of the instance's blocks that is pinned, 0 to 1; undefined where its number of blocks is not known. */
export function pinnedShare({ pinnedBlocks, totalBlocks, usage }: PinReading): number | undefined {
  if (totalBlocks === 0) return undefined;
  // Pinned blocks are in use, so what is more than that are blocks that several handles share.
  return Math.min(pinnedBlocks / totalBlocks, usage ?? 1);
}

interface Base extends PinReading {
  readonly at: number;
}

/** Decides for one decode instance how many blocks are to be given back, and whether that helps. */
export class PinGuard {
  readonly #settings: () => PinGuardSettings;
  #above = false;
  #allowance = 0;
  #allowedAt = Number.NEGATIVE_INFINITY;
  /** Where the engine stood when the releases that are looked at began. */
  #base: Base | undefined;
  #released = 0;
  #toldStuck = false;

  /** @param settings asked with every look */
  constructor(settings: () => PinGuardSettings) {
    this.#settings = settings;
  }

  /** Blocks of idle handles that may be given back until the next look. */
  get allowance(): number {
    return this.#allowance;
  }

  /** A handle was given back, or was lost on the way. */
  noteReleased(blocks: number): void {
    this.#allowance = Math.max(0, this.#allowance - blocks);
    if (this.#base !== undefined) this.#released += 1;
  }

  /** Takes a reading at `now`; `isNew` if the engine told something new since the last one. */
  look(reading: PinReading, isNew: boolean, now: number): readonly PinEvent[] {
    const share = pinnedShare(reading);
    if (share === undefined) return [];
    const events: PinEvent[] = [];
    const { watermark, settleMs } = this.#settings();
    const low = LOW * watermark;
    if (!this.#above && share > watermark) {
      events.push('above');
      this.#above = true;
      this.#toldStuck = false;
      this.#base ??= { ...reading, at: now };
    } else if (this.#above && share <= low) {
      events.push('below');
      this.#above = false;
      this.#allowance = 0;
    }
    if (this.#above && (this.#isCounted(reading) || isNew || now - this.#allowedAt >= settleMs)) {
      this.#allowance = Math.max(1, Math.round((share - low) * reading.totalBlocks));
      this.#allowedAt = now;
    }
    return [...events, ...this.#judge(reading, now)];
  }

  /** The store's own count rules, which knows of each release at once; the engine's shows them with its next reading. */
  #isCounted({ pinnedBlocks, totalBlocks, usage = 1 }: PinReading): boolean {
    return pinnedBlocks <= usage * totalBlocks;
  }

  #judge(reading: PinReading, now: number): readonly PinEvent[] {
    const base = this.#base;
    if (base === undefined || now - base.at < this.#settings().settleMs) return [];
    if (this.#above && this.#released === 0) {
      const isNews = !this.#toldStuck;
      this.#toldStuck = true;
      return isNews ? ['stuck'] : [];
    }
    const fall = (base.pinnedBlocks - reading.pinnedBlocks) / reading.totalBlocks;
    const isKnown = base.usage !== undefined && reading.usage !== undefined;
    const isDue = this.#released >= MIN_RELEASES && fall >= MIN_FALL && isKnown;
    if (this.#above && !isDue) return [];
    this.#base = this.#above ? { ...reading, at: now } : undefined;
    this.#released = 0;
    if (!isDue) return [];
    if ((reading.usage ?? 0) < (base.usage ?? 0)) return ['effective'];
    // New work may have taken the blocks that became free.
    return reading.requests <= base.requests ? ['ineffective'] : [];
  }
}
