import fc from 'fast-check';
import { describe, expect, test } from 'vitest';
import { hash32 } from '../../src/core/hash32.ts';
import type { Candidate, Policy, PolicyInput, PrefixMark } from '../../src/core/policy.ts';
import { POLICIES } from '../../src/policies/index.ts';
import { PREFIX_ENTRY_BYTES, PrefixIndex } from '../../src/policies/prefix-index.ts';
import { POLICY_SETTINGS as SETTINGS } from '../support/policy-settings.ts';
import { seeded } from '../support/seeded.ts';

const make = (name: keyof typeof POLICIES): Policy => POLICIES[name](SETTINGS);

function candidate(id: string, changes: Partial<Candidate> = {}): Candidate {
  return { id, hash: hash32(id), inFlight: 0, lastPick: 0, weight: 1, reading: undefined, ...changes };
}

type Ask = Partial<Omit<PolicyInput<Candidate>, 'candidates' | 'request'>> & Partial<PolicyInput<Candidate>['request']>;

/** The ids in the policy's order. */
function rank(policy: Policy, candidates: readonly Candidate[], ask: Ask = {}): string {
  const { count = 8, random = () => 0, now = 0, session = '', prefix = [] } = ask;
  const ranked = policy.rank({ candidates, count, random, now, request: { session, prefix } });
  return ranked.map(({ id }) => id).join(' ');
}

const learn = (policy: Policy, id: string, request: Partial<PolicyInput<Candidate>['request']>, now = 0) =>
  policy.learn?.({ session: '', prefix: [], ...request }, candidate(id), now);

const marks = (...names: readonly number[]): readonly PrefixMark[] =>
  names.map((name, i) => ({ hash: BigInt(name), bytes: 100 * (i + 1) }));

describe.each(Object.keys(POLICIES))('%s', (name) => {
  const [, of = () => make('random')] = Object.entries(POLICIES).find(([key]) => key === name) ?? [];

  test('ranks as many as are wanted, each once, and nothing else', () => {
    const pool = fc.uniqueArray(fc.tuple(fc.string(), fc.nat(20), fc.nat(20), fc.constantFrom(0.5, 1, 3)), {
      selector: ([id]) => id,
      minLength: 1,
      maxLength: 12,
    });
    fc.assert(
      fc.property(pool, fc.integer({ min: 1, max: 10 }), fc.string(), fc.nat(), (rows, count, session, seed) => {
        const policy = of(SETTINGS);
        const prefix = marks(1, 2, 3);
        const candidates = rows.map(([id, inFlight, lastPick, weight]) =>
          candidate(id, { inFlight, lastPick, weight }),
        );
        for (const known of candidates.slice(0, 3)) policy.learn?.({ session, prefix }, known, 0);
        const input = { candidates, count, random: seeded(seed), now: 0, request: { session, prefix } };
        const ranked = policy.rank(input);
        expect(new Set(ranked).size).toBe(ranked.length);
        expect(ranked.length).toBe(Math.min(count, candidates.length));
        for (const each of ranked) expect(candidates).toContain(each);
      }),
      { numRuns: 100 },
    );
  });
});

describe('the work of a pick', () => {
  /** How often a pick looks at the load of a candidate. */
  function looks(name: keyof typeof POLICIES, size: number): number {
    let count = 0;
    const pool = Array.from({ length: size }, (_, i) => ({
      ...candidate(`${i}`),
      get inFlight() {
        count += 1;
        return i % 7;
      },
    }));
    const policy = make(name);
    for (let i = 0; i < 50; i++) rank(policy, pool, { session: `s${i}`, random: seeded(i), prefix: marks(i) });
    return count / 50;
  }

  test.each(['random', 'power_of_two'] as const)('does not grow with the pool: %s', (name) => {
    expect(looks(name, 1000)).toBeLessThanOrEqual(looks(name, 10));
  });

  test.each(['round_robin', 'least_loaded', 'weighted', 'consistent_hash', 'cache_aware'] as const)(
    'grows with it at most in proportion: %s',
    (name) => {
      expect(looks(name, 1000)).toBeLessThanOrEqual(100 * looks(name, 10) + 16);
    },
  );
});

describe('round_robin', () => {
  test('is the turn of the one whose last turn is longest ago, also of one that comes new', () => {
    const pool = [candidate('a', { lastPick: 7 }), candidate('b', { lastPick: 5 }), candidate('c', { lastPick: 6 })];
    expect(rank(make('round_robin'), pool)).toBe('b c a');
    expect(rank(make('round_robin'), [...pool, candidate('new')])).toBe('new b c a');
  });
});

