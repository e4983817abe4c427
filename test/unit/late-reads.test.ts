import { create } from '@bufbuild/protobuf';
import { durationFromMs } from '@bufbuild/protobuf/wkt';
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import { type Incarnation, InstanceState, SilenceSchema } from '../../gen/baton/v1/instance_pb.ts';
import { Leg, LegReportSchema } from '../../gen/baton/v1/router_pb.ts';
import { LateReads } from '../../src/services/late-reads.ts';
import { SignsOfLife } from '../../src/services/signs-of-life.ts';
import { SilenceWatch } from '../../src/services/silence-watch.ts';
import { decodeOf, Pools, prefillOf } from '../support/plan-instances.ts';

const LEASE_MS = 30_000;
const NOTICE_MS = 7_500;
/** An engine that goes on so shortly before the end of a lease may read after it. */
const SETTLED_MS = LEASE_MS / 6;

/** One D as its registry sees it, and what a router concludes; time is moved by the test. */
function setUp() {
  const now = () => performance.now();
  const signs = new SignsOfLife(() => NOTICE_MS);
  let life: Required<Pick<Incarnation, 'generation' | 'processStartSeconds'>> = {
    generation: 1,
    processStartSeconds: 100,
  };
  const tell = (state: InstanceState = InstanceState.READY, id = 'd') => {
    const silence = signs.toMessage();
    const incarnation = { $typeName: 'baton.v1.Incarnation' as const, engineId: '', ...life };
    pools.set([prefillOf('p'), decodeOf(id, { url: 'http://d', state, incarnation, ...(silence && { silence }) })]);
  };
  const pools = new Pools([prefillOf('p'), decodeOf('d')]);
  const silences = new SilenceWatch(pools, now);
  const late: string[] = [];
  const reads = new LateReads({ view: pools, silences, noticeMs: NOTICE_MS, onLate: (id) => late.push(id), now });
  const heard = () => {
    signs.heard(now());
    tell();
  };
  heard();
  return {
    late,
    silences,
    heard,
    missed: () => {
      signs.missed(now());
      tell();
    },
    restart: () => {
      life = { generation: life.generation + 1, processStartSeconds: 200 };
      tell();
    },
    leave: () => pools.set([prefillOf('p')]),
    /** Named again, and not heard of yet. */
    comeBack: (processStartSeconds: number) => {
      life = { generation: life.generation + 1, processStartSeconds };
      tell(InstanceState.STARTING);
    },
    comeBackAs: (id: string) => {
      signs.heard(now());
      tell(InstanceState.READY, id);
    },
    /** A leg ended without a reply; so much of P's lease was left. */
    unread: (leftMs: number) =>
      reads.note(
        create(LegReportSchema, {
          leg: Leg.DECODE,
          instanceId: 'd',
          peerInstanceId: 'p',
          unreadLease: durationFromMs(leftMs),
        }),
      ),
    pass: (ms: number) => vi.advanceTimersByTime(ms),
  };
}

beforeEach(() => void vi.useFakeTimers({ toFake: ['performance', 'setTimeout', 'clearTimeout'] }));
afterEach(() => void vi.useRealTimers());

