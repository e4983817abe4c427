import { describe, expect, test } from 'vitest';
import { PinGuard, type PinReading, pinnedShare } from '../../src/core/pins.ts';

/** Of 1,000 blocks: pinned ones by the store, used ones by the engine. */
const at = (pinnedBlocks: number, used?: number, requests = 0): PinReading => ({
  pinnedBlocks,
  totalBlocks: 1000,
  usage: used === undefined ? undefined : used / 1000,
  requests,
});

const guard = () => new PinGuard(() => ({ watermark: 0.6, settleMs: 1000 }));

/** Handles of 10 blocks each are given back. */
function release(pins: PinGuard, count: number): void {
  for (let i = 0; i < count; i++) pins.noteReleased(10);
}

describe('the pinned share', () => {
  test.each([
    ['of the blocks', at(300, 500), 0.3],
    ['where the engine tells no use', at(300), 0.3],
    ['is no more than what is in use: handles share blocks', at(1500, 400), 0.4],
    ['is unknown without the number of blocks', { ...at(300), totalBlocks: 0 }, undefined],
  ])('%s', (_, reading, share) => expect(pinnedShare(reading)).toBe(share));
});

describe('the watermark', () => {
  test('nothing is given back up to it; above it as much as brings the share to four fifths of it', () => {
    const pins = guard();
    expect(pins.look(at(600, 700), true, 0)).toEqual([]);
    expect(pins.allowance).toBe(0);
    expect(pins.look(at(601, 700), true, 100)).toEqual(['above']);
    expect(pins.allowance).toBe(121);
    release(pins, 12);
    expect(pins.allowance).toBe(1);
    expect(pins.look(at(481, 700), false, 200)).toEqual([]);
    expect(pins.allowance).toBe(1);
    release(pins, 1);
    expect(pins.look(at(471, 700), false, 300)).toEqual(['below']);
    expect(pins.allowance).toBe(0);
    expect(pins.look(at(590, 700), true, 400)).toEqual([]);
    expect(pins.allowance).toBe(0);
  });

  test('where handles share blocks, no more is given back until the engine has told anew', () => {
    const pins = guard();
    pins.look(at(3000, 650), true, 0);
    expect(pins.allowance).toBe(170);
    release(pins, 17);
    pins.look(at(2830, 650), false, 500);
    expect(pins.allowance).toBe(0);
    pins.look(at(2830, 640), true, 600);
    expect(pins.allowance).toBe(160);
    release(pins, 16);
    // It tells nothing new, so nothing has changed.
    pins.look(at(2670, 640), false, 1599);
    expect(pins.allowance).toBe(0);
    pins.look(at(2670, 640), false, 1600);
    expect(pins.allowance).toBe(160);
  });

  test('an instance whose blocks are unknown has none', () => {
    const pins = guard();
    expect(pins.look({ ...at(9000, 900), totalBlocks: 0 }, true, 0)).toEqual([]);
    expect(pins.allowance).toBe(0);
  });
});

describe('the effect is read off the engine', () => {
  /** What is said a settle time after `handles` of 10 blocks were given back. */
  const told = (handles: number, reading: PinReading, first = at(700, 800, 5), atMs = 1000) => {
    const pins = guard();
    expect(pins.look(first, true, 0)).toEqual(['above']);
    release(pins, handles);
    return pins.look(reading, true, atMs).filter((event) => event !== 'below');
  };

  test.each([
    ['its use fell as much', 20, at(500, 600, 5), ['effective']],
    ['its use fell, and the reading is a little late', 20, at(500, 690, 5), ['effective']],
    ['its use stayed', 20, at(500, 800, 5), ['ineffective']],
    ['its use stayed, but it has more to do', 20, at(500, 800, 6), []],
    ['too few handles went', 15, at(550, 800, 5), []],
    ['hardly less is pinned: as much came as went, and the readings are late', 20, at(700, 800, 5), []],
    ['the engine tells no use any more', 20, at(500, undefined, 5), []],
  ])('%s', (_, handles, reading, events) => expect(told(handles, reading)).toEqual(events));

  test('where handles share blocks, it falls by what each has for itself', () => {
    const shared = at(2800, 700);
    expect(told(40, at(2400, 600), shared)).toEqual(['effective']);
    expect(told(40, at(2400, 700), shared)).toEqual(['ineffective']);
  });

  test('not before it can show', () => {
    expect(told(20, at(500, 800, 5), at(700, 800, 5), 999)).toEqual([]);
  });

  test('also when the share is below again before it can', () => {
    const pins = guard();
    pins.look(at(700, 800), true, 0);
    release(pins, 25);
    expect(pins.look(at(450, 800), false, 500)).toEqual(['below']);
    expect(pins.look(at(450, 800), false, 1000)).toEqual(['ineffective']);
    expect(pins.look(at(450, 800), false, 2000)).toEqual([]);
  });

  test('where as much comes as goes, after some time: what was never freed adds up', () => {
    const run = (usedAt: (step: number) => number) => {
      const pins = guard();
      const events = [...pins.look(at(700, 800), true, 0)];
      for (let step = 1; step <= 8; step++) {
        release(pins, 5);
        events.push(...pins.look(at(700, usedAt(step)), true, 1000 * step));
      }
      return events;
    };
    expect(run(() => 800)).toEqual(['above', 'effective', 'effective']);
    // The readings are one step late.
    expect(run((step) => 800 + 50 * (step - 1))).toEqual(['above', 'ineffective', 'ineffective']);
  });

  test('a flood that is over does not make late readings look like blocks that stay', () => {
    const pins = guard();
    pins.look(at(100, 100), true, 0);
    pins.look(at(400, 100), false, 1000);
    // 400 more came, of which the engine has told half.
    expect(pins.look(at(800, 610), true, 2000)).toEqual(['above']);
    release(pins, 30);
    expect(pins.look(at(500, 700), true, 3000)).toEqual([]);
    expect(pins.look(at(450, 450), true, 4000)).toEqual(['below']);
  });

  test('where nothing carries them back, it is said once each time the watermark is crossed', () => {
    const pins = guard();
    pins.look(at(700, 800), true, 0);
    expect(pins.look(at(700, 800), true, 4999)).toEqual([]);
    expect(pins.look(at(700, 800), true, 5000)).toEqual(['stuck']);
    expect(pins.look(at(710, 800), true, 8000)).toEqual([]);
    // Time frees them in the end.
    expect(pins.look(at(100, 200), true, 9000)).toEqual(['below']);
    expect(pins.look(at(700, 800), true, 10_000)).toEqual(['above']);
    expect(pins.look(at(700, 800), true, 15_000)).toEqual(['stuck']);
  });
});
