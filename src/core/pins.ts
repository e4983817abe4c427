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
/** Share of the blocks that must have been given back before the engine's use is compared. */
const MIN_PART = 0.05;
/** How much more must be given back than comes anew while the readings of the engine lag behind. */
const MARGIN = 4;
/** Settle times in which half of what is known of the pace of new pins fades. */
const FADE = 4;
/** Settle times in which something must go back. */
const STUCK = 5;
/** Settle times after which nothing can be said any more. */
const PATIENCE = 30;

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
  /** Where the engine stood when the releases that are looked at began, and what was given back since. */
  #base: Base | undefined;
  #handles = 0;
  #blocks = 0;
  #last: { readonly pinnedBlocks: number; readonly blocks: number; readonly at: number } | undefined;
  /** Blocks that new handles pinned in a settle time, at the worst of late. */
  #pace = 0;
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
    this.#handles += 1;
    this.#blocks += blocks;
  }

  /** Takes a reading at `now`; `isNew` if the engine told something new since the last one. */
  look(reading: PinReading, isNew: boolean, now: number): readonly PinEvent[] {
    const share = pinnedShare(reading);
    if (share === undefined) return [];
    const events: PinEvent[] = [];
    const { watermark, settleMs } = this.#settings();
    const low = LOW * watermark;
    this.#notePace(reading, settleMs, now);
    if (!this.#above && share > watermark) {
      events.push('above');
      this.#above = true;
      this.#toldStuck = false;
      if (this.#base === undefined) this.#begin(reading, now);
    } else if (this.#above && share <= low) {
      events.push('below');
      this.#above = false;
      this.#allowance = 0;
      if (this.#handles === 0) this.#base = undefined;
    }
    if (this.#above && (isCounted(reading) || isNew || now - this.#allowedAt >= settleMs)) {
      this.#allowance = Math.max(1, Math.round((share - low) * reading.totalBlocks));
      this.#allowedAt = now;
    }
    return [...events, ...this.#judge(reading, settleMs, now)];
  }

  #begin(reading: PinReading, now: number): void {
    this.#base = { ...reading, at: now };
    this.#handles = 0;
    this.#blocks = 0;
    this.#last = { pinnedBlocks: reading.pinnedBlocks, blocks: 0, at: now };
  }

  #notePace({ pinnedBlocks }: PinReading, settleMs: number, now: number): void {
    const { blocks } = this.#last ?? { blocks: 0 };
    const last = this.#last;
    this.#last = { pinnedBlocks, blocks: this.#blocks, at: now };
    if (last === undefined || now <= last.at) return;
    const settles = (now - last.at) / settleMs;
    const came = Math.max(0, pinnedBlocks - last.pinnedBlocks + this.#blocks - blocks);
    this.#pace = Math.max(came / settles, this.#pace * 0.5 ** (settles / FADE));
  }

  #judge(reading: PinReading, settleMs: number, now: number): readonly PinEvent[] {
    const base = this.#base;
    if (base === undefined || now - base.at < settleMs) return [];
    if (this.#allowance > 0 && this.#handles === 0) {
      if (now - base.at < STUCK * settleMs) return [];
      const isNews = !this.#toldStuck;
      this.#toldStuck = true;
      return isNews ? ['stuck'] : [];
    }
    const least = Math.max(MIN_PART * reading.totalBlocks, MARGIN * this.#pace);
    if (this.#handles < MIN_RELEASES || this.#blocks < least) {
      if (!this.#above && now - base.at > PATIENCE * settleMs) this.#base = undefined;
      return [];
    }
    const verdict = didFall(base, reading, this.#blocks);
    if (this.#above) this.#begin(reading, now);
    else this.#base = undefined;
    if (verdict === undefined) return [];
    return [verdict ? 'effective' : 'ineffective'];
  }
}

/** The store's own count rules, which knows of each release at once; the engine's shows them with its next reading. */
function isCounted({ pinnedBlocks, totalBlocks, usage = 1 }: PinReading): boolean {
  return pinnedBlocks <= usage * totalBlocks;
}

/**
 * Whether the use of an engine is nearer to what it is without the `blocks` that were given back than with them; undefined
 * where its use is not known, or where it has more to do than before, which may have taken what became free.
 */
function didFall(before: PinReading, after: PinReading, blocks: number): boolean | undefined {
  if (before.usage === undefined || after.usage === undefined) return undefined;
  const used = before.usage * before.totalBlocks;
  // Less is in use than is counted: handles share blocks, and each frees only its own.
  const part = Math.min(1, used / before.pinnedBlocks);
  const besides = Math.max(0, used - before.pinnedBlocks);
  const without = after.pinnedBlocks * part + besides;
  if (after.usage * after.totalBlocks < without + (blocks * part) / 2) return true;
  return after.requests > before.requests ? undefined : false;
}