test('random gives every instance the first place, and every other, as often', () => {
  const pool = Array.from({ length: 5 }, (_, i) => candidate(`${i}`));
  const random = seeded(3);
  const places = new Map<string, number>();
  for (let i = 0; i < 6000; i++) {
    for (const [place, id] of rank(make('random'), pool, { random, count: 3 }).split(' ').entries()) {
      places.set(`${place}:${id}`, (places.get(`${place}:${id}`) ?? 0) + 1);
    }
  }
  expect(places.size).toBe(15);
  for (const count of places.values()) expect(count / 1200).toBeCloseTo(1, 0);
});

describe('power_of_two', () => {
  test('the less loaded of two, whichever two are drawn', () => {
    const pool = [candidate('idle'), candidate('busy', { inFlight: 9 })];
    for (const seed of [1, 2, 3, 4])
      expect(rank(make('power_of_two'), pool, { random: seeded(seed) })).toBe('idle busy');
  });

  test('of many, two are looked at for the first place, and each is as likely to be', () => {
    const pool = Array.from({ length: 10 }, (_, i) => candidate(`${i}`, { inFlight: i }));
    const random = seeded(5);
    const firsts = new Map<string, number>();
    for (let i = 0; i < 6000; i++) {
      const [first = ''] = rank(make('power_of_two'), pool, { random }).split(' ');
      firsts.set(first, (firsts.get(first) ?? 0) + 1);
    }
    // The i-th idlest of ten wins 9 - i of the 45 pairs.
    for (let i = 0; i < 10; i++) expect((firsts.get(`${i}`) ?? 0) / 6000).toBeCloseTo((9 - i) / 45, 1);
    expect(firsts.has('9')).toBe(false);
  });
});

describe('least_loaded', () => {
  const policy = make('least_loaded');
  const reading = (changes: Partial<NonNullable<Candidate['reading']>> = {}) => ({
    reading: { foreign: 0, waiting: 0, kvUsage: 0, at: 0, ...changes },
  });

  test('own legs for each unit of weight; equal ones take turns', () => {
    expect(rank(policy, [candidate('a', { inFlight: 3 }), candidate('b', { inFlight: 4, weight: 2 })])).toBe('b a');
    expect(rank(policy, [candidate('a', { lastPick: 2 }), candidate('b', { lastPick: 1 })])).toBe('b a');
  });

  test.each([
    ['what others sent there', { foreign: 3 }],
    ['what waits there', { waiting: 3 }],
    ['KV blocks that are used up', { kvUsage: 0.95 }],
  ])('counts %s', (_, changes) => {
    const pool = [candidate('told', { inFlight: 2, ...reading(changes) }), candidate('other', { inFlight: 3 })];
    expect(rank(policy, pool)).toBe('other told');
    // An old reading says nothing any more.
    expect(rank(policy, pool, { now: 31_000 })).toBe('told other');
  });
});

describe('weighted', () => {
  test('turns in proportion to the weights, evenly spread, also for one that was away', () => {
    const policy = make('weighted');
    const [a, b] = [candidate('a', { weight: 3 }), candidate('b')];
    const turns = (pool: readonly Candidate[], count: number) =>
      Array.from({ length: count }, () => {
        const [first] = policy.rank({ candidates: pool, count: 1, random: () => 0, now: 0, request: EMPTY });
        if (first !== undefined) policy.learn?.(EMPTY, first, 0);
        return first?.id;
      }).join('');
    expect(turns([a, b], 400).replaceAll('b', '').length).toBe(300);
    expect(turns([a, b], 40)).not.toContain('bb');
    expect(turns([a], 50)).toBe('a'.repeat(50));
    // It is level again after one turn.
    expect(turns([a, b], 40)).not.toContain('bb');
  });
});

const EMPTY = { session: '', prefix: [] };

describe('consistent_hash', () => {
  const policy = make('consistent_hash');
  const ids = Array.from({ length: 10 }, (_, i) => `10.0.0.${i}:8000`);
  const home = (pool: readonly Candidate[], session: string) => rank(policy, pool, { session, count: 1 });
  const sessions = Array.from({ length: 2000 }, (_, i) => `t\n${i}`);

  test('a conversation stays; all get their share, by weight', () => {
    const pool = ids.map((id, i) => candidate(id, { weight: i === 0 ? 3 : 1 }));
    const counts = new Map<string, number>();
    for (const session of sessions) {
      const place = home(pool, session);
      expect(home(pool.toReversed(), session)).toBe(place);
      counts.set(place, (counts.get(place) ?? 0) + 1);
    }
    for (const [id, count] of counts) expect(count / (2000 / 12) / (id === ids[0] ? 3 : 1)).toBeCloseTo(1, 0);
  });

  test('when one leaves, only its conversations move, and to all the others', () => {
    const pool = ids.map((id) => candidate(id));
    const moved = new Map<string, number>();
    for (const session of sessions) {
      const before = home(pool, session);
      const after = home(pool.slice(1), session);
      if (before !== ids[0]) expect(after).toBe(before);
      else moved.set(after, (moved.get(after) ?? 0) + 1);
    }
    expect(moved.size).toBe(9);
  });

  test('one that has its share takes no more', () => {
    const pool = ids.map((id) => candidate(id, { inFlight: 8 }));
    const place = home(pool, 's');
    const full = pool.map((each) => (each.id === place ? { ...each, inFlight: 11 } : each));
    expect(home(full, 's')).not.toBe(place);
    expect(rank(policy, full, { session: 's', count: 10 }).split(' ').at(-1)).toBe(place);
  });
});