describe('an engine that was given up', () => {
  it('may have read late when it is silent until the lease is over', () => {
    const { late, missed, pass, unread } = setUp();
    pass(2000);
    missed();
    pass(18_000);
    unread(10_000);
    pass(10_000 - SETTLED_MS - 100);
    expect(late).toEqual([]);
    pass(200);
    expect(late).toEqual(['d']);
    pass(100_000);
    expect(late).toEqual(['d']);
  });

  it.each([
    ['it is heard of before', 'heard'],
    ['its life ended meanwhile', 'restart'],
  ] as const)('has not when %s', (_, event) => {
    const { late, missed, pass, unread, ...engine } = setUp();
    missed();
    pass(18_000);
    unread(10_000);
    pass(4_000);
    engine[event]();
    pass(100_000);
    expect(late).toEqual([]);
  });

  it.each([
    ['before its silence was noticed', false],
    ['in its silence', true],
  ])('may have read late when it left the pool %s, and is back', (_, isNoticed) => {
    const { comeBack, heard, late, leave, missed, pass, unread } = setUp();
    pass(1000);
    unread(10_000);
    if (isNoticed) missed();
    leave();
    pass(60_000);
    comeBack(100);
    pass(60_000);
    expect(late).toEqual([]);
    heard();
    expect(late).toEqual(['d']);
  });

  it('is found again under another name at its URL', () => {
    const { comeBackAs, late, leave, pass, unread } = setUp();
    pass(1000);
    unread(10_000);
    leave();
    pass(60_000);
    comeBackAs('other');
    expect(late).toEqual(['other']);
  });

  it('has not when another process comes back in its place', () => {
    const { comeBack, heard, late, leave, pass, unread } = setUp();
    pass(1000);
    unread(10_000);
    leave();
    pass(60_000);
    comeBack(200);
    heard();
    pass(100_000);
    expect(late).toEqual([]);
  });

  it('may have when it goes on shortly before the lease is over: what it reads it reads then', () => {
    const { heard, late, missed, pass, unread } = setUp();
    missed();
    pass(LEASE_MS - SETTLED_MS / 2);
    unread(SETTLED_MS / 2);
    heard();
    expect(late).toEqual(['d']);
  });

  it('may have when it goes on after the lease, and the leg ends only then', () => {
    const { heard, late, missed, pass, unread } = setUp();
    missed();
    pass(LEASE_MS + 1000);
    heard();
    unread(-1000);
    expect(late).toEqual(['d']);
  });

  it('is looked at for as long as a silence may stay unseen', () => {
    const { heard, late, missed, pass, unread } = setUp();
    unread(12_000);
    pass(NOTICE_MS);
    missed();
    pass(30_000);
    expect(late).toEqual(['d']);
    heard();
    unread(12_000);
    pass(NOTICE_MS + 1001);
    heard();
    pass(1);
    missed();
    pass(100_000);
    expect(late).toEqual(['d']);
  });

  it('kept a lease with its heartbeats for half of its length after it was last heard of', () => {
    const { heard, late, missed, pass, unread } = setUp();
    pass(100_000);
    heard();
    missed();
    pass(LEASE_MS / 2 - SETTLED_MS - 100);
    unread(0);
    expect(late).toEqual([]);
    pass(200);
    expect(late).toEqual(['d']);
  });
});

describe('silence', () => {
  it('is one although nobody looked, where whoever looks stood still himself', () => {
    const { heard, late, pass, silences, unread } = setUp();
    const start = performance.now();
    pass(40_000);
    heard();
    expect(silences.of('d')).toMatchObject({ from: start, until: start + 40_000 });
    expect(silences.silentForMs('d')).toBe(0);
    unread(-10_000);
    expect(late).toEqual(['d']);
  });

  it('ends with what the engine sends, whoever gets it', () => {
    const { heard, missed, pass, silences } = setUp();
    pass(5000);
    missed();
    pass(1000);
    expect(silences.silentForMs('d')).toBe(6000);
    silences.noteAlive('d');
    const heardAt = performance.now();
    expect(silences.silentForMs('d')).toBe(0);
    pass(3000);
    heard();
    expect(silences.of('d')?.until).toBe(heardAt);
  });

  it('of a registry that does not tell it begins when an engine is suspect', () => {
    const pools = new Pools([decodeOf('d')]);
    using silences = new SilenceWatch(pools, () => performance.now());
    pools.set([decodeOf('d', { state: 3 })]);
    vi.advanceTimersByTime(4000);
    expect(silences.silentForMs('d')).toBe(4000);
    pools.set([decodeOf('d')]);
    expect(silences.of('d')).toBeUndefined();
    pools.set([decodeOf('d', { silence: create(SilenceSchema, { length: durationFromMs(700) }) })]);
    expect(silences.silentForMs('d')).toBe(700);
  });
});

it('a change of the pace of the checks is no silence', () => {
  let calm = 100;
  const signs = new SignsOfLife(() => calm);
  signs.heard(0);
  calm = 10;
  signs.heard(90);
  expect(signs.toMessage()).toBeUndefined();
  calm = 100;
  signs.heard(180);
  expect(signs.toMessage()).toBeUndefined();
  calm = 10;
  signs.heard(190);
  signs.heard(210);
  expect(signs.toMessage()?.ended).toBe(true);
});