describe('sticky_least_loaded', () => {
  const pool = [candidate('a'), candidate('b', { inFlight: 1 }), candidate('c', { inFlight: 2 })];

  test('a conversation stays where it was until that has too much to do', () => {
    const policy = make('sticky_least_loaded');
    expect(rank(policy, pool, { session: 's' })).toBe('a b c');
    learn(policy, 'c', { session: 's' });
    expect(rank(policy, pool, { session: 's' })).toBe('c a b');
    expect(rank(policy, pool, { session: 'other' })).toBe('a b c');
    const busy = [...pool.slice(0, 2), candidate('c', { inFlight: 3 })];
    expect(rank(policy, busy, { session: 's' })).toBe('a b c');
    expect(rank(policy, pool.slice(0, 2), { session: 's' })).toBe('a b');
  });

  test('the conversations that were quiet longest are forgotten', () => {
    const policy = make('sticky_least_loaded');
    for (const session of ['one', 'two', 'one', 'three']) learn(policy, 'c', { session });
    const firsts = ['one', 'two', 'three'].map((session) => rank(policy, pool, { session, count: 1 }));
    expect(firsts).toEqual(['c', 'a', 'c']);
  });
});

describe('cache_aware', () => {
  const pool = [candidate('a'), candidate('b', { inFlight: 1 }), candidate('c', { inFlight: 2 })];

  test('the longest known beginning wins, the least loaded where little is known', () => {
    const policy = make('cache_aware');
    learn(policy, 'b', { prefix: marks(1, 2) });
    learn(policy, 'c', { prefix: marks(1, 2, 3) });
    expect(rank(policy, pool, { prefix: marks(1, 2, 3, 4) })).toBe('c b a');
    expect(rank(policy, pool, { prefix: marks(1, 2, 9) })).toBe('b c a');
    // 100 of 400 bytes are less than the threshold.
    expect(rank(policy, pool, { prefix: marks(1, 7, 8, 9) })).toBe('a b c');
    expect(rank(policy, pool, { prefix: marks(9) })).toBe('a b c');
    expect(rank(policy, pool)).toBe('a b c');
  });

  test('one that has much more to do than the idlest is left alone, and the next longest is taken', () => {
    const policy = make('cache_aware');
    learn(policy, 'b', { prefix: marks(1, 2) });
    learn(policy, 'c', { prefix: marks(1, 2, 3) });
    const busy = [...pool.slice(0, 2), candidate('c', { inFlight: 5 })];
    expect(rank(policy, busy, { prefix: marks(1, 2, 3) })).toBe('b a c');
  });

  test('what was not used for long is not believed to be cached', () => {
    const policy = make('cache_aware');
    learn(policy, 'c', { prefix: marks(1, 2) }, 0);
    expect(rank(policy, pool, { prefix: marks(1, 2), now: 1000 })).toBe('c a b');
    expect(rank(policy, pool, { prefix: marks(1, 2), now: 1001 })).toBe('a b c');
  });

  test('the index keeps to its bytes, the least recently used beginning goes first', () => {
    const index = new PrefixIndex(10 * PREFIX_ENTRY_BYTES, 0);
    for (let i = 0; i < 100; i++) {
      index.add(marks(1, 2), 'kept', i);
      index.add(marks(1000 + i), 'other', i);
    }
    expect(index.size).toBe(10);
    expect(index.match(marks(1, 2), 1e9).get('kept')).toBe(200);
    expect(index.match(marks(1000), 0).size).toBe(0);
    expect(index.match(marks(1099), 0).size).toBe(1);
  });

  test('a few holders of each beginning are remembered, the latest ones', () => {
    const index = new PrefixIndex(1e6, 0);
    for (const id of ['a', 'b', 'c', 'd', 'e', 'b']) index.add(marks(1), id, 0);
    expect([...index.match(marks(1), 0).keys()].toSorted()).toEqual(['b', 'c', 'd', 'e']);
  });
});
